"""1-bit LAMB on real ranks: LAMB at first, then the formulas of its compressed phase, and what it sends."""

import pytest
import torch
from compressed_runs import BATCHES, engine_of, everyones, fields, gpt, held, same_everywhere, train, weights

from trilithon.config import OneBitLamb
from trilithon.optim.onebit_lamb import TrustRatios
from trilithon.testing import ranks
from trilithon.testing.models import MLP, TinyGPT
from trilithon.testing.parity import rank_part, vector_batches

RULE = {"kind": "onebit_lamb", "lr": 0.01, "freeze_step": 3, "weight_decay": 0.1}


@ranks(2, 3)
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_warm_up_is_lamb_bit_for_bit(world_size, stage, precision):
    extra = {"stage": stage, "precision": precision, "clip_norm": 1.0}
    with engine_of({"kind": "lamb", "lr": 0.01, "weight_decay": 0.1}, **extra) as engine:
        losses, expected = train(engine, BATCHES[:3]), [*weights(engine).values(), *fields(engine).values()]
    with engine_of(RULE, **extra) as engine:
        assert train(engine, BATCHES[:3]) == losses
        found = [*weights(engine).values(), *fields(engine).values()]
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@ranks(2, 4)
def test_ranks_and_stages_agree_and_one_vector_travels(world_size):
    found = []
    numel = sum(p.numel() for p in gpt().parameters())
    padded = -(-numel // (8 * world_size)) * 8 * world_size
    for stage in (0, 1):
        with engine_of(RULE, stage=stage) as engine:
            for batch in BATCHES[:8]:
                with engine.ledger.measure() as sent:
                    train(engine, [batch])
                assert same_everywhere(held(engine))
            assert sent.all_to_all_bytes == (world_size - 1) * (padded // (8 * world_size) + 4)
            if stage == 0:
                assert sent.all_gather_bytes == sent.all_to_all_bytes and sent.reduce_scatter_bytes == 0
            found.append({**weights(engine), **fields(engine)})
            assert len(set(everyones(tuple(engine._update.coefficients())))) == 1
    # the two squares of a trust ratio are added in another order at stage 1; nothing else differs
    for name, value in found[0].items():
        assert torch.allclose(value, found[1][name], rtol=1e-5, atol=1e-7), name


@ranks(3)
def test_the_compressed_phase_follows_its_formulas(world_size):
    """Everything but the communication, element by element in fp64, from what the step left behind."""
    with engine_of({**RULE, "bias_correction": False}) as engine:
        train(engine, BATCHES[:3])
        variance, ratios = dict(engine.view("exp_avg_sq")), TrustRatios(OneBitLamb())
        ratios.load_state_dict(engine._update.state_dict()["ratios"])
        last = dict.fromkeys(variance, 1.0)
        for batch in BATCHES[3:8]:
            before = fields(engine)
            train(engine, [batch])
            after = fields(engine)
            coefficients = dict(zip(engine._sharding.trainable_names, engine._update.coefficients(), strict=True))
            for name, v in variance.items():
                assert torch.equal(after[f"exp_avg_sq/{name}"], v)  # frozen
                m, m_before = after[f"exp_avg/{name}"].double(), before[f"exp_avg/{name}"].double()
                fresh_before = before.get(f"exp_avg_sq_fresh/{name}", v).double()
                fresh = 0.999 * fresh_before + 0.001 * ((m - 0.9 * m_before) / 0.1) ** 2
                assert torch.allclose(after[f"exp_avg_sq_fresh/{name}"].double(), fresh, rtol=1e-4, atol=1e-14)
                x, bottom = before[f"master/{name}"].double(), v.double().sqrt() + 1e-8
                moment = m / bottom
                direction = moment + 0.1 * x
                share = min(1.0, float(moment.norm() / direction.norm()))
                active = v != 0
                wanted = float((bottom / (fresh.sqrt() + 1e-8))[active].max())
                factor = min(max(share * wanted + 1 - share, 0.5), 4.0)
                factor = min(max(factor, 0.9 * last[name]), 1.1 * last[name])
                assert coefficients[name] == pytest.approx(factor * ratios.mean(name), rel=1e-4)
                assert 0.5 <= factor <= 4.0 and abs(factor / last[name] - 1) <= 0.1 + 1e-9
                last[name] = factor
                moved = x - 0.01 * coefficients[name] * direction
                limit = 2.0**-22 * float(x.abs().max()) + 1e-5 * float((moved - x).abs().max())
                assert (after[f"master/{name}"].double() - moved).abs().max() <= limit, name


@ranks(2)
def test_scaled_momenta_have_one_magnitude_and_small_tensors_lose_less(world_size):
    lost = {}
    for scaling in (True, False):
        torch.manual_seed(0)
        model = MLP(width=16)
        with torch.no_grad():
            model.last.weight.mul_(1e-3)
        with engine_of({**RULE, "lr": 0.0, "per_tensor_scaling": scaling}, model) as engine:
            batch = vector_batches(1, 12)
            train(engine, batch * 3)
            before = dict(engine.view("exp_avg"))
            train(engine, batch)
            factors = engine._update.state_dict()["scaling"]
            after = dict(engine.view("exp_avg"))
            if scaling:
                sizes = [factors[name] * float(m.square().mean().sqrt()) for name, m in before.items()]
                assert max(sizes) / min(sizes) == pytest.approx(1.0, rel=1e-5)
            name = "layers.0.weight"
            lost[scaling] = float((after[name] - before[name]).norm() / before[name].norm())
    assert lost[True] < lost[False] / 2


@ranks(2)
@pytest.mark.parametrize("stage", [0, 1])
def test_frozen_idle_and_skipped_steps(world_size, stage):
    with engine_of(RULE, TinyGPT(frozen=True, unused=True), stage=stage, precision="bf16") as engine:
        start = weights(engine)
        train(engine, BATCHES[:6])
        end = weights(engine)
        for name, value in start.items():
            still = name.startswith(("positions", "blocks.0", "unused"))
            assert torch.equal(end[name], value) == still, name
        before, counts = [t.clone() for t in held(engine)], engine._update.state_dict()
        residuals = {name: value.clone() for name, value in engine._update.rank_state().items()}
        scale = float("inf") if engine.rank else 1.0
        engine.backward(engine(*rank_part(BATCHES[6][0], engine.rank, world_size)) * scale)
        assert engine.step() is False
        assert all(torch.equal(a, b) for a, b in zip(before, held(engine), strict=True))
        assert engine._update.state_dict() == counts
        assert all(torch.equal(value, residuals[name]) for name, value in engine._update.rank_state().items())


@ranks(1)
def test_one_rank_trains_without_sending(world_size):
    with engine_of(RULE) as engine:
        losses = train(engine)
        assert losses[-1] < losses[0] and engine.ledger.sent_bytes() == 0
        assert engine._update.rank_state() == {}
