"""Experts over ranks: bytes, tokens that are spread unevenly, recomputation, precisions, and what is refused."""

import copy

import pytest
import torch
import torch.distributed as dist
from moe_models import COEFFICIENT, EPS, EXPERTS, INNER, WIDTH, Block, Mixed, PlainMixed, batches
from torch import nn
from torch.utils.checkpoint import checkpoint

import trilithon
from trilithon.errors import ConfigError, ProtocolError
from trilithon.parallel.moe import MoE
from trilithon.testing.moe_reference import chunk_losses
from trilithon.testing.plain_optimizers import PlainLamb
from trilithon.testing.ranks import ranks

ADAM = {"kind": "adam", "lr": 1e-2, "eps": EPS}
GREEDY = {"top2_2nd_expert_sampling": False, "drop_policy": "position"}


def engine_for(model, stage=2, **config):
    return trilithon.initialize(model, {"zero": {"stage": stage}, "optimizer": ADAM, **config})


@ranks(4)
def test_bytes_are_those_of_the_formulas(world_size):
    """One micro-step: four all-to-alls, (EP - 1) / EP of E C M elements each; and what expert gradients cost."""
    k, tokens, itemsize = 2, 24, 8
    slots = tokens * k // EXPERTS
    for ep in (1, 2, 4):
        engine = engine_for(Mixed(ep_sizes=(ep,), k=k, capacity_factor=1.0, **GREEDY), stage=2)
        x = torch.randn(tokens, WIDTH, dtype=torch.float64)
        with engine.ledger.measure() as forward:
            loss = engine(x)
        one_way = (ep - 1) * EXPERTS * slots * WIDTH * itemsize // ep
        assert forward.all_to_all_bytes == 2 * one_way
        assert forward.calls == (3 if ep > 1 else 0)  # and one agreement on the number of slots
        with engine.ledger.measure() as backward:
            engine.backward(loss)
        assert backward.all_to_all_bytes == 2 * one_way
        if ep > 1:
            layout = next(u.layout for u in engine._sharding.units if u.comm.name == f"expert gather/{ep}")
            replicas = world_size // ep
            assert layout.world_size == replicas
            assert layout.numel == EXPERTS // ep * (2 * WIDTH * INNER + WIDTH + INNER)
            shard_bytes = layout.padded // replicas * itemsize
            reduced = engine.ledger.sent_bytes("reduce_scatter", f"expert reduce/{ep}")
            assert reduced == (replicas - 1) * shard_bytes
            engine.step()
            assert engine.ledger.sent_bytes("all_gather", f"expert gather/{ep}") == (replicas - 1) * shard_bytes
        engine.close()


@ranks(2)
def test_dropless_sends_exactly_the_routed_rows(world_size):
    rank = dist.get_rank()
    model = Mixed(ep_sizes=(2,), k=1, drop_tokens=False)
    engine = engine_for(model)
    layer = model.moes[0]
    with engine.ledger.measure() as sent:
        engine(batches(1, 20)[0].chunk(2)[rank])
    there = int(layer.last.routed.view(2, 2)[1 - rank].sum())  # rows of mine for experts of the other rank
    counts = EXPERTS // 2 * 8
    theirs = torch.zeros(2, dtype=torch.int64)
    theirs[rank] = there
    dist.all_reduce(theirs)
    assert sent.all_to_all_bytes == (int(theirs.sum())) * WIDTH * 8 + counts
    engine.close()


@pytest.mark.parametrize("stage", [0, 2, 3])
@ranks(4, timeout_s=90)
def test_uneven_and_missing_tokens_give_the_gradients_of_one_process(world_size, stage):
    """Ranks with 9, 0, 1 and 14 tokens; the reference routes each part by itself."""
    rank, sizes = dist.get_rank(), [9, 0, 1, 14]
    x = batches(1, sum(sizes))[0]
    for moe in (
        {"k": 2, "drop_tokens": False, **GREEDY},
        {"k": 1, "capacity_factor": 0.75, "min_capacity": 1, **GREEDY},
    ):
        factor = moe.get("capacity_factor")
        plain = PlainMixed(Mixed(**moe), capacity_factor=factor, min_capacity=1)
        losses = [plain(part) for part in x.split(sizes) if len(part)]
        (sum(losses) / world_size).backward()
        expected = plain.stacked(lambda p: p.grad)
        for ep in (2, 4):
            engine = engine_for(Mixed(ep_sizes=(ep,), **moe), stage)
            engine.backward(engine(x.split(sizes)[rank]))
            for name, grad in engine.view("grad"):
                assert torch.allclose(grad, expected[name], rtol=0, atol=1e-12), (name, ep)
            engine.step()
            engine.close()


