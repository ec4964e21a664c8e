"""Copies between an accelerator and the host, made on a CPU as if it had one: same bits, no byte too many."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import trilithon
from trilithon.testing import ranks
from trilithon.testing.models import TinyGPT
from trilithon.testing.parity import rank_part, token_batches
from trilithon.tiers import HostLink

STEPS = 3


def train(kind: str, *, apart: bool) -> tuple[list[torch.Tensor], HostLink, int, list[int]]:
    """Parameters and state; the link; bytes of this rank's gradient in 16 bits, where there is any; its buffers."""
    config: dict[str, Any] = {
        "zero": {"stage": 2},
        "precision": "bf16",
        "optimizer": {"kind": kind, "lr": 1e-2},
        "offload": {"state": "host", "sub_group_numel": 512},
    }
    with trilithon.initialize(TinyGPT(unused=True), config) as engine:
        link = engine._update._link = HostLink(lambda grad, home: apart)
        for (batch,) in token_batches(STEPS, 4):
            engine.train_step([rank_part(batch, engine.rank, engine.world_size)])
        found = [tensor for name in ("master", "exp_avg", "param") for _, tensor in engine.view(name)]
        moved = [p for p in engine._sharding.slices() if any(shard.name not in p.idle for shard in p.shards)]
        sizes = [buffer.memory.numel() for buffer in link._free]
        return found, link, sum(2 * part.master.numel() for part in moved), sizes


@ranks(1, 2)
@pytest.mark.parametrize("kind", ["adamw", "lamb"])
def test_the_same_bits_and_two_bytes_each_way(kind):
    expected, idle, _, _ = train(kind, apart=False)
    found, link, size, _ = train(kind, apart=True)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    assert (idle.bytes_down, idle.bytes_up) == (0, 0)
    assert link.bytes_down == STEPS * size
    assert link.bytes_up == (STEPS * size if kind == "adamw" else 0)  # lamb writes its values at the end, in place


@ranks(1)
def test_buffers_are_used_again():
    sizes = train("adamw", apart=True)[3]
    assert 0 < len(sizes) <= 5, sizes  # two gradients ahead, one gradient and its values in use, one going up
    assert max(sizes) <= 2 * 512, sizes
