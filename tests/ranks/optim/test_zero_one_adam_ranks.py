"""0/1 Adam on real ranks: full, one-bit and silent steps where the policy says so, and one set of weights after each
round."""

import pytest
import torch
from compressed_runs import BATCHES, engine_of, everyones, fields, gpt, held, same_everywhere, train, weights

from trilithon.testing import ranks
from trilithon.testing.models import TinyGPT
from trilithon.testing.parity import rank_part

RULE = {"kind": "zero_one_adam", "lr": 3e-3, "var_freeze_step": 6, "var_update_scaler": 2, "local_step_scaler": 2,
        "local_step_clipper": 4}  # fmt: skip


@ranks(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_while_every_step_is_full_it_is_adam_bit_for_bit(world_size, precision):
    with engine_of({"kind": "adamw", "lr": 3e-3, "weight_decay": 0.1}, precision=precision) as engine:
        losses, expected = train(engine, BATCHES[:4]), [*weights(engine).values(), *fields(engine).values()]
    rule = {**RULE, "var_update_scaler": 4, "weight_decay": 0.1}
    with engine_of(rule, precision=precision) as engine:
        assert train(engine, BATCHES[:4]) == losses
        found = [*weights(engine).values(), *fields(engine).values()]
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert engine._update.policy.full_rounds == 4
    warm = {**rule, "var_update_scaler": 1, "full_precision_warmup": 4}
    with engine_of(warm, precision=precision) as engine:
        assert train(engine, BATCHES[:4]) == losses


@ranks(2, 3)
def test_steps_communicate_as_the_policy_says_and_rounds_make_ranks_one(world_size):
    numel = sum(p.numel() for p in gpt().parameters())
    padded = -(-numel // (8 * world_size)) * 8 * world_size
    onebit = 2 * (world_size - 1) * padded // (8 * world_size) + 8 * (world_size - 1)
    kinds, together = [], []
    with engine_of(RULE) as engine:
        for step, batch in enumerate(BATCHES, start=1):
            before = dict(engine.view("exp_avg_sq")) if step < 8 else {}
            with engine.ledger.measure() as sent:
                train(engine, [batch])
            kinds.append("full" if sent.reduce_scatter_bytes else "onebit" if sent.all_to_all_bytes else "none")
            if kinds[-1] == "onebit":
                assert sent.all_to_all_bytes + sent.all_gather_bytes == onebit
            together.append(same_everywhere(held(engine)))
            if before:
                moved = any(not torch.equal(v, before[name]) for name, v in engine.view("exp_avg_sq"))
                assert moved == (kinds[-1] == "full")
        policy = engine._update.policy
        assert (policy.full_rounds, policy.onebit_rounds, policy.skipped_rounds) == (
            kinds.count("full"), kinds.count("onebit"), kinds.count("none"))  # fmt: skip
    # phase A: gaps of 1, 1, 2, 2; phase B: gaps of 1, 1, then 2, 2, then 4
    assert kinds == ["full", "full", "onebit", "full", "onebit", "full", "onebit", "onebit"] + ["none", "onebit"] + [
        "none", "none"]  # fmt: skip
    assert together == [kind != "none" for kind in kinds]


@ranks(2)
def test_a_round_applies_the_mean_of_what_ranks_did(world_size):
    """From the last point of agreement, in fp64, up to what compression has not sent yet."""
    with engine_of({**RULE, "local_step_scaler": 100, "per_tensor_scaling": False}) as engine:
        train(engine, BATCHES[:6])
        engine._update.policy.local_interval = 3
        start, variance = weights(engine), dict(engine.view("exp_avg_sq"))
        momenta = {name: m.double() for name, m in engine.view("exp_avg")}
        update, total, rates = engine._update, dict.fromkeys(start, 0.0), 0.0
        for step, batch in enumerate(BATCHES[6:9], start=7):
            engine.backward(engine(*rank_part(batch[0], engine.rank, world_size)))
            engine._sharding.settle()
            own = {name: grad.double().clone() for name, grad in engine._sharding.local.items()}
            engine.step()
            rate = 3e-3 / (1 - 0.9**step)
            rates += rate
            for name, grad in own.items():
                here = momenta[name].reshape(-1)
                here.mul_(0.9).add_(0.1 * grad).mul_((variance[name].reshape(-1) != 0).double())
                total[name] = total[name] + rate * here
        vector = update._part.phase.vector
        sent = {}
        for name in start:
            kept = vector.view(name, update.rank_state()["residual"][: vector.numel]).double()
            chunk = update._part.phase.exchange.reduce.server_residual
            servers = vector.view(name, torch.cat(everyones(chunk))[: vector.numel]).double()
            mine = torch.as_tensor(total[name]) - kept
            sent[name] = sum(everyones(mine)) / world_size - servers
        refreshes = update._refreshes.updates
        for name, u in sent.items():
            bottom = (variance[name].double().reshape(-1) / (1 - 0.999**refreshes)).sqrt() + 1e-8
            moved = torch.where(variance[name].reshape(-1) != 0, u / bottom, 0.0)
            expected = start[name].double().reshape(-1) - moved
            found = weights(engine)[name].double().reshape(-1)
            assert torch.allclose(found, expected, rtol=1e-4, atol=2e-4 * float(moved.abs().max()) + 1e-7), name
            m = dict(engine.view("exp_avg"))[name].double().reshape(-1)
            assert torch.allclose(m, torch.where(variance[name].reshape(-1) != 0, u / rates, 0.0), rtol=1e-3, atol=1e-6)


@ranks(2)
def test_reading_whole_weights_makes_ranks_one_first(world_size):
    reads = (
        lambda e: e.state_dict(),
        lambda e: dict(e.full_parameters()),
        lambda e: dict(e.view("param")),
        lambda e: e.eval_step(rank_part(BATCHES[0][0], 0, world_size)),
        lambda e: e.drain(),
    )
    for read in reads:
        with engine_of({**RULE, "var_freeze_step": 2}) as engine:
            train(engine, BATCHES[:5])
            assert engine._update.policy.since_sync == 1
            assert not same_everywhere(held(engine))
            read(engine)
            assert same_everywhere(held(engine))


@ranks(2, 3)
def test_a_round_that_was_forced_is_the_plain_mean_and_leaves_residuals_alone(world_size):
    """A compressed one would put residuals of whole rounds into what one step did, and blow up the momentum."""
    with engine_of({**RULE, "var_freeze_step": 2}) as engine:
        train(engine, BATCHES[:5])
        update = engine._update
        assert update.policy.since_sync == 1
        own = list(engine._sharding.slices())
        momenta = []
        for slice_ in own:
            with update.state(slice_) as state:
                momenta.append(state["exp_avg"].clone())
        residuals = [t.clone() for t in update.rank_state().values()]
        with engine.ledger.measure() as sent:
            engine.drain()
        assert sent.all_to_all_bytes == 0 < sent.all_reduce_bytes
        assert all(torch.equal(a, b) for a, b in zip(residuals, update.rank_state().values(), strict=True))
        for slice_, mine in zip(own, momenta, strict=True):
            mean = sum(one.double() for one in everyones(mine)) / world_size
            with update.state(slice_) as state:
                torch.testing.assert_close(
                    state["exp_avg"].double(), mean, rtol=1e-5, atol=1e-7 * float(mine.abs().max())
                )


@ranks(2)
def test_decay_is_exactly_geometric_where_no_gradient_comes_and_never_enters_the_momentum(world_size):
    rule = {**RULE, "lr": 0.01, "weight_decay": 0.5, "var_freeze_step": 2}
    with engine_of(rule, gpt(tied=False)) as engine:
        short = [[(batch[0][0][:, :11],)] for batch in BATCHES]
        train(engine, short[:2])
        start = weights(engine)["positions.weight"][11:].double()
        train(engine, short[2:9])
        end, m = weights(engine)["positions.weight"][11:].double(), dict(engine.view("exp_avg"))["positions.weight"]
        assert not m[11:].any()
        assert torch.allclose(end, start * (1 - 0.005) ** 7, rtol=1e-6)


@ranks(2)
def test_idle_frozen_and_skipped_steps(world_size):
    rule = {**RULE, "var_freeze_step": 2, "weight_decay": 0.1}
    with engine_of(rule, TinyGPT(frozen=True, unused=True), precision="bf16") as engine:
        start = weights(engine)
        train(engine, BATCHES[:5])
        policy = engine._update.policy.state_dict()
        before = [t.clone() for t in held(engine)]
        scale = float("nan") if engine.rank else 1.0
        engine.backward(engine(*rank_part(BATCHES[6][0], engine.rank, world_size)) * scale)
        assert engine.step() is False
        assert engine._update.policy.state_dict() == policy
        assert all(torch.equal(a, b) for a, b in zip(before, held(engine), strict=True))
        train(engine, BATCHES[6:9])
        end = weights(engine)
        for name, value in start.items():
            still = name.startswith(("positions", "blocks.0", "unused"))
            assert torch.equal(end[name], value) == still, name


@ranks(2)
def test_a_rate_of_zero_moves_nothing_and_divides_by_nothing(world_size):
    with engine_of({**RULE, "lr": 0.0, "var_freeze_step": 1}) as engine:
        start = weights(engine)
        train(engine, BATCHES[:6])
        assert all(torch.equal(value, start[name]) for name, value in weights(engine).items())
        assert all(m.isfinite().all() for _, m in engine.view("exp_avg"))


@ranks(1)
def test_one_rank_trains_without_sending(world_size):
    with engine_of(RULE) as engine:
        losses = train(engine)
        assert losses[-1] < losses[0] and engine.ledger.sent_bytes() == 0
