"""A GPT with experts trains on a mesh with tensor or sequence axes as it does on one process."""

import pytest
import torch

from trilithon.engine.build import initialize
from trilithon.models import GPT, preset
from trilithon.testing import run_ranks

STEPS = 3


def train(mesh, stage, ep_size):
    torch.manual_seed(0)
    config = preset(
        "nano", vocab_size=48, context=16, width=16, experts=4, top_k=2, ep_size=ep_size, capacity_factor=None,
        balance_coeff=0.0,
    )  # fmt: skip
    settings = {"mesh": mesh, "zero": {"stage": stage}, "clip_norm": 0.5, "batch": {"micro_size": 2}}
    adam = {"kind": "adam", "lr": 1e-2, "eps": 1e-6}
    with initialize(GPT(config), {**settings, "optimizer": adam}) as engine:
        generator = torch.Generator().manual_seed(1)
        losses = []
        for _ in range(STEPS):
            tokens = torch.randint(48, (2 * engine.mesh.data_size, 17), generator=generator)
            mine = tokens[engine.mesh.data_rank * 2 :][:2]
            losses.append(engine.train_step([(mine[:, :-1], mine[:, 1:])]))
        return losses, engine.grad_norm, {name: value.clone() for name, value in engine.full_parameters()}


@pytest.mark.parametrize(
    ("mesh", "ep_size", "stage"),
    [({"tensor": 2}, 2, 0), ({"tensor": 2}, 1, 2), ({"sequence": 2}, 2, 2), ({"sequence": 2}, 2, 3)],
)
def test_a_gpt_with_experts(mesh, ep_size, stage):
    alone = train({}, 0, 1)
    for losses, norm, parameters in run_ranks(train, 2, {"data": 1, **mesh}, stage, ep_size):
        assert losses == pytest.approx(alone[0], rel=1e-5) and norm == pytest.approx(alone[1], rel=1e-5)
        for name, value in alone[2].items():  # 3 steps of Adam at 1e-2 from gradients that differ in the last bits
            torch.testing.assert_close(parameters[name], value, rtol=0, atol=2e-5)


def train_with_a_lottery(recompute):
    torch.manual_seed(0)
    config = preset("nano", vocab_size=48, context=16, width=16, experts=4, ep_size=2, capacity_factor=0.5)
    settings = {"zero": {"stage": 3}, "optimizer": {"kind": "adam", "lr": 1e-2, "eps": 1e-6}, **recompute}
    with initialize(GPT(config), settings) as engine:
        torch.manual_seed(3 + engine.rank)
        losses = []
        for _ in range(STEPS):
            tokens = torch.randint(48, (2, 17))
            loss = engine(tokens[:, :-1], tokens[:, 1:])
            engine.backward(loss)
            engine.step()
            losses.append(engine.loss)
        return losses, {name: value.clone() for name, value in engine.full_parameters()}


@pytest.mark.parametrize("tier", ["device", "host"])
def test_blocks_that_are_recomputed_route_as_their_forward_did(tier):
    """Tokens are dropped by lot, travel again in backward, and arrive where they were."""
    plain = run_ranks(train_with_a_lottery, 2, {})[0]
    again = run_ranks(train_with_a_lottery, 2, {"recompute": {"tier": tier}})[0]
    assert again[0] == plain[0]
    assert all(torch.equal(again[1][name], value) for name, value in plain[1].items())
