"""Parameters and gradients at rest in host memory or on disk: the bits of the run in which they stay on the device."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import trilithon
from against_plain import call_it, engine_for
from trilithon.errors import ConfigError, ShardedParameterError
from trilithon.testing import ranks
from trilithon.testing.engine_run import EngineRun, train_on_engine
from trilithon.testing.models import MLP, SharedLayerNet, TinyGPT
from trilithon.testing.parity import token_batches, vector_batches

ADAMW = {"kind": "adamw", "lr": 1e-2}
OFF = ("host", "disk")


def gpt() -> TinyGPT:
    """Tied, frozen and unused parameters."""
    return TinyGPT(layers=2, frozen=True, unused=True)


def left_in(folder: Path) -> list[str]:
    """Once all ranks are done."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    return os.listdir(folder)


def settings(folder: Path, parameters: str, **changes: Any) -> dict[str, Any]:
    offload = {"parameters": parameters, "path": str(folder), **changes.pop("offload", {})}
    return {"zero": {"stage": 3, "bucket_numel": 1}, "optimizer": ADAMW, "offload": offload, **changes}


def same(one: EngineRun, other: EngineRun) -> bool:
    return (
        (one.losses, one.grad_norms, one.clip_factors) == (other.losses, other.grad_norms, other.clip_factors)
        and one.parameters.keys() == other.parameters.keys()
        and all(torch.equal(value, other.parameters[name]) for name, value in one.parameters.items())
    )


@ranks(1, 2, 3)
def test_fp32_training_is_bit_for_bit_that_of_the_device(world_size: int, tmp_path: Path):
    for accumulation, clip in ((1, 0.0), (3, 0.05)):
        batches = token_batches(2, world_size, accumulation)
        resident = train_on_engine(gpt, batches, settings(tmp_path, "device", clip_norm=clip))
        for tier in OFF:
            run = train_on_engine(gpt, batches, settings(tmp_path, tier, clip_norm=clip))
            assert same(resident, run), (accumulation, clip, tier)
    assert left_in(tmp_path) == []


@ranks(2)
def test_with_state_anywhere_and_in_sixteen_bits(world_size: int, tmp_path: Path):
    batches = token_batches(2, 2, 2)
    for precision in ("bf16", {"kind": "fp16", "initial_scale_power": 24}):  # the first steps overflow and are skipped
        resident = train_on_skipping_engine(settings(tmp_path, "device", precision=precision), batches)
        for state, parameters in (("device", "host"), ("device", "disk"), ("host", "host"), ("disk", "disk")):
            offload = {"state": state, "sub_group_numel": 512}
            run = train_on_skipping_engine(
                settings(tmp_path, parameters, precision=precision, offload=offload), batches
            )
            assert run.keys() == resident.keys()
            assert all(torch.equal(run[name], value) for name, value in resident.items()), (
                precision,
                state,
                parameters,
            )


def train_on_skipping_engine(config: dict[str, Any], batches: Any) -> dict[str, Tensor]:
    with trilithon.initialize(gpt(), {**config, "batch": {"accumulation": 2}}) as engine:
        for micro_batches in batches:
            for batch in micro_batches:
                engine.backward(engine(*(part[engine.rank : engine.rank + 1] for part in batch)))
            engine.step()
        return {"steps": torch.tensor([engine.steps]), **dict(engine.full_parameters())}


@ranks(2)
def test_other_rules_modules_used_twice_and_one_step_of_delay(world_size: int, tmp_path: Path):
    batches = vector_batches(3, 4)
    for optimizer, offload in (
        ({"kind": "lamb", "lr": 0.01}, {}),
        ({"kind": "sgd", "lr": 0.1, "momentum": 0.9}, {"state": "disk"}),
        (ADAMW, {"state": "host", "delayed_update": True, "delay_after_steps": 1}),
    ):
        runs = [
            train_on_engine(
                SharedLayerNet, batches, {**settings(tmp_path, tier, offload=offload), "optimizer": optimizer}
            )
            for tier in ("device", *OFF)
        ]
        assert same(runs[0], runs[1]) and same(runs[0], runs[2]), optimizer


@ranks(2)
def test_a_users_own_optimizer_runs_over_them(world_size: int, tmp_path: Path):
    batches = vector_batches(2, 4)
    runs = []
    for tier in ("device", *OFF):
        config = {**settings(tmp_path, tier), "optimizer": None}
        runs.append(train_on_engine(MLP, batches, config, optimizer=torch.optim.RMSprop))
    assert same(runs[0], runs[1]) and same(runs[0], runs[2])