@pytest.mark.parametrize("stage", [0, 3])
@ranks(4, timeout_s=90)
def test_all_tokens_to_one_expert_and_the_others_still_take_part(world_size, stage):
    model = Mixed(ep_sizes=(4,), k=1, drop_tokens=False)
    with torch.no_grad():
        model.moes[0].gate.weight.zero_()  # ties go to expert 0
    engine = engine_for(model, stage)
    engine.backward(engine(batches(1, 16)[0].chunk(world_size)[dist.get_rank()]))
    assert model.moes[0].last.routed.tolist() == [4, 0, 0, 0]
    grads = {name: grad for name, grad in engine.view("grad") if "experts" in name}
    assert all(grad[0].any() and not grad[1:].any() for grad in grads.values())
    assert engine.step()
    engine.close()


class Recomputed(Mixed):
    reentrant = True

    def forward(self, x):
        x = torch.tanh(self.first(x))
        change, balance, _ = checkpoint(self.moes[0], x, use_reentrant=self.reentrant)
        return self.last(x + change).square().mean() + COEFFICIENT * balance


@pytest.mark.parametrize("stage", [1, 3])
@ranks(2, timeout_s=90)
def test_recomputation_over_ranks_gives_the_same_gradients(world_size, stage):
    """With a lottery and noise; two more all-to-alls per layer, none of them without its partner."""
    rank, x = dist.get_rank(), batches(1, 24)[0]
    for drop in (True, False):
        moe = {"k": 1, "capacity_factor": 0.5, "min_capacity": 1, "drop_tokens": drop, "noisy_gate_policy": "RSample"}
        found = []
        for kind, reentrant in ((Mixed, True), (Recomputed, True), (Recomputed, False)):
            model = kind(ep_sizes=(2,), **moe)
            model.reentrant = reentrant
            engine = engine_for(model, stage)
            torch.manual_seed(40 + rank)
            with engine.ledger.measure() as sent:
                engine.backward(engine(x.chunk(2)[rank]))
            found.append((dict(engine.view("grad")), sent.all_to_all_bytes))
            engine.close()
        for other, _ in found[1:]:
            assert all(torch.equal(other[name], grad) for name, grad in found[0][0].items())
        if drop:
            assert [sent for _, sent in found] == [found[0][1], found[0][1] * 3 // 2, found[0][1] * 3 // 2]


@pytest.mark.parametrize("stage", [1, 3])
@ranks(4, timeout_s=90)
def test_accumulation_and_no_sync_sum_up(world_size, stage):
    rank, data = dist.get_rank(), batches(2, 16)
    moe = {"k": 2, "drop_tokens": False, **GREEDY}
    plain = PlainMixed(Mixed(**moe), capacity_factor=None, min_capacity=4)
    parts = [part for batch in data for part in batch.chunk(world_size)]
    (sum(plain(part) for part in parts) / len(parts)).backward()
    expected = plain.stacked(lambda p: p.grad)
    for local in (False, True):
        engine = engine_for(Mixed(ep_sizes=(2,), **moe), stage, batch={"micro_size": 4, "accumulation": 2})
        if local:
            with engine.no_sync():
                engine.backward(engine(data[0].chunk(world_size)[rank]))
        else:
            engine.backward(engine(data[0].chunk(world_size)[rank]))
        engine.backward(engine(data[1].chunk(world_size)[rank]))
        for name, grad in engine.view("grad"):
            assert torch.allclose(grad, expected[name], rtol=0, atol=1e-12), name
        engine.step()
        engine.close()


@pytest.mark.parametrize("stage", [0, 1, 3])
@ranks(4, timeout_s=90)
def test_bf16_keeps_the_gate_in_fp32_and_stays_near_fp32(world_size, stage):
    rank, data = dist.get_rank(), batches(3, 24, torch.float32)
    losses = {}
    for precision in ("fp32", "bf16"):
        model = Mixed(ep_sizes=(2,), k=1, drop_tokens=False, dtype=torch.float32)
        engine = engine_for(model, stage, precision=precision)
        types = {name: param.dtype for name, param in model.named_parameters()}
        assert types.pop("moes.0.gate.weight") is torch.float32
        assert set(types.values()) == {torch.float32 if precision == "fp32" else torch.bfloat16}
        losses[precision] = []
        for batch in data:
            engine.backward(engine(batch.chunk(world_size)[rank].to(types["last.bias"])))
            engine.step()
            losses[precision].append(engine.loss)
        engine.close()
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.02)  # a few steps of 2^-8


