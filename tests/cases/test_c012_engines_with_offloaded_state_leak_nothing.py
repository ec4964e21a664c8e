"""C012: engines with state in host memory, built and dropped ten times in one process, leave nothing behind."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path

import torch
from torch import Tensor, nn

import trilithon
from trilithon.testing import ranks

NUMEL = 6_000_000  # 72 MB of masters and moments each time: a leak of one round is a third of the process


class Long(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(NUMEL))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).mean()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@ranks(1, timeout_s=90)
def test_resident_memory_after_ten_rounds_is_that_after_two():
    model, after = Long(), []
    for _ in range(10):
        config = {"zero": {"stage": 1}, "optimizer": {"kind": "adamw"}, "offload": {"state": "host"}}
        engine = trilithon.initialize(model, config)
        engine.train_step([torch.ones(1)])
        assert engine.memory_by_tier()["host"]["optimizer"] >= 12 * NUMEL
        inner = [weakref.ref(engine), weakref.ref(engine._sharding)]
        engine.close()
        del engine
        gc.collect()
        assert [found for found in inner if found() is not None] == []
        assert not model.weight._backward_hooks and not model._forward_pre_hooks and not model._forward_hooks
        after.append(resident_bytes())
    assert after[-1] < 1.1 * after[1], [size >> 20 for size in after]
