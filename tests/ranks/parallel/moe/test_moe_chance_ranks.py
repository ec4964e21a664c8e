"""What is drawn, and what is padding, does not depend on how many ranks share out the experts."""

import pytest
import torch
import torch.distributed as dist
from moe_models import COEFFICIENT, EPS, EXPERTS, WIDTH, Mixed, PlainMixed, batches

import trilithon
from trilithon.testing.ranks import ranks

ADAM = {"kind": "adam", "lr": 1e-2, "eps": EPS}
CHANCE = {
    "lottery": {"k": 1, "capacity_factor": 0.5, "min_capacity": 1},
    "jitter": {"k": 1, "capacity_factor": 0.5, "min_capacity": 1, "noisy_gate_policy": "Jitter", "use_rts": False},
    "sampled scores": {"k": 2, "drop_tokens": False, "noisy_gate_policy": "RSample", "top2_2nd_expert_sampling": False},
    "sampled second expert": {"k": 2, "capacity_factor": 0.5, "min_capacity": 1},
}


@pytest.mark.parametrize("chance", CHANCE)
@ranks(4)
def test_the_draws_of_a_rank_are_the_same_at_every_degree(world_size, chance):
    rank, data, found = dist.get_rank(), batches(3, 32), []
    for ep in (1, 2, 4):
        model = Mixed(ep_sizes=(ep,), **CHANCE[chance])
        with trilithon.initialize(model, {"zero": {"stage": 1}, "optimizer": ADAM}) as engine:
            torch.manual_seed(5)
            losses, kept = [], []
            for batch in data:
                engine.backward(engine(batch.chunk(world_size)[rank]))
                kept.append(model.moes[0].last.kept.tolist())
                engine.step()
                losses.append(engine.loss)
            found.append((losses, kept))
    for losses, kept in found[1:]:
        assert kept == found[0][1]
        assert losses == pytest.approx(found[0][0], abs=1e-12)


class Padded(Mixed):
    """Only tokens that are used count in the loss."""

    def forward(self, x, used):
        x = torch.tanh(self.first(x))
        change, balance, counts = self.moes[0](x, used)
        assert not change[~used].any()
        assert int(counts.sum()) == self.moes[0].k * int(used.sum())
        return self.last(x + change)[used].square().sum() / 64 + COEFFICIENT * balance


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("ep", [1, 2])
@ranks(2)
def test_padding_is_as_if_it_were_not_there(world_size, ep, drop):
    """On rank 1 everything is padding in the second step. With room for all, capacity drops nothing here either."""
    moe = {"k": 2, "top2_2nd_expert_sampling": False, "drop_tokens": drop, "capacity_factor": float(EXPERTS)}
    rank, data = dist.get_rank(), batches(2, 20)
    generator = torch.Generator().manual_seed(2)
    masks = [torch.rand(20, generator=generator) < 0.6 for _ in data]
    masks[1][10:] = False
    plain = PlainMixed(Mixed(**moe), capacity_factor=None, min_capacity=0)

    def plain_loss(x, used):
        x = torch.tanh(plain.first(x[used]))
        change, balance, *_ = plain.moes[0](x)
        return plain.last(x + change).square().sum() / 64 + COEFFICIENT * balance

    engine = trilithon.initialize(Padded(ep_sizes=(ep,), **moe), {"zero": {"stage": 2}, "optimizer": ADAM})
    for batch, used in zip(data, masks, strict=True):
        with torch.no_grad():
            _copy_into(plain, dict(engine.view("master")))
        plain.zero_grad()
        parts = list(zip(batch.chunk(2), used.chunk(2), strict=True))
        sum(plain_loss(*part) for part in parts if part[1].any()).div(2).backward()
        engine.backward(engine(*parts[rank]))
        gradients = dict(engine.view("grad"))
        for name, expected in plain.stacked(lambda p: p.grad).items():
            assert torch.allclose(gradients[name], expected, rtol=0, atol=1e-12), name
        engine.step()
    engine.close()


def _copy_into(plain, values):
    """Parameters of the engine into the plain model."""
    for name, param in plain.named_parameters():
        if ".experts." in name:
            layer, _, rest = name.partition(".experts.")
            index, _, own = rest.partition(".")
            param.copy_(values[f"{layer}.experts.{own}"][int(index)])
        else:
            param.copy_(values[name.replace(".gate", ".gate.weight") if name.endswith(".gate") else name])


@pytest.mark.parametrize("tier", ["host", "disk"])
@ranks(2, timeout_s=90)
def test_parameters_off_the_device_train_to_the_same_bits(world_size, tier, tmp_path):
    rank, data, found = dist.get_rank(), batches(3, 16, torch.float32), []
    place = {"path": str(tmp_path)} if tier == "disk" else {}
    for offload in ({}, {"parameters": tier, "state": tier, **place}):
        model = Mixed(ep_sizes=(2,), k=2, drop_tokens=False, top2_2nd_expert_sampling=False, dtype=torch.float32)
        config = {"zero": {"stage": 3}, "optimizer": ADAM, **({"offload": offload} if offload else {})}
        with trilithon.initialize(model, config) as engine:
            for batch in data:
                engine.backward(engine(batch.chunk(world_size)[rank]))
                engine.step()
            found.append({name: value.clone() for name, value in engine.full_parameters()})
    assert all(torch.equal(found[1][name], value) for name, value in found[0].items())
    assert found[0]["moes.0.experts.up.weight"].shape[::2] == (EXPERTS, WIDTH)


@pytest.mark.parametrize(
    ("config", "tolerance"),
    [
        ({"zero": {"stage": 2}, "offload": {"state": "host", "delayed_update": True}}, 1e-5),
        ({"zero": {"stage": 1}, "precision": {"kind": "fp16", "loss_scale": 128.0, "cast_inputs": True}}, 1e-2),
    ],
    ids=["delayed update", "fp16"],
)
@ranks(2, timeout_s=90)
def test_experts_over_ranks_train_as_whole_ones_do(world_size, config, tolerance):
    rank, data, found = dist.get_rank(), batches(3, 16, torch.float32), []
    for ep in (1, 2):
        model = Mixed(ep_sizes=(ep,), k=2, drop_tokens=False, top2_2nd_expert_sampling=False, dtype=torch.float32)
        with trilithon.initialize(model, {"optimizer": ADAM, **config}) as engine:
            losses = []
            for batch in data:
                engine.backward(engine(batch.chunk(world_size)[rank]))
                engine.step()
                losses.append(engine.loss)
            found.append(losses)
    assert found[1] == pytest.approx(found[0], rel=tolerance)
    assert found[0][0] > found[0][-1]