@ranks(4, timeout_s=90)
def test_lamb_gives_each_expert_a_ratio_of_its_own_as_a_loop_of_modules_does(world_size):
    """At every stage and degree, also where an expert is cut over ranks. Ratios are fp32 numbers: 2^-24 a step."""
    rank, data = dist.get_rank(), batches(3, 16)
    moe = {"k": 1, "drop_tokens": False}
    settings = {"lr": 1e-2, "eps": EPS, "weight_decay": 0.1, "min_ratio": 0.01, "max_ratio": 10.0}
    plain = PlainMixed(Mixed(**moe), capacity_factor=None, min_capacity=0)
    optimizer = PlainLamb(plain.parameters(), **settings)
    for batch in data:
        optimizer.zero_grad()
        chunk_losses(plain, batch, world_size).backward()
        optimizer.step()
    expected = plain.stacked(lambda p: p.detach())
    for stage, ep in ((0, 1), (0, 2), (1, 1), (1, 2), (2, 4), (3, 2)):
        engine = engine_for(Mixed(ep_sizes=(ep,), **moe), stage, optimizer={"kind": "lamb", **settings})
        for batch in data:
            engine.backward(engine(batch.chunk(world_size)[rank]))
            engine.step()
        for name, value in engine.view("master"):
            assert float((value - expected[name]).abs().max()) < 1e-6, (stage, ep, name)
        engine.close()


@pytest.mark.parametrize("stage", [0, 2, 3])
@ranks(4, timeout_s=90)
def test_whole_tensors_writes_and_the_model_that_is_given_back(world_size, stage):
    model = Mixed(ep_sizes=(2,), k=1)
    start = {name: param.detach().clone() for name, param in model.named_parameters()}
    engine = engine_for(model, stage)
    for source in (dict(engine.full_parameters()), dict(engine.view("param")), engine.state_dict()):
        assert set(source) == set(start)
        assert all(torch.equal(source[name], value) for name, value in start.items())
    experts = model.moes[0].experts
    assert experts.get_parameter("up.weight").shape[0] == 2
    with trilithon.zero.gathered(experts, modify=0):  # each expert is written where its first holder is
        for param in experts.parameters():
            param.data.add_(1.0 + experts.first)
    changed = dict(engine.full_parameters())
    up = changed["moes.0.experts.up.weight"] - start["moes.0.experts.up.weight"]
    assert torch.allclose(up[:2], torch.ones_like(up[:2])) and torch.allclose(up[2:], 3 * torch.ones_like(up[2:]))
    with pytest.raises(ProtocolError, match=r"spread over ranks|sharded parameter cannot be copied"):
        copy.deepcopy(model)
    engine.close()
    whole = dict(model.named_parameters())
    assert all(torch.equal(whole[name], value) for name, value in changed.items())
    assert model.moes[0](torch.randn(3, WIDTH, dtype=torch.float64))[0].shape == (3, WIDTH)


@pytest.mark.parametrize("how", ["zero.init", "meta", "rank 0 only"])
@ranks(2, timeout_s=90)
def test_however_it_was_built_the_experts_are_those_of_one_process(world_size, how):
    def build():
        torch.manual_seed(3)
        return MoE(WIDTH, Block(), EXPERTS, ep_size=2)

    expected = {name: value.detach().clone() for name, value in build().named_parameters()}
    if how == "zero.init":
        with trilithon.zero.init():
            model = build()
    elif how == "meta":
        with torch.device("meta"):
            model = MoE(WIDTH, Block(), EXPERTS, ep_size=2)
        assert all(param.is_meta for param in model.parameters())
    else:
        model = build()
        if dist.get_rank() == 1:
            with torch.no_grad():
                for param in model.parameters():
                    param.zero_()
    engine = engine_for(model, stage=3 if how == "zero.init" else 1)
    found = dict(engine.full_parameters())
    assert all(value.shape == expected[name].shape for name, value in found.items())
    if how == "meta":
        weights = found["experts.up.weight"]
        assert weights.abs().max() <= WIDTH**-0.5 and len({w.sum().item() for w in weights}) == EXPERTS
    else:
        assert all(torch.equal(value, expected[name]) for name, value in found.items())
    engine.close()


