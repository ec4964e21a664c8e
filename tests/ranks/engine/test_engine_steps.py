"""What one optimizer step promises: rates, token weights, skipped steps, and agreement of the ranks."""

from __future__ import annotations

import copy
import logging
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import trilithon
from against_plain import STAGES, call_it, config, engine_for, train_engine, train_plainly
from trilithon.errors import NonFiniteError, ProtocolError
from trilithon.testing import ranks
from trilithon.testing.models import MLP
from trilithon.testing.parity import assert_same_training, rank_part, tolerance, vector_batches


class Sums(nn.Module):
    """The summed loss of the rows that count, and how many do: [B, 16], [B, 4], mask [B]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.out = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, target: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        losses = F.mse_loss(self.out(torch.tanh(self.first(x))), target, reduction="none").mean(1)
        return (losses * mask).sum(), mask.sum()


@ranks(2, 3)
@pytest.mark.parametrize("precision", ["fp32", {"kind": "fp16", "loss_scale": 64.0}])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_weighted_backward_follows_the_global_mean_over_tokens(precision, as_tensor, world_size):
    """One rank's micro-batch has no token at all; the reference is the mean over everything at once."""
    generator = torch.Generator().manual_seed(4)
    steps = vector_batches(3, 4 * world_size, 2)
    masks = [[(torch.rand(len(x), generator=generator) < 0.6).float() for x, _ in step] for step in steps]
    for micro in masks:
        micro[0][-4:] = 0.0  # the last rank's first part
    plain = Sums()
    update = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    expected = []
    for step, micro in zip(steps, masks, strict=True):
        update.zero_grad()
        parts = [plain(*batch, mask) for batch, mask in zip(step, micro, strict=True)]
        loss = sum(part[0] for part in parts) / sum(part[1] for part in parts)
        loss.backward()
        expected.append(loss.item())
        update.step()
    limit = 1e-5 if precision == "fp32" else 5e-3  # 3 steps of fp16 gradients, 2^-11 each, and of fp16 weights
    for stage in STAGES:
        engine = engine_for(Sums(), stage, accumulation=2, precision=precision)
        for index, (step, micro) in enumerate(zip(steps, masks, strict=True)):
            for batch, mask in zip(step, micro, strict=True):
                total, count = engine(*rank_part((*batch, mask), engine.rank, world_size))
                engine.backward(total, weight=count if as_tensor else count.item())
            assert engine.step()
            assert engine.loss == pytest.approx(expected[index], rel=limit)
        for (name, got), reference in zip(engine.full_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(got, reference.detach(), rtol=limit, atol=limit, msg=f"{stage} {name}")
        engine.close()


@ranks(2)
def test_mixing_weights_or_no_weight_at_all_is_refused():
    for stage in STAGES:
        with engine_for(Sums(), stage, accumulation=2) as engine:
            part = (torch.ones(2, 16), torch.ones(2, 4), torch.ones(2))
            engine.backward(engine(*part)[0], weight=2)
            with pytest.raises(ProtocolError, match="either all backwards before a step get a weight"):
                engine.backward(engine(*part)[0])
            engine.backward(engine(*part)[0], weight=2)
            assert engine.step()
            for _ in range(2):
                engine.backward(engine(*part)[0], weight=0)
            with pytest.raises(ProtocolError, match="sum to 0"):
                engine.step()
            for _ in range(2):
                engine.backward(engine(*part)[0], weight=2)
            assert engine.step()


@ranks(2)
def test_the_users_own_groups_and_scheduler_stay_live():
    """The scheduler belongs to the user; an edit of a group's rate takes effect at the next step."""
    batches = vector_batches(4, 4)

    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        groups = [{"params": model.layers.parameters(), "lr": 0.1}, {"params": model.last.parameters(), "lr": 0.02}]
        return torch.optim.SGD(groups, lr=0.5, momentum=0.9)

    plain = MLP()
    update = optimizer_of(plain)
    schedule = torch.optim.lr_scheduler.StepLR(update, 1, gamma=0.5)
    for step, ((x, target),) in enumerate(batches):
        if step == 2:
            update.param_groups[1]["lr"] = 0.3
            update.param_groups[0]["weight_decay"] = 0.1
        update.zero_grad()
        plain(x, target).backward()
        update.step()
        schedule.step()
    for stage in STAGES:
        for given in (False, True):
            model = MLP()
            own = optimizer_of(model)
            own_schedule = torch.optim.lr_scheduler.StepLR(own, 1, gamma=0.5)
            groups = own.param_groups
            settings = config(stage)
            del settings["optimizer"]
            engine = trilithon.initialize(model, settings, own, own_schedule if given else None)
            assert engine.lr == [0.1, 0.02]
            for step in range(4):
                if step == 2:
                    groups[1]["lr"] = 0.3
                    groups[0]["weight_decay"] = 0.1
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    train_engine(engine, batches[step : step + 1])
                    if not given:
                        own_schedule.step()
                assert not [w for w in caught if "lr_scheduler" in str(w.message)]
                assert engine.lr == [group["lr"] for group in groups]
            assert own_schedule.last_epoch == 4
            assert own.param_groups is groups
            for (name, got), expected in zip(engine.full_parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(got, expected.detach(), rtol=1e-5, atol=1e-6, msg=f"{stage} {name}")
            engine.close()


class Breaks(nn.Module):
    """The gradient of `second.weight` is infinite where the first input of this rank is above 1e3."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second, self.out = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        broken = bool(x[0, 0] > 1e3)
        hidden = torch.tanh(self.first(x.clamp(-3, 3)))
        weight = Explode.apply(self.second.weight, float("inf") if broken else 1.0)
        hidden = F.linear(hidden, weight, self.second.bias)
        return F.mse_loss(self.out(hidden).float(), target.float())


class Explode(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


def with_overflow(rank: int, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    part = tuple(tensor.clone() for tensor in rank_part(batch, rank, dist.get_world_size()))
    if rank == 1:
        part[0][0, 0] = 1e4
    return part


@ranks(2, 3)
@pytest.mark.parametrize("precision", [{"kind": "fp16", "initial_scale_power": 10, "hysteresis": 1}, "bf16", "fp32"])
def test_an_overflow_on_one_rank_skips_the_step_on_all_and_is_named(precision, world_size):
    logging.getLogger("trilithon").setLevel(logging.INFO)
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("trilithon.engine.training").addHandler(handler)
    batches = vector_batches(3, 2 * world_size, 2)
    name = precision if isinstance(precision, str) else "fp16"
    reference = train_plainly(Breaks, batches, world_size) if name == "fp32" else None
    for stage in STAGES:
        records.clear()
        settings = config(stage, accumulation=2, precision=precision)
        if reference is None:
            settings["lr_schedule"] = {"kind": "exponential", "gamma": 0.5}
        engine = trilithon.initialize(Breaks(), settings)
        train_engine(engine, batches[:1])
        before, lr, scale = dict(engine.full_parameters()), engine.lr, engine.loss_scale
        clean = rank_part(batches[0][0], engine.rank, world_size)
        engine.backward(engine(*clean))
        engine.backward(engine(*with_overflow(engine.rank, batches[0][1])))
        assert engine.step() is False
        assert (engine.steps, engine.skipped_steps, engine.lr) == (1, 1, lr)
        assert engine.loss_scale == (scale / 2 if name == "fp16" else 1.0)
        assert engine.non_finite > 0
        if engine.rank == 0:  # told once
            assert len(records) == 1 and "'second.weight' (rank 1)" in records[0] and "step 2 skipped" in records[0]
        else:
            assert not records
        assert all(torch.equal(before[n], p) for n, p in engine.full_parameters())
        train_engine(engine, batches[1:])
        assert engine.steps == 3
        if reference is not None:
            limits = tolerance("fp32", 3, optimizer="sgd")
            assert_same_training(reference, reference.losses, dict(engine.full_parameters()), limits)
        engine.close()


@ranks(2)
@pytest.mark.parametrize("policy", ["raise", "skip", "ignore"])
@pytest.mark.parametrize("where", ["everywhere", "rank 1"])
def test_nan_in_the_loss_follows_the_policy(policy, where):
    for stage in STAGES:
        settings = {"kind": "fp32", "non_finite": policy}
        engine = engine_for(MLP(), stage, precision=settings)
        train_engine(engine, vector_batches(1, 4))
        before = dict(engine.full_parameters())
        bad = where == "everywhere" or engine.rank == 1
        engine.backward(engine(torch.ones(2, 16), torch.ones(2, 4)) * (float("nan") if bad else 1.0))
        if policy == "raise":
            with pytest.raises(NonFiniteError, match=f"NaN or infinite.*rank {'01'[where == 'rank 1']}"):
                engine.step()
        else:
            assert engine.step() is (policy == "ignore")
        finite = all(bool(p.isfinite().all()) for _, p in engine.full_parameters())
        assert finite is (policy != "ignore")
        if policy != "ignore":
            assert all(torch.equal(before[n], p) for n, p in engine.full_parameters())
            train_engine(engine, vector_batches(1, 4))
        engine.close()


@ranks(2)
def test_calls_out_of_order_are_refused_by_name():
    for stage in STAGES:
        engine = engine_for(MLP(), stage, accumulation=2)
        part = (torch.ones(2, 16), torch.ones(2, 4))
        with pytest.raises(ProtocolError, match=r"step\(\) without a backward"):
            engine.step()
        for wrong in (engine(part[0]), 3.0, None, engine(*part).detach()):
            with pytest.raises(ProtocolError, match=r"one element|trainable parameter"):
                engine.backward(wrong)
        with pytest.raises(ProtocolError, match="micro-batches"):
            engine.train_step([part])
        engine.backward(engine(*part))
        assert engine.step() is False and engine.steps == 0
        engine.backward(engine(*part))
        assert engine.at_boundary and engine.step()
        with pytest.raises(ProtocolError, match="no gradient"):
            list(engine.view("grad"))
        with pytest.raises(ProtocolError, match="unknown kind 'exp_avg'"):
            list(engine.view("exp_avg"))
        engine.close()
        engine.close()
        for call in (partial(engine, *part), engine.step, partial(engine.backward, torch.ones(()))):
            with pytest.raises(ProtocolError, match="closed"):
                call()


@ranks(2)
def test_an_engine_without_optimizer_teaches_another(world_size):
    """Distillation: the teacher only runs forwards, the student trains on its outputs."""
    batches = vector_batches(3, 2 * world_size)
    teacher = MLP(seed=9)

    def distil(call, x, target, teach=teacher):
        with torch.no_grad():
            soft = teach(x)
        return F.mse_loss(call(x), soft) + F.mse_loss(call(x), target)

    reference = train_plainly(MLP, batches, world_size, distil)
    for stage in STAGES:
        settings = {key: value for key, value in config(stage).items() if key != "optimizer"}
        teaching = trilithon.initialize(MLP(seed=9), settings)
        engine = engine_for(MLP(), stage)
        losses, norms = train_engine(engine, batches, lambda call, x, y, t=teaching: distil(call, x, y, t))
        with pytest.raises(ProtocolError, match="no optimizer"):
            teaching.backward(teaching(torch.ones(1, 16)).sum())
        got = dict(engine.full_parameters())
        assert all(
            torch.equal(p, q) for (_, p), q in zip(teaching.full_parameters(), teacher.parameters(), strict=True)
        )
        teaching.close()
        engine.close()
        assert_same_training(reference, losses, got, tolerance("fp32", 3, optimizer="sgd"), norms)


@ranks(2)
def test_gradients_can_be_looked_at_and_are_those_of_plain_pytorch(world_size):
    batches = vector_batches(1, 2 * world_size, 2)
    plain = MLP()
    for batch in batches[0]:
        (plain(*batch) / 2).backward()
    for stage in STAGES:
        for precision in ("fp32", {"kind": "fp16", "loss_scale": 128.0}):
            engine = engine_for(MLP(), stage, accumulation=2, precision=precision)
            for batch in batches[0]:
                engine.backward(call_it(engine, *rank_part(batch, engine.rank, world_size)))
            limit = 1e-6 if precision == "fp32" else 4e-3
            for (name, got), p in zip(engine.view("grad"), plain.parameters(), strict=True):
                torch.testing.assert_close(got, p.grad, rtol=limit, atol=limit, msg=f"{stage} {name}")
            assert [n for n, _ in engine.view("grad", "last.*")] == ["last.weight", "last.bias"]
            assert engine.step()
            engine.close()


@ranks(2)
def test_an_engine_over_a_deep_copied_model_leaves_the_original_alone(world_size):
    for stage in STAGES:
        model = MLP()
        twin = copy.deepcopy(model)
        with engine_for(model, stage) as engine:
            train_engine(engine, vector_batches(1, 2 * world_size))
            assert all(torch.equal(a, b) for a, b in zip(twin.parameters(), MLP().parameters(), strict=True))
