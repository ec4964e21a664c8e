"""The Triton twin of Adam, run by Triton's interpreter in a process of its own (the mode is fixed at import)."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

COMPARE = """
import itertools, os, torch
from trilithon.kernels import adam_step

def bits_equal(a, b):
    if a is None or b is None:
        return a is b
    return bool((((a == b) & (a.signbit() == b.signbit())) | (a.isnan() & b.isnan())).all())

torch.manual_seed(0)
types = (torch.float32, torch.bfloat16, torch.float16)
for grad, low, decoupled, decay in itertools.product(types, (None, *types), (True, False), (0.0, 0.1)):
    numel = 1500
    g = torch.randn(numel) * torch.randn(numel).mul(4).exp()
    g[:5] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan])
    copy = None if low is None else torch.zeros(numel, dtype=low)
    start = [torch.randn(numel), g.to(grad), 0.1 * torch.randn(numel), torch.rand(numel), copy]
    results = []
    for kernels in ("torch", "triton"):
        os.environ["TRILITHON_KERNELS"] = kernels
        mine = [None if t is None else t.clone() for t in start]
        adam_step(*mine, lr=0.01, step=3, weight_decay=decay, decoupled=decoupled, grad_scale=0.37)
        results.append(mine)
    same = [bits_equal(a, b) for a, b in zip(*results)]
    assert all(same), (grad, low, decoupled, decay, same)
    assert not torch.equal(results[0][0], start[0])
os.environ["TRILITHON_KERNELS"] = "triton"
adam_step(*(torch.empty(0) for _ in range(4)), lr=0.01, step=1)
print("compared")
"""


def test_the_triton_twin_gives_the_bits_of_the_torch_twin() -> None:
    pytest.importorskip("triton")
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPARE],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    assert process.stdout.strip() == "compared"
