"""Under a hard limit of memory, state on disk trains a model whose resident state does not fit."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import trilithon
from trilithon.testing import run_ranks, run_ranks_raw
from trilithon.testing.fork_server import Ending
from trilithon.zero import init

WIDTH, DEPTH = 512, 64
NUMEL = WIDTH * WIDTH * DEPTH  # 16.8 M: 268 MB of states, 134 MB a rank
LIMIT = 96 << 20  # beyond what a rank with a small engine maps
# malloc would reserve 64 MiB of addresses for every thread, which the limit counts though nothing is there;
# and the compiler of kernels takes as much memory as the model, once per process
ENVIRONMENT = {"MALLOC_ARENA_MAX": "1", "TRILITHON_KERNELS": "torch"}


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.float().square().mean()


def train_under_the_limit(offload: dict[str, Any]) -> tuple[float, int]:
    """Loss of the second step, and bytes that the process has grown by."""
    config = {"zero": {"stage": 3}, "precision": "bf16", "optimizer": {"kind": "adamw"}, "offload": offload}
    bare = mapped_bytes()
    small = trilithon.initialize(nn.Linear(WIDTH, 1), config)  # what any engine maps: threads, their stacks, gloo
    small.train_step([torch.ones(1, WIDTH)], lambda engine, x: engine(x).square().mean())
    limit = mapped_bytes() + (mapped_bytes() - bare) + LIMIT
    small.close()
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_bytes()
    with init(open_numel=WIDTH * WIDTH):
        model = Deep()
    engine = trilithon.initialize(model, config)
    for _ in range(2):
        loss = engine.train_step([torch.ones(1, WIDTH)])
    return loss, peak_bytes() - before


def mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def test_state_on_disk_trains_where_resident_state_does_not_fit(tmp_path):
    resident = run_ranks_raw(train_under_the_limit, 2, {}, timeout_s=60, env=ENVIRONMENT, end_on_failure=True)
    assert any(result.ending is Ending.RAISED for result in resident), "the limit does not bind"
    disk = {"state": "disk", "path": str(tmp_path), "sub_group_numel": 1 << 17, "threads": 2}
    found = run_ranks(train_under_the_limit, 2, disk, timeout_s=60, env=ENVIRONMENT)
    assert found[0][0] == found[1][0] > 0
    assert max(grown for _, grown in found) < LIMIT, [grown >> 20 for _, grown in found]
