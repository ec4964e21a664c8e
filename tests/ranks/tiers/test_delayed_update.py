"""The one-step delayed update against the recursion of ZeRO-Offload, run in one process with torch's own AdamW.

With p_i the parameters of step i, G_i its gradient, S the first delayed step: p_{S+1} = p_S, then
p_{i+1} = update(p_i, G_{i-1}).
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import trilithon
from trilithon.errors import ConfigError
from trilithon.testing import ranks
from trilithon.testing.engine_run import train_on_engine
from trilithon.testing.models import MLP
from trilithon.testing.parity import rank_part, vector_batches

STEPS, LR, CLIP = 8, 1e-2, 0.2
ADAMW = {"kind": "adamw", "lr": LR, "weight_decay": 0.1}


def rate(step: int) -> float:
    """Of step 1, 2, ...: a different one each time, so that a rate taken from the wrong step shows."""
    return LR * (1 + 0.5 * step)


def recursion(
    batches: list[Any], after: int, dropped: frozenset[int] = frozenset(), drain_after: int = 0
) -> tuple[list[float], list[Tensor]]:
    """Losses, and the parameters once nothing waits. dropped: steps whose gradient is not finite."""
    model = MLP()
    masters = copy.deepcopy(list(model.parameters()))
    optimizer = torch.optim.AdamW(masters, lr=LR, weight_decay=0.1)
    losses: list[float] = []
    waiting: tuple[list[Tensor], float] | None = None
    done = 0  # steps of the schedule: dropped ones do not count

    def land() -> None:
        nonlocal waiting
        if waiting is not None:
            for master, grad in zip(masters, waiting[0], strict=True):
                master.grad = grad
            optimizer.param_groups[0]["lr"] = waiting[1]
            optimizer.step()
            with torch.no_grad():
                for param, master in zip(model.parameters(), masters, strict=True):
                    param.copy_(master)
            waiting = None

    for step, ((x, target),) in enumerate(batches, start=1):
        loss = model(x, target)
        grads = torch.autograd.grad(loss, list(model.parameters()))
        losses.append(float(loss.detach()))
        land()
        if step in dropped:
            continue
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        factor = torch.clamp(CLIP / (norm + 1e-6), max=1.0)
        waiting = ([grad * factor for grad in grads], rate(done + 1))
        done += 1
        if done <= after or step == drain_after:
            land()
    land()
    return losses, [param.detach() for param in model.parameters()]


def delayed(after: int, state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "delayed_update": True, "delay_after_steps": after, "sub_group_numel": 192}


def tiers(folder: Any) -> list[dict[str, Any]]:
    return [{"state": "host"}, {"state": "disk", "path": str(folder)}, {"state": "host", "ratio": 0.5}]


def train(
    batches: list[Any], zero_stage: int, offload: dict[str, Any], **more: Any
) -> tuple[list[float], list[Tensor]]:
    config = {"zero": {"stage": zero_stage}, "optimizer": ADAMW, "clip_norm": CLIP, "offload": offload, **more}
    # `lr_schedule` as torch has it: a factor per number of finished steps
    run = train_on_engine(MLP, batches, config, lr_schedule=lambda steps: rate(steps + 1))
    return run.losses, list(run.parameters.values())


@ranks(1, 2)
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_it_is_the_recursion(tmp_path, zero_stage):
    batches = vector_batches(STEPS, 4)
    for after in (0, 1, 4, STEPS):
        losses, parameters = recursion(batches, after)
        runs = [train(batches, zero_stage, delayed(after, tier)) for tier in tiers(tmp_path)]
        for got_losses, got in runs:
            # a few ulp of fp32 in each of 8 gradients, through Adam's quotient: 1e-5 of a step of LR at most
            torch.testing.assert_close(torch.tensor(got_losses), torch.tensor(losses), rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(got, parameters, rtol=1e-5, atol=2e-6)
            assert all(torch.equal(one, other) for one, other in zip(got, runs[0][1], strict=True))


@ranks(2)
def test_no_delay_is_the_plain_path_and_a_delay_is_not(tmp_path):
    batches = vector_batches(STEPS, 4)
    plain = train(batches, 2, {})
    never = train(batches, 2, delayed(STEPS, {"state": "host"}))
    assert plain[0] == never[0]
    assert all(torch.equal(one, other) for one, other in zip(plain[1], never[1], strict=True))
    late = train(batches, 2, delayed(0, {"state": "host"}))
    assert late[0][1:] != plain[0][1:]


@ranks(2)
@pytest.mark.parametrize("state", ["host", "disk"])
def test_reading_drains_and_the_next_step_begins_anew(tmp_path, state):
    batches = vector_batches(STEPS, 4)
    tier = {"state": state} | ({"path": str(tmp_path)} if state == "disk" else {})
    reads = [
        lambda engine: list(engine.view("exp_avg")),
        lambda engine: list(engine.full_parameters()),
        lambda engine: engine.state_dict(),
        lambda engine: engine.eval_step(rank_part(batches[0][0], engine.rank, 2)),
        lambda engine: engine.eval().train(),
        lambda engine: engine.drain(),
    ]
    losses, parameters = recursion(batches, 1, drain_after=5)
    for read in reads:
        got: list[float] = []
        config = {"zero": {"stage": 2}, "optimizer": ADAMW, "clip_norm": CLIP, "offload": delayed(1, tier)}
        schedule = lambda steps: rate(steps + 1)  # noqa: E731
        with trilithon.initialize(MLP(), config, lr_schedule=schedule) as engine:
            for step, (batch,) in enumerate(batches, start=1):
                got.append(engine.train_step([rank_part(batch, engine.rank, 2)]))
                if step == 5:
                    read(engine)
            module = engine.module
        torch.testing.assert_close(torch.tensor(got), torch.tensor(losses), rtol=1e-5, atol=1e-6)
        left = [param.detach() for param in module.parameters()]
        torch.testing.assert_close(left, parameters, rtol=1e-5, atol=2e-6)


@ranks(2)
@pytest.mark.parametrize("state", ["host", "disk"])
def test_saving_drains_so_a_resumed_run_is_the_one_that_went_on(tmp_path, state):
    batches = vector_batches(STEPS, 4)
    tier = {"state": state} | ({"path": str(tmp_path / "scratch")} if state == "disk" else {})
    config = {"zero": {"stage": 2}, "optimizer": ADAMW, "offload": delayed(1, tier)}

    def run(first: int, last: int, *, load: bool) -> list[Tensor]:
        with trilithon.initialize(MLP(), config) as engine:
            if load:
                engine.load(tmp_path / "saved")
            for step, (batch,) in enumerate(batches[first:last], start=first):
                if step == 4 and not load:
                    engine.save(tmp_path / "saved")
                engine.train_step([rank_part(batch, engine.rank, 2)])
            return [tensor for kind in ("master", "exp_avg") for _, tensor in engine.view(kind)]

    went_on = run(0, STEPS, load=False)
    resumed = run(4, STEPS, load=True)
    assert all(torch.equal(one, other) for one, other in zip(went_on, resumed, strict=True))


@ranks(2)
def test_a_gradient_that_is_not_finite_is_dropped_and_the_one_before_it_lands():
    batches = vector_batches(STEPS, 4)
    bad = {4, 7}
    for step in bad:
        batches[step - 1][0][0][0, 0] = float("nan")
    losses, parameters = recursion(batches, 1, dropped=frozenset(bad))
    got_losses, got = train(batches, 3, delayed(1, {"state": "host"}))
    good = [index for index in range(STEPS) if index + 1 not in bad]
    torch.testing.assert_close(
        torch.tensor([got_losses[i] for i in good]), torch.tensor([losses[i] for i in good]), rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(got, parameters, rtol=1e-5, atol=2e-6)


def test_what_cannot_be_delayed_is_refused():
    def refuse(config: dict[str, Any], match: str, optimizer: Any = None) -> None:
        with pytest.raises(ConfigError, match=match):
            trilithon.initialize(MLP(), {"zero": {"stage": 1}, **config}, optimizer)

    on = {"delayed_update": True}
    refuse({"optimizer": ADAMW, "offload": on}, 'offload.state to "host" or "disk"')
    refuse({"optimizer": {"kind": "lamb"}, "offload": {**on, "state": "host"}}, "adam, adamw, sgd, lion or adagrad")
    refuse({"optimizer": ADAMW, "zero": {"stage": 0}, "offload": {"state": "host"}}, "zero.stage to 1, 2 or 3")
    refuse({"optimizer": ADAMW, "offload": {"state": "disk"}}, "offload.path")
    refuse({"offload": {"state": "host"}}, "RMSprop keeps its own", torch.optim.RMSprop)
