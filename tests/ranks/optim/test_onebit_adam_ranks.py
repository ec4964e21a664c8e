"""1-bit Adam and APMSqueeze on real ranks, held against Adam and against the formula of their compressed phase."""

import math

import pytest
import torch
from compressed_runs import BATCHES, SIGN, engine_of, everyones, fields, gpt, held, same_everywhere, train, weights

from trilithon.errors import ConfigError
from trilithon.testing import ranks
from trilithon.testing.models import MLP, TinyGPT
from trilithon.testing.parity import rank_part, token_batches, vector_batches
from trilithon.zero.projection import LENGTH

NEVER = 10_000


def state_of(engine):
    return [*weights(engine).values(), *fields(engine).values()]


@ranks(2, 3)
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_warm_up_is_adam_bit_for_bit(world_size, stage, precision):
    extra = {"stage": stage, "precision": precision, "clip_norm": 1.0}
    with engine_of({"kind": "adamw", "lr": 3e-3, "weight_decay": 0.1}, **extra) as engine:
        losses, expected = train(engine, BATCHES[:4]), state_of(engine)
    for rule in ({**SIGN, "freeze_step": 4}, {"kind": "apmsqueeze", "lr": 3e-3, "freeze_step": 4}):
        with engine_of({**rule, "weight_decay": 0.1}, **extra) as engine:
            assert train(engine, BATCHES[:4]) == losses
            assert all(torch.equal(a, b) for a, b in zip(state_of(engine), expected, strict=True))
            train(engine, BATCHES[4:5])  # and then it is not
            assert engine._update.rank_state()


@ranks(2, 3, 4)
@pytest.mark.parametrize("stage", [0, 1])
def test_weights_are_equal_on_all_ranks_after_every_step(world_size, stage):
    with engine_of(SIGN, stage=stage, precision="bf16") as engine:
        for batch in BATCHES:
            train(engine, [batch])
            assert same_everywhere(held(engine))
        residual = engine._update.rank_state()["residual"]
        assert residual.any() and len(set(everyones(float(residual.sum())))) == world_size


@ranks(3)
@pytest.mark.parametrize("target", ["momentum", "gradient"])
@pytest.mark.parametrize("stage", [0, 1])
def test_without_compression_it_is_momentum_under_the_frozen_variance(world_size, stage, target):
    rule = {"kind": "apmsqueeze", "compressor": "identity", "compress_target": target, "lr": 3e-3, "freeze_step": 3}
    with engine_of({**rule, "weight_decay": 0.1}, stage=stage) as engine:
        train(engine, BATCHES[:3])
        before = fields(engine)
        mean = {}
        for batch in BATCHES[3:6]:
            engine.backward(engine(*rank_part(batch[0], engine.rank, world_size)))
            mean = {name: grad.double() for name, grad in engine.view("grad")}
            engine.step()
            for name, grad in mean.items():
                p, m, v = (before[f"{kind}/{name}"].double() for kind in ("master", "exp_avg", "exp_avg_sq"))
                m = 0.9 * m + 0.1 * grad
                direction = m / (1 - 0.9**engine.steps) / ((v / (1 - 0.999**3)).sqrt() + 1e-8)
                before[f"master/{name}"] = p * (1 - 3e-4) - 3e-3 * direction * (v != 0)
                before[f"exp_avg/{name}"] = m * (v != 0)
        after = fields(engine)
        for key, expected in before.items():
            largest = float(expected.abs().max())
            # three steps: two roundings of the weight, and a direction (up to sqrt(1000)) that is off by a few ulp
            limit = 3 * 2.0**-24 * (2 * largest + (8 * 3e-3 * 1000**0.5 if key.startswith("master") else 8 * largest))
            assert (after[key].double() - expected).abs().max() <= limit, key


@ranks(2, 4)
def test_apmsqueeze_with_signs_is_onebit_adam_and_stages_agree(world_size):
    found = []
    for stage in (0, 1):
        for rule in (SIGN, {"kind": "apmsqueeze", "compressor": "sign", "lr": 3e-3, "freeze_step": 3}):
            with engine_of(rule, stage=stage) as engine:
                train(engine)
                found.append(state_of(engine))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@ranks(2, 3)
