"""Every implementation of packing and unpacking signs gives the bits of numpy's packbits and of plain arithmetic."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from trilithon.kernels import sign_decode, sign_encode_

COMPARE = """
import os, torch
from trilithon.kernels import sign_decode, sign_encode_

torch.manual_seed(0)
for count in (0, 1, 300, 1000):
    z = torch.randn(8 * count)
    z[:3] = torch.tensor([0.0, -0.0, torch.nan])[: z[:3].numel()]
    results = []
    for kernels in ("torch", "triton"):
        os.environ["TRILITHON_KERNELS"] = kernels
        left, bits, out, total = z.clone(), torch.zeros(count, dtype=torch.uint8), torch.zeros(8 * count), z.clone()
        sign_encode_(left, bits, 0.37)
        sign_decode(bits, out, 0.37)
        sign_decode(bits, total, 0.37, True)
        results.append([left.nan_to_num(9.0), bits, out, total.nan_to_num(9.0)])
    assert all(torch.equal(a, b) for a, b in zip(*results)), count
    assert count == 0 or results[0][2].abs().unique().numel() == 1
print("compared")
"""


@pytest.mark.parametrize("kernels", ["torch", "numba"])
def test_packing_and_what_is_left(kernels, monkeypatch):
    if kernels == "numba":
        pytest.importorskip("numba")
    monkeypatch.setenv("TRILITHON_KERNELS", kernels)
    z = torch.randn(8 * 20_001)
    z[:2] = torch.tensor([0.0, -0.0])
    left, bits, out = z.clone(), torch.zeros(20_001, dtype=torch.uint8), torch.empty_like(z)
    sign_encode_(left, bits, 0.37)
    assert bits.tolist() == np.packbits(z.numpy() >= 0).tolist()
    signs = torch.where(z >= 0, 0.37, -0.37)
    assert torch.equal(left, z - signs)
    sign_decode(bits, out, 0.37)
    assert torch.equal(out, signs)
    sign_decode(bits, out, 1.0, accumulate=True)
    assert torch.equal(out, signs + torch.where(z >= 0, 1.0, -1.0))


@pytest.mark.parametrize("kernels", ["torch", "numba"])
def test_every_byte_comes_back(kernels, monkeypatch):
    monkeypatch.setenv("TRILITHON_KERNELS", kernels)
    bits, out, again = torch.arange(256, dtype=torch.uint8), torch.empty(2048), torch.empty(256, dtype=torch.uint8)
    sign_decode(bits, out, 1.0)
    sign_encode_(out, again, 1.0)
    assert torch.equal(bits, again) and not out.any()


def test_the_triton_twins_give_the_bits_of_the_torch_twins():
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
