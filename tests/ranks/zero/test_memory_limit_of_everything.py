"""Everything on disk: model states ten times the limit of memory train, and memory does not grow with the model."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import trilithon
from trilithon.testing import run_ranks

WIDTH, DEPTH = 512, 96
STATES = 16 * WIDTH * WIDTH * DEPTH  # bytes: bf16 parameters and gradients, fp32 masters and two moments
LIMIT = STATES // 10  # beyond what a rank with a small engine maps
# malloc would reserve 64 MiB of addresses for every thread, which the limit counts though nothing is there;
# and the compiler of kernels takes as much memory as the model, once per process
ENVIRONMENT = {"MALLOC_ARENA_MAX": "1", "TRILITHON_KERNELS": "torch"}


class Deep(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.float().square().mean()


def train_on_disk(depth: int, path: str, limit: int | None) -> tuple[float, int]:
    """Loss of the second step, and bytes by which the resident memory has grown beyond that with a small engine."""
    offload = {"state": "disk", "parameters": "disk", "path": path, "sub_group_numel": 1 << 17, "threads": 2}
    zero = {"stage": 3, "unit_classes": ["Linear"]}
    config: dict[str, Any] = {"zero": zero, "precision": "bf16", "optimizer": {"kind": "adamw"}, "offload": offload}
    bare = mapped_bytes()
    small = trilithon.initialize(nn.Linear(WIDTH, 1), config)  # what any engine maps: threads, their stacks, gloo
    small.train_step([torch.ones(1, WIDTH)], lambda engine, x: engine(x).square().mean())
    engines = mapped_bytes() - bare
    small.close()
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_AS, (mapped_bytes() + engines + limit,) * 2)
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_bytes()
    with trilithon.zero.init(open_numel=0, path=path):
        model = Deep(depth)
    engine = trilithon.initialize(model, config)
    for _ in range(2):
        loss = engine.train_step([torch.ones(1, WIDTH)])
    grown = peak_bytes() - before
    engine.close(give_back=False)
    return loss, grown


def mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def test_states_of_ten_times_the_limit_train_and_memory_is_flat_in_the_size_of_the_model(tmp_path):
    grown = {}
    for depth, limit in ((DEPTH // 4, None), (DEPTH, LIMIT)):
        found = run_ranks(train_on_disk, 2, depth, str(tmp_path), limit, timeout_s=90, env=ENVIRONMENT)
        assert found[0][0] == found[1][0] > 0
        grown[depth] = max(bytes_ for _, bytes_ in found)
    assert grown[DEPTH] < LIMIT
    parameters = WIDTH * WIDTH * (DEPTH - DEPTH // 4)
    slope = (grown[DEPTH] - grown[DEPTH // 4]) / parameters
    assert slope < 0.5, slope  # bytes per parameter and rank; with 16-bit parameters resident it would be at least 1
