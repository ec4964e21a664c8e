"""Experts over the ranks of stages: checkpoints, evaluation, skipped steps, failures, and what all ranks refuse."""

from __future__ import annotations

import atexit
import os
import sys
import time

import pytest
import torch
from sparse_runs import Sparse, batches_of, config_of, loss_fn, make, own
from torch import nn

import trilithon
from trilithon import PipelineModule, TiedLayerSpec
from trilithon.comm.watchdog import EXIT_STATUS
from trilithon.errors import ConfigError
from trilithon.testing import ranks, run_ranks, run_ranks_raw

DROPLESS = {"drop_tokens": False, "top2_2nd_expert_sampling": False, "k": 2}
PIPES = {"pipe": 2, "data": 2}
KINDS = ("master", "exp_avg", "exp_avg_sq")


def whole_state(engine):
    return {f"{kind} {name}": value.clone() for kind in KINDS for name, value in engine.view(kind)}


def save_after_a_step(folder, mesh, stage, ep_size):
    with trilithon.initialize(make((ep_size, ep_size), **DROPLESS), config_of(mesh, stage)) as engine:
        first, second, _ = batches_of()
        engine.train_step(own(engine, first))
        engine.save(folder)
        saved = whole_state(engine)
        return saved, engine.train_step(own(engine, second)), whole_state(engine)


def go_on(folder, mesh, stage, ep_size):
    with trilithon.initialize(make((ep_size, ep_size), **DROPLESS), config_of(mesh, stage)) as engine:
        engine.load(folder, parts=("weights", "optimizer", "schedule", "counters"))
        loaded = whole_state(engine)
        return loaded, engine.train_step(own(engine, batches_of()[1])), whole_state(engine)


@pytest.mark.parametrize("stage", [0, 2])
def test_a_checkpoint_goes_on_at_any_degree_with_and_without_stages(stage, tmp_path):
    """Saved by two stages with experts over two ranks each; bit for bit the same where it is read."""
    saved, loss, after = run_ranks(save_after_a_step, 4, tmp_path, PIPES, stage, 2)[0]
    names = [f"{kind} {name}" for kind in KINDS for name, _ in make((1, 1), **DROPLESS).named_parameters()]
    assert sorted(saved) == sorted(names)
    for world, mesh, other, ep_size in (
        (1, {}, 0, 1), (2, {"pipe": 2}, 1, 1), (4, PIPES, 2, 1), (4, PIPES, 1, 2), (2, {"data": 2}, 2, 2),
    ):  # fmt: skip
        for loaded, next_loss, later in run_ranks(go_on, world, tmp_path, mesh, other, ep_size):
            assert set(loaded) == set(saved) and all(torch.equal(loaded[name], saved[name]) for name in saved)
            if mesh.get("data") == 2:  # the balance losses of other parts of a batch are others
                assert next_loss == pytest.approx(loss, rel=1e-5)
                for name, value in after.items():
                    torch.testing.assert_close(later[name], value, rtol=1e-5, atol=1e-6)


def test_a_checkpoint_without_stages_is_read_by_stages_with_spread_experts(tmp_path):
    saved = run_ranks(save_after_a_step, 1, tmp_path, {}, 0, 1)[0][0]
    for loaded, *_ in run_ranks(go_on, 4, tmp_path, PIPES, 2, 2):
        assert set(loaded) == set(saved) and all(torch.equal(loaded[name], saved[name]) for name in saved)


def evaluate(mesh, sizes):
    with trilithon.initialize(make(**DROPLESS), config_of(mesh)) as engine:
        pairs = own(engine, [batch for step in batches_of() for batch in step], sizes)
        short = [(x[: len(x) - 2], y[: len(y) - 2]) for x, y in pairs[:1]]  # a last batch that is smaller
        found = [engine.eval_step(batch) for batch in (pairs, pairs[:3] + short, short)]
        engine.train_step(pairs[:2])
        return [*found, engine.eval_step(pairs)]


def test_evaluation_of_any_number_of_batches_of_any_size():
    with trilithon.initialize(make((1, 1), **DROPLESS), config_of({})) as engine:
        parts = [[(x.split([6, 6])[r], y.split([6, 6])[r]) for step in batches_of() for x, y in step] for r in (0, 1)]
        expected = sum(engine.eval_step(part) for part in parts) / 2
    for found in run_ranks(evaluate, 4, PIPES, [6, 6]):
        assert found[0] == pytest.approx(expected, rel=1e-5)
        assert all(value > 0 for value in found)
    assert len({tuple(found) for found in run_ranks(evaluate, 4, PIPES, [9, 3])}) == 1  # one result for all ranks