@ranks(2)
def test_an_overflow_in_one_expert_skips_the_step_everywhere_and_is_counted_once(world_size):
    for stage in (0, 2):
        model = Mixed(ep_sizes=(2,), k=1, drop_tokens=False)
        engine = engine_for(model, stage, precision={"kind": "fp32", "non_finite": "skip"})
        before = dict(engine.full_parameters())
        loss = engine(batches(1, 8)[0].chunk(2)[dist.get_rank()])
        bias = model.moes[0].experts.get_parameter("down.bias")
        extra = bias.sum() * (float("inf") if dist.get_rank() == 1 else 0.0)
        engine.backward(loss + extra)
        assert not engine.step()
        assert engine.non_finite == 2 * WIDTH  # the biases of experts 2 and 3
        assert all(torch.equal(before[name], value) for name, value in engine.full_parameters())
        engine.close()


@pytest.mark.parametrize("state", ["host", "disk"])
@ranks(4, timeout_s=90)
def test_state_off_the_device_trains_to_the_same_bits(world_size, state, tmp_path):
    rank, data, found = dist.get_rank(), batches(3, 16, torch.float32), []
    for offload in ({}, {"state": state, **({"path": str(tmp_path)} if state == "disk" else {})}):
        for stage in (1, 3):
            model = Mixed(ep_sizes=(2,), k=2, drop_tokens=False, dtype=torch.float32, **GREEDY)
            engine = engine_for(model, stage, **({"offload": offload} if offload else {}))
            for batch in data:
                engine.backward(engine(batch.chunk(world_size)[rank]))
                engine.step()
            found.append({name: value.clone() for name, value in engine.full_parameters()})
            engine.close()
    for other in found[1:]:
        assert all(torch.equal(other[name], value) for name, value in found[0].items())


@ranks(2)
def test_what_does_not_go_together_is_refused_before_anything_is_sent(world_size):
    with pytest.raises(ConfigError, match=r"moes\.0: ep_size=4 does not divide the 2 ranks that train the layer.*1, 2"):
        engine_for(Mixed(ep_sizes=(4,)))
    with pytest.raises(ConfigError, match="onebit_adam exchanges gradients over all"):
        engine_for(Mixed(ep_sizes=(2,)), stage=1, optimizer="onebit_adam")
    engine = engine_for(Mixed(ep_sizes=(2,)))
    with pytest.raises(ProtocolError, match="experts spread over ranks"), engine.uneven():
        pass
    engine.close()
    model = Mixed(ep_sizes=(2,))
    with pytest.raises(ConfigError, match=r"Adafactor.*whole experts.*ep_size=1"):
        trilithon.initialize(model, {"zero": {"stage": 0}}, torch.optim.Adafactor(model.parameters()))
    assert all(layer.experts.here == EXPERTS for layer in model.moes)


@ranks(2)
def test_global_balance_is_that_of_all_tokens(world_size):
    rank, x = dist.get_rank(), batches(1, 20)[0]
    sizes = [14, 6]
    model = Mixed(ep_sizes=(2,), k=2, aux_loss_scope="global", **GREEDY)
    layer, gate = model.moes[0], nn.Parameter(model.moes[0].gate.weight.detach().clone())
    engine = engine_for(model, stage=1)
    _, balance, _ = layer(x.split(sizes)[rank])
    probs = (x @ gate.t()).softmax(1)
    share = torch.bincount(probs.topk(2, dim=1).indices.reshape(-1), minlength=EXPERTS).double() / 20
    whole = EXPERTS / 2 * (share * probs.mean(0)).sum()
    mean = balance.detach().clone()
    dist.all_reduce(mean)
    assert float(mean / 2) == pytest.approx(whole.item(), abs=1e-12)
    whole.backward()
    engine.backward(balance)
    grads = dict(engine.view("grad"))
    assert torch.allclose(grads["moes.0.gate.weight"], gate.grad, rtol=0, atol=1e-12)
    engine.close()
