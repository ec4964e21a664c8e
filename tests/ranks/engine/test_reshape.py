"""Saved at any stage on any number of ranks, loaded at any other: the same values bit for bit, and training goes on.

Each of the 12 runs (stages 0 to 3 on 1, 2 and 4 ranks) is saved once and loaded into each of the 12: 144 pairs for each
precision. Masters and optimizer state are compared with what the saving run held, all elements by their digests.
"""

from __future__ import annotations

import atexit
from functools import cache
from tempfile import TemporaryDirectory

import pytest

import trilithon
from saved_runs import OddNet, batches, fields_of, settings, train
from trilithon.testing.engine_run import digest_of
from trilithon.testing.ranks import ranks, run_ranks
from trilithon.testing.tolerance import tolerance

WORLDS, STAGES, STEPS = (1, 2, 4), (0, 1, 2, 3), 3


@cache
def folder() -> str:
    """Made by the process that runs the tests alone: ranks import this module too."""
    made = TemporaryDirectory(prefix="trilithon-reshape-")
    atexit.register(made.cleanup)
    return made.name


def digests(engine: trilithon.Engine) -> dict[str, str]:
    return {name: digest_of([tensor]) for name, tensor in fields_of(engine).items()}


def net(seed: int) -> OddNet:
    return OddNet(seed).eval()  # dropout draws differ between numbers of ranks


def save_all(where: str, precision: str) -> dict:
    """Three steps, a save, three more steps, at every stage."""
    found = {}
    for stage in STAGES:
        with trilithon.initialize(net(2), settings(stage, precision)) as engine:
            train(engine, batches(2 * STEPS)[:STEPS])
            engine.save(where, f"{precision}-{engine.world_size}-{stage}")
            held = digests(engine)
            found[stage] = (held, train(engine, batches(2 * STEPS)[STEPS:]))
    return found


@cache
def sources(precision: str) -> dict:
    """(ranks, stage) -> what the run held when it was saved, and the losses of its next steps."""
    return {
        (world, stage): kept
        for world in WORLDS
        for stage, kept in run_ranks(save_all, world, folder(), precision)[0].items()
    }


def load_all(where: str, precision: str, saved: dict) -> int:
    """Every source into one engine of each stage, one after the other: a load leaves nothing of the one before."""
    pairs = 0
    for stage in STAGES:
        with trilithon.initialize(net(9), settings(stage, precision)) as engine:
            for (world, source), (held, losses) in saved.items():
                pair = f"{source} on {world} -> {stage} on {engine.world_size}"
                report = engine.load(where, f"{precision}-{world}-{source}")
                assert not report.initialised, pair
                assert not report.ignored, pair
                assert digests(engine) == held, pair
                assert engine.steps == STEPS
                mine = train(engine, batches(2 * STEPS)[STEPS:])
                assert mine == pytest.approx(losses, rel=0, abs=tolerance(precision, steps=STEPS).loss), pair
                pairs += 1
    return pairs


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("world_size", WORLDS)
def test_every_layout_loads_into_every_other(world_size, precision):
    assert set(run_ranks(load_all, world_size, folder(), precision, sources(precision))) == {48}


def other_precision(where: str, precision: str, source: str, held: dict) -> None:
    with trilithon.initialize(net(9), settings(2, precision)) as engine:
        report = engine.load(where, source)
        mine = digests(engine)
        trained = [name for name in held if "frozen" not in name]  # frozen ones are kept in the run's own precision
        assert {name: mine[name] for name in trained} == {name: held[name] for name in trained}
        assert any("the loss scale begins anew" in note for note in report.notes) == (precision == "fp16")
        train(engine, batches(1))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_fp32_masters_move_between_precisions(precision):
    held = sources("fp32")[2, 3][0]
    run_ranks(other_precision, 2, folder(), precision, "fp32-2-3", held)


@ranks(2)
def test_every_tier_loads_into_every_other(tmp_path):
    """State on the device, in host memory in small sub-groups, and on disk."""

    def engine(tier, seed):
        offload = {"state": tier, "sub_group_numel": 64, "path": str(tmp_path / "swap") if tier == "disk" else None}
        return trilithon.initialize(net(seed), settings(2, "bf16", offload=offload))

    held, losses = {}, {}
    for tier in ("device", "host", "disk"):
        with engine(tier, 2) as saving:
            train(saving, batches(2 * STEPS)[:STEPS])
            saving.save(tmp_path / "runs", tier)
            held[tier] = digests(saving)
            losses[tier] = train(saving, batches(2 * STEPS)[STEPS:])
    assert held["device"] == held["host"] == held["disk"]
    for tier in ("device", "host", "disk"):
        with engine(tier, 9) as loading:
            for source, whole in held.items():
                loading.load(tmp_path / "runs", source)
                assert digests(loading) == whole, f"{source} -> {tier}"
                assert train(loading, batches(2 * STEPS)[STEPS:]) == losses[source], f"{source} -> {tier}"