@ranks(4)
def test_a_gradient_that_overflows_in_one_expert_skips_the_step_on_all_ranks(world_size):
    fp16 = {"kind": "fp16", "initial_scale_power": 4, "hysteresis": 1}
    config = {**config_of(PIPES, 2), "precision": fp16}
    with trilithon.initialize(make(**DROPLESS), config) as engine:
        first, second, _ = batches_of()
        engine.train_step(own(engine, first))
        before = engine.state_dict()
        mine = own(engine, second)
        if engine.mesh.data_rank == 1:
            mine = [(x * 6e4, y * 6e4) for x, y in mine]
        engine.train_step(mine)
        assert (engine.steps, engine.skipped_steps) == (1, 1) and engine.loss_scale == 8.0
        assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
        engine.train_step(own(engine, first))
        assert engine.steps == 2


# ------------------------------------------------------------------------------------------------------------ failures
class Trap(nn.Module):
    """Passes on what it gets, and raises on one rank in one step."""

    def __init__(self, rank: int, step: int) -> None:
        super().__init__()
        self.rank, self.left = rank, step

    def forward(self, x):
        if int(os.environ["RANK"]) == self.rank:
            self.left -= 1
            if self.left < 0:
                raise ValueError("a layer raised")
        return x


def fail(rank, after):
    """As a program: what is not caught reaches the others by itself."""
    status = 0
    try:
        torch.manual_seed(0)
        layers = [nn.Linear(8, 8), Trap(rank, after), Trap(rank, after), Sparse(2, **DROPLESS)]
        model = PipelineModule(layers, loss_fn=loss_fn, partition_method=[1, 0, 0, 1])
        config = {**config_of(PIPES), "comm": {"wait_limit_s": 20.0}}
        engine = trilithon.initialize(model, config)
        for batches in batches_of():
            engine.train_step(own(engine, batches))
    except Exception:
        sys.excepthook(*sys.exc_info())
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@pytest.mark.parametrize("after", [0, 4])
def test_a_rank_that_fails_on_a_stage_without_experts_ends_all_by_name(after):
    """Before the stages know each other's shapes, and after: the next stage's other rank must not wait for ever."""
    began = time.monotonic()
    results = run_ranks_raw(fail, 4, 1, after, timeout_s=40)
    said = "".join(result.output for result in results)
    assert [result.exit_code for result in results] == [EXIT_STATUS, 1, EXIT_STATUS, EXIT_STATUS], said
    assert "rank 1 raised ValueError: a layer raised" in said
    assert time.monotonic() - began < 20.0


# ------------------------------------------------------------------------------------------------------------ refusals
@ranks(4)
def test_what_one_stage_refuses_all_ranks_refuse(world_size):
    """Nobody waits for a stage that raised by itself."""
    for ep_sizes in ((1, 4), (4, 1)):
        with pytest.raises(ConfigError, match=r"block\.moe: ep_size=4 does not divide the 2 ranks"):
            trilithon.initialize(make(ep_sizes, **DROPLESS), config_of(PIPES))
    trilithon.initialize(make(**DROPLESS), config_of(PIPES)).close()  # the ranks are in step


@ranks(4)
def test_experts_that_stages_share_are_refused_and_whole_ones_are_not(world_size):
    def shared(ep_size):
        torch.manual_seed(0)
        tied = [TiedLayerSpec("experts", Sparse, ep_size, tied_weight_attr="block.moe.gate.weight") for _ in range(2)]
        layers = [tied[0], nn.Linear(8, 8), nn.Linear(8, 8), tied[1]]
        return PipelineModule(layers, loss_fn=loss_fn, partition_method="uniform")

    with pytest.raises(ConfigError, match=r"shared by stages \[0, 1\] of the pipeline.*ep_size=2.*experts of its own"):
        trilithon.initialize(shared(2), config_of(PIPES))
    with trilithon.initialize(shared(1), config_of(PIPES)) as engine:
        assert engine.train_step(own(engine, batches_of()[0])) > 0


@ranks(4)
def test_compressed_rules_and_stage_3_stay_refused(world_size):
    for more, text in (
        ({"optimizer": "onebit_adam"}, r"mesh\.pipe=2"), ({"zero": {"stage": 3}}, "Use zero.stage 0, 1 or 2 inside"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=text):
            trilithon.initialize(make(**DROPLESS), {**config_of(PIPES), **more})