@ranks(2)
def test_everything_else_one_may_do_between_steps(world_size: int, tmp_path: Path):
    """Evaluation, generation of uneven length, reading and writing whole values, another engine, a changing order."""
    seen: dict[str, list[Any]] = {}
    batch = token_batches(1, 1)[0][0]
    for tier in ("device", *OFF):
        model, found = gpt(), []
        engine = trilithon.initialize(model, settings(tmp_path, tier))
        other = engine_for(MLP(), 3, offload={"parameters": tier, "path": str(tmp_path)})
        for _ in range(3):
            loss = engine(*batch)
            found.append(engine.eval_step(batch).item())
            engine.backward(loss)
            found += [(name, value) for name, value in engine.view("grad", "blocks.1.up*")]
            engine.step()
            other.backward(call_it(other, *vector_batches(1, 2)[0][0]))
            other.step()
            with engine.uneven(), torch.no_grad():
                for length in range(3, 5 + 3 * engine.rank):
                    engine(batch[0][:, :length])
            with trilithon.zero.gathered(model.blocks[1].up, modify=1), torch.no_grad():
                if engine.rank == 1:
                    model.blocks[1].up.weight.mul_(0.5)
            with trilithon.zero.gathered(model.tokens.weight):
                found.append(("tokens", model.tokens.weight.detach().clone()))
            with pytest.raises(ShardedParameterError, match=r"'blocks.0.up.weight'"):
                model.blocks[0].up.weight.sum()
        found += [*engine.state_dict().items(), *engine.full_parameters(), *other.full_parameters()]
        found += [(name, value) for name, value in engine.view("exp_avg", "norm*")]
        engine.close()
        other.close()
        found += [(name, param.detach()) for name, param in model.named_parameters()]
        seen[tier] = found
    for tier in OFF:
        for one, another in zip(seen["device"], seen[tier], strict=True):
            if isinstance(one, float):
                assert one == another
            else:
                assert one[0] == another[0] and torch.equal(one[1], another[1]), one[0]
    assert left_in(tmp_path) == []


@ranks(2)
def test_what_is_kept_where_is_reported_to_the_byte_or_page(world_size: int, tmp_path: Path):
    reports, sizes = {}, {}
    for tier in ("device", *OFF):
        engine = trilithon.initialize(gpt(), settings(tmp_path, tier, precision="bf16", offload={"state": tier}))
        engine.backward(engine(*token_batches(1, 1)[0][0]))
        reports[tier] = engine.memory_by_tier()
        owned = [unit.layout.shard_numel for unit in engine._sharding.units]
        trained = [unit.layout.shard_numel for unit in engine._sharding.units if unit.trainable]
        sizes[tier] = (2 * sum(owned), 2 * sum(trained))
        engine.step()
        engine.close()
    values, gradients = sizes["device"]
    assert (reports["device"]["device"]["parameters"], reports["device"]["device"]["gradients"]) == (values, gradients)
    assert (reports["host"]["host"]["parameters"], reports["host"]["host"]["gradients"]) == (values, gradients)
    for tier in OFF:
        left = reports[tier]["device"]
        assert (left["parameters"], left["gradients"], left["master"], left["in_flight"]) == (0, 0, 0, 0)
    disk = reports["disk"]["disk"]
    for kind, least in (("parameters", values), ("gradients", gradients)):
        assert least <= disk[kind] <= least + 4096 * len(engine._sharding.units)
    assert "parameters" not in reports["disk"]["host"]


@ranks(2)
def test_a_read_ahead_is_on_its_way_before_it_is_asked_for(world_size: int, tmp_path: Path):
    """After the first step no slice is waited for from its beginning, in forward, backward and evaluation."""
    model = MLP(width=64, depth=6)
    engine = trilithon.initialize(model, settings(tmp_path, "disk", offload={"buffers": 8}))
    store = engine._sharding._resting.values
    counts = {"asked": 0, "ahead": 0}
    load = store._load

    def counting(key: str, *, block: bool, read: bool = True) -> Any:
        counts["asked" if block else "ahead"] += 1
        return load(key, block=block, read=read)

    x, target = torch.ones(2, 64), torch.zeros(2, 4)
    for step in range(4):
        if step == 2:
            store._load = counting
        engine.backward(engine(x, target))
        engine.step()
    assert counts["asked"] <= 2 * 2  # per step the first unit of the forward and of the update, which nothing announces
    assert counts["ahead"] >= 2 * 3 * (len(engine._sharding.units) - 2)
    engine.close()


@ranks(2)
def test_closing_without_giving_back_needs_no_room_and_leaves_nothing(world_size: int, tmp_path: Path):
    model = MLP()
    engine = trilithon.initialize(model, settings(tmp_path, "disk", offload={"state": "disk"}))
    assert len(os.listdir(tmp_path)) >= 1
    engine.close(give_back=False)
    assert left_in(tmp_path) == []
    with pytest.raises(ShardedParameterError, match="the engine that held the slices"):
        model.last.weight.sum()


@ranks(1, 2)
def test_combinations_that_mean_nothing_are_refused_by_name(world_size: int, tmp_path: Path):
    path = str(tmp_path)
    for zero, offload, message in (
        ({"stage": 2}, {"parameters": "host"}, 'offload.parameters="host" needs parameters that are gathered for use'),
        (
            {"stage": 1},
            {"gradients": "disk", "path": path},
            'offload.gradients="disk" needs parameters that are gathered',
        ),
        ({"stage": 3}, {"parameters": "disk"}, 'offload.parameters="disk" needs a folder .offload.path.'),
    ):
        with pytest.raises(ConfigError, match=message):
            trilithon.initialize(MLP(), {"zero": zero, "offload": offload, "optimizer": ADAMW})
    with pytest.raises(ConfigError, match="gathered for use"):
        trilithon.initialize(MLP(), {"offload": {"parameters": "host"}})


@ranks(2)
def test_tiles_and_recomputed_blocks_rest_as_well(world_size: int, tmp_path: Path):
    batches = token_batches(2, 2)
    for tiles, recompute in itertools.product((None, 1024), (None, {"tier": "host"})):
        zero = {"stage": 3, "bucket_numel": 1, "tile_above_numel": tiles}
        runs = [
            train_on_engine(gpt, batches, settings(tmp_path, tier, zero=zero, recompute=recompute))
            for tier in ("device", "disk")
        ]
        assert same(*runs), (tiles, recompute)
