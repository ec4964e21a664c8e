"""Saved at any stage on any number of ranks, loaded at any other: the same values bit for bit, and training goes on.

Each of the 12 runs (stages 0 to 3 on 1, 2 and 4 ranks) is saved once. Each of the 12 then loads one of every stage and
of every number of ranks, so that any two of (saved stage, saved ranks, loading stage, loading ranks) meet: 48 pairs for
each precision. All 144 for each are behind the mark `exhaustive`. Masters and optimizer state are compared with what
the saving run held, all elements by their digests.
"""

from __future__ import annotations

import atexit
import itertools
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


def covering(world_size: int, stage: int, precision: str) -> list[tuple[int, int]]:
    """Sources (ranks, stage) for one target, a stage each: over the targets the ranks go round."""
    turn = WORLDS.index(world_size) + (precision == "bf16")
    return [(WORLDS[(source + stage + turn) % len(WORLDS)], source) for source in STAGES]


def load_all(where: str, precision: str, saved: dict, pairs: dict) -> int:
    """The sources into one engine of each stage, one after the other: a load leaves nothing of the one before."""
    done = 0
    for stage in STAGES:
        with trilithon.initialize(net(9), settings(stage, precision)) as engine:
            for world, source in pairs[stage]:
                held, losses = saved[world, source]
                pair = f"{source} on {world} -> {stage} on {engine.world_size}"
                report = engine.load(where, f"{precision}-{world}-{source}")
                assert not report.initialised, pair
                assert not report.ignored, pair
                assert digests(engine) == held, pair
                assert engine.steps == STEPS
                mine = train(engine, batches(2 * STEPS)[STEPS:])
                assert mine == pytest.approx(losses, rel=0, abs=tolerance(precision, steps=STEPS).loss), pair
                done += 1
    return done


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("world_size", WORLDS)
def test_layouts_load_into_each_other(world_size, precision):
    pairs = {stage: covering(world_size, stage, precision) for stage in STAGES}
    assert set(run_ranks(load_all, world_size, folder(), precision, sources(precision), pairs)) == {16}


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("world_size", WORLDS)
def test_every_layout_loads_into_every_other(world_size, precision):
    saved = sources(precision)
    pairs = {stage: list(saved) for stage in STAGES}
    assert set(run_ranks(load_all, world_size, folder(), precision, saved, pairs)) == {48}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_any_two_properties_of_a_pair_meet(precision):
    targets = itertools.product(WORLDS, STAGES)
    met = {(*source, on, stage) for on, stage in targets for source in covering(on, stage, precision)}
    for first, second in itertools.combinations(range(4), 2):
        every = [WORLDS if place in (0, 2) else STAGES for place in (first, second)]
        assert {(pair[first], pair[second]) for pair in met} == set(itertools.product(*every))


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