def test_bytes_of_both_phases(world_size):
    numel = sum(p.numel() for p in gpt().parameters())
    padded = -(-numel // (8 * world_size)) * 8 * world_size
    expected = 2 * (world_size - 1) * padded // (8 * world_size) + 8 * (world_size - 1)
    with engine_of(SIGN) as engine:
        sent = []
        for batch in BATCHES[:6]:
            with engine.ledger.measure() as one:
                train(engine, [batch])
            sent.append(one)
        assert all(one.reduce_scatter_bytes > 0 and one.all_to_all_bytes == 0 for one in sent[:3])
        for one in sent[4:]:  # the fourth also sets up
            assert one.reduce_scatter_bytes == 0
            assert one.all_to_all_bytes + one.all_gather_bytes == expected
            assert one.all_reduce_bytes <= 64 + 16 * LENGTH * (world_size - 1) / world_size  # one agreement
        assert sent[3].all_to_all_bytes == sent[4].all_to_all_bytes  # the switch comes after exactly three updates
        ring = 4 * 2 * (world_size - 1) * numel / world_size
        assert ring / expected > 31.0


@ranks(2)
@pytest.mark.parametrize("stage", [0, 1])
def test_a_step_that_is_not_finite_on_one_rank_changes_nothing_on_any(world_size, stage):
    with engine_of(SIGN, MLP(), stage=stage, precision={"kind": "fp16", "loss_scale": 8.0}) as engine:
        batches = vector_batches(6, 12)
        train(engine, batches[:5])
        before = [t.clone() for t in (*held(engine), *fields(engine).values(), *engine._update.rank_state().values())]
        counts = engine._update.state_dict()
        x, target = rank_part(batches[5][0], engine.rank, world_size)
        if engine.rank == 1:
            x = torch.full_like(x, torch.nan)
        engine.backward(engine(x, target))
        assert engine.step() is False and engine.non_finite > 0
        after = [*held(engine), *fields(engine).values(), *engine._update.rank_state().values()]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert engine._update.state_dict() == counts
        train(engine, batches[5:])
        assert same_everywhere(held(engine))


@ranks(2)
@pytest.mark.parametrize("stage", [0, 1])
def test_micro_batches_give_what_one_batch_gives_in_both_phases(world_size, stage):
    """Same samples: one batch, four micro-batches, and no_sync. Signs flip only where rounding decides them."""
    momenta = []
    for accumulation in (1, 4):
        with engine_of(
            {"kind": "apmsqueeze", "compressor": "identity", "freeze_step": 2}, MLP(), rows=16 // accumulation,
            accumulation=accumulation, stage=stage, clip_norm=0.05,
        ) as engine:  # fmt: skip
            for whole in vector_batches(4, 16):
                mine = [rank_part(whole[0], engine.rank, world_size)]
                size = 8 // accumulation
                micro = [tuple(t[i * size : (i + 1) * size] for t in mine[0]) for i in range(accumulation)]
                engine.train_step(micro)
            momenta.append({**dict(engine.view("exp_avg")), "norm": torch.tensor(engine.grad_norm)})
    for name, one in momenta[0].items():
        assert torch.allclose(one, momenta[1][name], rtol=1e-4, atol=1e-7), name


@ranks(3)
def test_the_norm_of_the_mean_that_nobody_has_clips_alike_on_all_ranks(world_size):
    """Estimated, with a standard deviation of 4.5 % if the gradient is spread evenly; in no case above what local
    norms allow."""
    with engine_of({**SIGN, "freeze_step": 1}, clip_norm=0.1) as engine:
        train(engine, BATCHES[:1])
        for batch in BATCHES[1:4]:
            engine.backward(engine(*rank_part(batch[0], engine.rank, world_size)))
            sharding = engine._sharding
            sharding.settle()
            local = torch.cat([grad.double() for _, grad in sharding.local.items()])
            mine = float(local.square().sum())
            mean = sum(everyones(local)) / world_size
            engine.step()
            assert engine.grad_norm == pytest.approx(float(mean.norm()), rel=0.25)
            assert engine.grad_norm <= math.sqrt(math.fsum(everyones(mine)) / world_size) * (1 + 1e-6)
            assert engine.clip_factor == pytest.approx(0.1 / engine.grad_norm, rel=1e-4)
            assert len(set(everyones((engine.grad_norm, engine.clip_factor)))) == 1


@ranks(2)
@pytest.mark.parametrize("stage", [0, 1])
def test_frozen_unused_and_one_sided_parameters(world_size, stage):
    model = TinyGPT(frozen=True, unused=True)
    with engine_of({**SIGN, "weight_decay": 0.1}, model, stage=stage) as engine:
        start = weights(engine)
        train(engine, BATCHES[:6])
        end = weights(engine)
        for name, value in start.items():
            still = name.startswith(("positions", "blocks.0", "unused"))
            assert torch.equal(end[name], value) == still, name
    with engine_of({**SIGN, "freeze_step": 1}, TwoHeads(), stage=stage) as engine:
        for step in range(4):  # each rank uses a head of its own; one step in the middle uses only one of them
            head = 0 if step == 2 else engine.rank
            before = {**weights(engine), **fields(engine)}
            engine.backward(engine(torch.randn(6, 8), head))
            engine.step()
            after = {**weights(engine), **fields(engine)}
            idle = {name for name in before if ".1." in name} if step == 2 else set()
            still = {name for name in before if torch.equal(before[name], after[name])}
            assert still - frozen_variance(step) == idle - frozen_variance(step)
        assert same_everywhere(held(engine))


def frozen_variance(step):
    names = {f"exp_avg_sq/{n}" for n in ("trunk.weight", "trunk.bias", *(f"heads.{i}.{p}" for i in (0, 1)
             for p in ("weight", "bias")))}  # fmt: skip
    return names if step else set()


class TwoHeads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.trunk = torch.nn.Linear(8, 8)
        self.heads = torch.nn.ModuleList(torch.nn.Linear(8, 2) for _ in range(2))

    def forward(self, x, head):
        return self.heads[head](torch.tanh(self.trunk(x))).square().mean()


@ranks(2)
@pytest.mark.parametrize("kind", ["onebit_adam", "apmsqueeze"])
def test_masks(world_size, kind):
    """Rows of an embedding that warm-up never saw stay as they are, as do those that the user masks."""
    model = gpt(tied=False)
    shape = model.positions.weight.shape

    def groups(module):
        mask = torch.ones(shape)
        mask[3:5] = 0
        rest = [p for p in module.parameters() if p is not module.positions.weight]
        return [{"params": [module.positions.weight], "exp_avg_mask": mask}, {"params": rest}]

    rule = {**SIGN, "kind": kind}
    short = [[(batch[0][0][:, :11],)] for batch in BATCHES]  # positions from 10 on are never used
    with engine_of(rule, model, parameters=groups) as engine:
        train(engine, short[:3])
        start = weights(engine)["positions.weight"]
        train(engine, short[3:8])
        end, momentum = weights(engine)["positions.weight"], dict(engine.view("exp_avg"))["positions.weight"]
        assert torch.equal(start[10:], end[10:]) and torch.equal(start[3:5], end[3:5])
        assert not momentum[10:].any() and not momentum[3:5].any()
        assert (start[:3] != end[:3]).all()
        assert (end - start).abs().max() < 5 * 3e-3 * 40  # nothing was divided by eps
    with pytest.raises(ConfigError, match="exp_avg_mask of parameter group 0 has 3 elements"), engine_of(
        {**SIGN, "freeze_step": 1}, gpt(),
        parameters=lambda m: [{"params": list(m.parameters()), "exp_avg_mask": torch.ones(3)}],
    ) as engine:  # fmt: skip
        train(engine, BATCHES[:2])


@ranks(2)
@pytest.mark.parametrize("stage", [0, 1])
def test_groups_keep_their_settings_and_may_stay_uncompressed(world_size, stage):
    def groups(module):
        norms = [p for p in module.parameters() if p.ndim == 1]
        rest = [p for p in module.parameters() if p.ndim > 1]
        return [{"params": rest, "weight_decay": 0.1}, {"params": norms, "lr": 1e-2, "non_freeze": True}]

    with engine_of(SIGN, stage=stage, parameters=groups) as engine:
        train(engine, BATCHES[:4])
        before = fields(engine)
        engine.backward(engine(*rank_part(BATCHES[4][0], engine.rank, world_size)))
        grads = dict(engine.view("grad"))
        engine.step()
        after = fields(engine)
        for name, grad in grads.items():
            v = before[f"exp_avg_sq/{name}"]
            if grad.ndim == 1:  # plain Adam goes on
                assert torch.allclose(after[f"exp_avg_sq/{name}"], v * 0.999 + 0.001 * grad**2, rtol=1e-5, atol=1e-12)
            else:
                assert torch.equal(after[f"exp_avg_sq/{name}"], v)
                sizes = after[f"exp_avg/{name}"].abs().unique()
                assert sizes.numel() <= world_size + 1  # one size for each server's chunk, and zero for masked ones
        assert same_everywhere(held(engine))


@ranks(1)
@pytest.mark.parametrize("stage", [0, 1])
def test_one_rank_freezes_the_variance_and_sends_nothing(world_size, stage):
    with engine_of(SIGN, stage=stage) as engine:
        train(engine, BATCHES[:3])
        variance = dict(engine.view("exp_avg_sq"))
        losses = train(engine, BATCHES[3:])
        assert engine.ledger.sent_bytes() == 0 and engine._update.rank_state() == {}
        assert all(torch.equal(variance[name], v) for name, v in engine.view("exp_avg_sq"))
        assert losses[-1] < losses[0]


@ranks(2)
@pytest.mark.parametrize("compressor", [
    {"kind": "sign", "norm": "l1", "scope": "chunk"}, {"kind": "topk", "ratio": 0.1}, {"kind": "quant", "bits": 4},
    {"kind": "quant", "bits": 8, "block": 256}, "fp16", "bf16",
])  # fmt: skip
def test_each_compressor_trains(world_size, compressor):
    rule = {"kind": "apmsqueeze", "compressor": compressor, "lr": 3e-3, "freeze_step": 4}
    with engine_of({**rule, "server_compressor": {"kind": "quant", "bits": 8}}) as engine:
        batches = token_batches(1, 12) * 14
        losses = train(engine, batches)
        assert losses[-1] < losses[4] - 0.1
        assert same_everywhere(held(engine))


@ranks(2)
def test_per_tensor_scaling_equalises_what_is_lost(world_size):
    """Momenta of very different size: with one scale, the small ones send noise; scaled, they send themselves."""
    lost = {}
    for scaling in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
        with torch.no_grad():
            model[1].weight.mul_(1e-3)
        with engine_of({**SIGN, "lr": 0.0, "per_tensor_scaling": scaling}, Squares(model)) as engine:
            for batch in [[(torch.randn(12, 16),)]] * 3:
                train(engine, [batch])
            before = dict(engine.view("exp_avg"))["model.0.weight"]
            train(engine, [batch])
            after = dict(engine.view("exp_avg"))["model.0.weight"]
            lost[scaling] = float((after - before).norm() / before.norm())
    assert lost[True] < 2 < 10 * lost[True] < lost[False]


class Squares(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x).square().mean()


@ranks(2)
@pytest.mark.parametrize("stage", [0, 1])
def test_the_warm_up_ends_by_itself_once_the_variance_has_settled(world_size, stage):
    rule = {"kind": "onebit_adam", "lr": 1e-6, "betas": [0.9, 0.9], "freeze_step": "auto"}
    with engine_of(rule, MLP(), stage=stage) as engine:
        train(engine, vector_batches(1, 12) * 26)  # the same gradient again and again
        last = engine._update.state_dict()["freeze"]["last"]
        assert last == 22  # two periods of 1 / (1 - beta2) steps, and the third check in a row
        assert len(set(everyones(last))) == 1
        assert engine._update.state_dict()["frozen"]["updates"] == last
