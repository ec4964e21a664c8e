"""Wherever masters and moments rest, training is the same to the last bit: against runs with resident state."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import trilithon
from trilithon.engine.engine import Engine
from trilithon.testing import ranks
from trilithon.testing.engine_run import EngineRun, train_on_engine
from trilithon.testing.models import MLP, TinyGPT
from trilithon.testing.parity import token_batches, vector_batches
from trilithon.zero import gathered

ADAMW = {"kind": "adamw", "lr": 1e-2, "weight_decay": 0.1}
TILE = 192  # elements: the models have slices of a few hundred to a few thousand


def tiers(folder: Any) -> dict[str, dict[str, Any]]:
    disk = {"state": "disk", "path": str(folder), "sub_group_numel": TILE}
    return {
        "host": {"state": "host", "sub_group_numel": TILE},
        "disk": disk,
        "half on disk": {**disk, "ratio": 0.5},
        "one buffer": {**disk, "buffers": 1, "threads": 1, "direct": False},
    }


def assert_same(one: EngineRun, other: EngineRun, what: object) -> None:
    for kind in ("losses", "grad_norms", "clip_factors"):  # as text: NaN, of a skipped step, is not equal to itself
        assert repr(getattr(one, kind)) == repr(getattr(other, kind)), (what, kind)
    different = [name for name, value in one.parameters.items() if not torch.equal(value, other.parameters[name])]
    assert different == [], what
    assert one.digest == other.digest, what


def uses_its_tier(engine: Engine) -> tuple[int, int]:
    """Elements with state on a tier of its own, and elements in all."""
    found = engine.memory_by_tier()
    slices = engine._sharding.slices()
    near = sum(part.master.numel() for part in slices if part.master.device.type != "meta")
    away = sum(part.master.numel() for part in slices) - near
    tier = engine.config.offload.state
    assert (found[tier]["optimizer"] >= 12 * away) if away else True, found
    return away, near + away


@ranks(1, 2, 3)
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_fp32_is_the_same_to_the_last_bit(tmp_path, zero_stage):
    for accumulation, clip in itertools.product((1, 3), (0.0, 0.05)):
        batches = vector_batches(2, 6, accumulation)
        config = {"zero": {"stage": zero_stage}, "optimizer": ADAMW, "clip_norm": clip}
        resident = train_on_engine(MLP, batches, config)
        for name, offload in tiers(tmp_path).items():
            if name in ("half on disk", "one buffer") and (accumulation, clip) != (3, 0.05):
                continue
            run = train_on_engine(MLP, batches, {**config, "offload": offload}, note=uses_its_tier)
            assert_same(run, resident, (name, accumulation, clip))
            away, total = run.noted[-1]
            if name == "half on disk":
                assert 0.3 * total < away < 0.7 * total
            else:
                assert away == total > 0
    dist.barrier()  # the other ranks have closed theirs
    assert list(tmp_path.iterdir()) == []


@ranks(2)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("zero_stage", [1, 3])
def test_16_bits_with_masters_away(tmp_path, precision, zero_stage):
    """fp16 starts at a scale that overflows, so that steps are skipped; skipped steps write nothing."""
    settings: dict[str, Any] = {"kind": precision}
    if precision == "fp16":
        settings |= {"initial_scale_power": 26, "max_scale": 2.0**30, "hysteresis": 1}
    config = {"zero": {"stage": zero_stage}, "optimizer": ADAMW, "precision": settings}
    batches = token_batches(6, 4) if precision == "bf16" else token_batches(16, 4)
    make = lambda: TinyGPT(frozen=True, unused=True)  # noqa: E731
    resident = train_on_engine(make, batches, config, note=counters)
    for name, offload in tiers(tmp_path).items():
        run = train_on_engine(make, batches, {**config, "offload": offload}, note=counters)
        assert_same(run, resident, name)
        assert [noted[:2] for noted in run.noted] == [noted[:2] for noted in resident.noted]
        if precision == "fp16":
            assert run.noted[-1][1] > 3, "steps were meant to be skipped"
            written = {(steps, away) for steps, skipped, away in run.noted if steps == 0}
            assert len(written) == 1, written


def counters(engine: Engine) -> tuple[int, int, int]:
    placement = engine._sharding._masters.placement
    store = getattr(placement, "store", None)
    store = getattr(store, "_far", store)
    return engine.steps, engine.skipped_steps, getattr(getattr(store, "_io", None), "bytes_written", 0)


@ranks(2)
@pytest.mark.parametrize("kind", ["lamb", "lion", "adagrad", "sgd"])
def test_every_rule_of_ours(tmp_path, kind):
    optimizer: dict[str, Any] = {"kind": kind, "lr": 1e-2}
    if kind == "sgd":
        optimizer["momentum"] = 0.9
    config = {"zero": {"stage": 2}, "optimizer": optimizer, "precision": "bf16"}
    batches = token_batches(3, 4)
    resident = train_on_engine(TinyGPT, batches, config)
    for name, offload in tiers(tmp_path).items():
        assert_same(train_on_engine(TinyGPT, batches, {**config, "offload": offload}), resident, name)


@ranks(2)
@pytest.mark.parametrize("state", ["host", "disk"])
@pytest.mark.parametrize("zero_stage", [2, 3])
def test_reading_and_writing_between_steps(tmp_path, state, zero_stage):
    """Evaluation, views of state, whole parameters and gathered(modify=) between steps, on two engines at once."""

    def both(offload: dict[str, Any]) -> list[Any]:
        config = {"zero": {"stage": zero_stage}, "optimizer": ADAMW, "precision": "bf16", "offload": offload}
        engines = [trilithon.initialize(MLP(), config) for _ in range(2)]
        seen: list[Any] = []
        for step in range(4):
            for index, engine in enumerate(engines):
                generator = torch.Generator().manual_seed(10 * step + index)
                engine.train_step([(torch.randn(2, 16, generator=generator), torch.randn(2, 4, generator=generator))])
                if step == 1:
                    with torch.no_grad(), gathered(engine.module, modify=0):
                        if engine.rank == 0:
                            next(engine.module.parameters()).mul_(0.5)
                if step == 2:
                    seen.append(engine.eval_step((torch.ones(1, 16), torch.ones(1, 4))))
                for kind in ("master", "exp_avg", "exp_avg_sq", "param"):
                    seen += [tensor for _, tensor in engine.view(kind)]
                seen += [tensor for _, tensor in engine.full_parameters()]
        for engine in engines:
            engine.close()
        return seen

    disk = {"state": state, "sub_group_numel": TILE} | ({"path": str(tmp_path)} if state == "disk" else {})
    expected, found = both({}), both(disk)
    assert len(expected) == len(found)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


@ranks(2)
def test_idle_parameters_and_momentum_switched_on_later(tmp_path):
    """A field that appears during the run gets room in the file; a parameter without gradient is not touched."""

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.used, self.sometimes = nn.Linear(16, 33), nn.Linear(16, 33)

        def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
            return (self.used(x) + (self.sometimes(x) if both else 0)).square().mean()

    def run(offload: dict[str, Any]) -> list[torch.Tensor]:
        model = Half()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with trilithon.initialize(model, {"zero": {"stage": 2}, "offload": offload}, optimizer) as engine:
            for step in range(5):
                engine.train_step([{"x": torch.ones(2, 16) * (engine.rank + 1), "both": step % 2 == 0}])
                if step == 1:
                    optimizer.param_groups[0]["momentum"] = 0.9
            return [t for kind in ("master", "momentum_buffer") for _, t in engine.view(kind)]

    expected = run({})
    for name, offload in tiers(tmp_path).items():
        assert all(torch.equal(a, b) for a, b in zip(expected, run(offload), strict=True)), name


@ranks(2)
def test_bytes_by_tier(tmp_path):
    """bf16, stage 3: on disk 12 bytes per parameter and rank, on the device what forward needs."""
    numel = sum(p.numel() for p in TinyGPT(dim=64).parameters())
    config = {"zero": {"stage": 3}, "optimizer": ADAMW, "precision": "bf16"}
    offload = {"state": "disk", "path": str(tmp_path), "sub_group_numel": 4096}
    with trilithon.initialize(TinyGPT(dim=64), {**config, "offload": offload}) as engine:
        before = engine.memory_by_tier()
        assert 0 <= before["disk"]["optimizer"] - 4 * numel / 2 < 4096 * 2 * len(engine._sharding.slices())
        engine.train_step([tuple(token_batches(1, 2)[0][0])])
        found = engine.memory_by_tier()
        slices = len(engine._sharding.slices())
        assert 0 <= found["disk"]["optimizer"] - 12 * numel / 2 < 4096 * 4 * slices
        assert found["device"]["master"] == 0
        assert "optimizer" not in found["device"]
        assert found["host"]["buffers"] == 4 * 3 * 4096 * 4  # buffers x fields x elements x bytes
    with trilithon.initialize(TinyGPT(dim=64), {**config, "offload": {"state": "host"}}) as engine:
        engine.train_step([tuple(token_batches(1, 2)[0][0])])
        found = engine.memory_by_tier()
        assert found["host"]["optimizer"] == pytest.approx(12 * numel / 2, rel=0.05)
        assert found["device"]["master"] == 0
