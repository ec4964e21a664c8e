"""Recomputed blocks give the bits of ordinary ones, keep their inputs only, and say what they cannot do."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

import trilithon
from trilithon.checkpointing import DeviceRest, HostRest, Recompute, chosen_blocks, recomputed
from trilithon.config import RecomputeConfig
from trilithon.errors import ConfigError, ProtocolError
from trilithon.testing.models import MLP, TinyGPT

B, T, D, LAYERS = 2, 16, 32, 4
INPUT_BYTES = B * T * D * 4


def gpt() -> TinyGPT:
    return TinyGPT(dim=D, layers=LAYERS, context=T)


def tokens() -> Tensor:
    return torch.randint(0, 61, (B, T + 1), generator=torch.Generator().manual_seed(3))


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    return dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters())), strict=True))


@pytest.mark.parametrize("rest", [DeviceRest, HostRest])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_loss_and_gradients_are_the_same_bits(rest, every):
    model, batch = gpt(), tokens()
    expected_loss = model(batch)
    expected = gradients(model, expected_loss)
    names = chosen_blocks(model, RecomputeConfig(every=every))
    assert names == [f"blocks.{i}" for i in range(0, LAYERS, every)]
    change = Recompute(model, names, RecomputeConfig(tier="host" if rest is HostRest else "device"))
    assert isinstance(change.rest, rest)
    loss = model(batch)
    got = gradients(model, loss)
    assert torch.equal(loss, expected_loss)
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    change.remove()
    assert "forward" not in vars(model.blocks[0])


class Noisy(nn.Module):
    """Dropout, keyword arguments, nested inputs and several outputs. x [n, D], {"scale": [D]} -> ([n, D], [])"""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: Tensor, *, extra: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        y = nn.functional.dropout(torch.tanh(self.linear(x)), 0.5, training=True) * extra["scale"]
        return y, y.square().mean()


@pytest.mark.parametrize("rest", [DeviceRest, HostRest])
def test_random_numbers_are_drawn_alike_and_the_stream_goes_on_as_without(rest):
    block, results = Noisy(), []
    for again in (False, True):
        torch.manual_seed(5)
        x, scale = torch.randn(4, D).requires_grad_(), torch.randn(D).requires_grad_()
        call = (lambda *a, **k: recomputed(block, *a, rest=rest(), **k)) if again else block
        y, side = call(x, extra={"scale": scale})
        y, _ = call(y, extra={"scale": scale})
        grads = torch.autograd.grad(y.sum() + side, [x, scale, block.linear.weight])
        results.append([y.detach(), *grads, torch.rand(3)])
    assert all(torch.equal(plain, again) for plain, again in zip(*results, strict=True))


@pytest.mark.parametrize("rest", [DeviceRest, HostRest])
def test_the_graph_can_be_run_backwards_again_and_from_two_losses(rest):
    block, rest_ = Noisy(), rest()
    torch.manual_seed(5)
    x = torch.randn(4, D).requires_grad_()
    y, side = recomputed(block, x, rest=rest_, extra={"scale": torch.ones(D)})
    first = torch.autograd.grad(y.sum(), [x, block.linear.weight], retain_graph=True)
    torch.autograd.grad(side, [x], retain_graph=True)
    second = torch.autograd.grad(y.sum(), [x, block.linear.weight])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_what_is_kept_is_the_inputs_of_the_blocks_and_nothing_after_backward():
    """2 bytes x layers x batch x tokens x width in 16 bits; here in fp32."""
    model, batch = gpt(), tokens()
    for tier in ("device", "host"):
        change = Recompute(model, chosen_blocks(model, RecomputeConfig()), RecomputeConfig(tier=tier))
        loss = model(batch)
        assert change.bytes() == {tier: LAYERS * INPUT_BYTES}
        loss.backward()
        del loss
        gc.collect()
        spare = LAYERS * INPUT_BYTES if tier == "host" else 0  # buffers that the next step uses again
        assert change.bytes().get(tier, 0) == spare
        assert change.rest.peak_bytes == LAYERS * INPUT_BYTES
        if isinstance(change.rest, HostRest):
            assert change.rest.link.copied_bytes == 2 * LAYERS * INPUT_BYTES  # down once and up once
            model(batch)
            assert change.rest.bytes()["host"] == LAYERS * INPUT_BYTES
        change.remove()


def test_with_host_memory_the_device_holds_one_input_at_a_time():
    """Live tensors of the size of an input after a forward: without recompute many per block, on the host none."""
    counts = {}
    for tier in (None, "device", "host"):
        model = gpt()
        change = Recompute(model, chosen_blocks(model, RecomputeConfig()), RecomputeConfig(tier=tier)) if tier else None
        before = live(INPUT_BYTES)
        loss = model(tokens())
        counts[tier] = live(INPUT_BYTES) - before - (LAYERS if tier == "host" else 0)  # those of the host apart
        del loss
        if change is not None:
            change.remove()
    assert counts[None] > 5 * LAYERS
    assert LAYERS <= counts["device"] <= LAYERS + 4  # the inputs, and what surrounds the blocks
    assert counts["host"] <= counts["device"] - LAYERS + 1


def live(size: int) -> int:
    gc.collect()
    storages = {id_: n for t in gc.get_objects() if type(t) is Tensor for id_, n in [storage_of(t)]}
    return sum(n == size for n in storages.values())


def storage_of(tensor: Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage._cdata, storage.nbytes()


def test_backward_asks_for_the_inputs_of_the_block_before(monkeypatch):
    model, change = gpt(), None
    change = Recompute(model, chosen_blocks(model, RecomputeConfig()), RecomputeConfig(tier="host"))
    order = []
    up, fetch = change.rest.link.up, trilithon.checkpointing.offload._OnHost.fetch
    monkeypatch.setattr(change.rest.link, "up", lambda *a: order.append("up") or up(*a))
    monkeypatch.setattr(
        trilithon.checkpointing.offload._OnHost, "fetch", lambda self: order.append(f"use {self.call}") or fetch(self)
    )
    model(tokens()).backward()
    assert order == ["use 4", "up", "up", "use 3", "up", "use 2", "up", "use 1"]  # each comes before it is used


def test_an_input_that_was_written_over_is_told_and_on_the_host_it_does_no_harm():
    block = nn.Linear(D, D)
    for rest in (DeviceRest(), HostRest()):
        x = torch.randn(4, D).requires_grad_() * 1.0
        expected = torch.autograd.grad(torch.tanh(block(x)).square().sum(), block.weight, retain_graph=True)[0]
        y = recomputed(lambda t: torch.tanh(block(t)), x, rest=rest)
        with torch.no_grad():
            x.zero_()
        if isinstance(rest, DeviceRest):
            with pytest.raises(ProtocolError, match=r"input of shape \(4, 32\) of a recomputed block was modified"):
                y.square().sum().backward()
        else:
            assert torch.equal(torch.autograd.grad(y.square().sum(), block.weight)[0], expected)


def test_without_gradients_nothing_is_kept():
    rest = HostRest()
    with torch.no_grad():
        recomputed(nn.Linear(D, D), torch.ones(2, D, requires_grad=True), rest=rest)
    assert rest.bytes() == {} and rest.link.copied_bytes == 0


def test_blocks_are_chosen_by_class_name_or_repetition():
    model = gpt()
    assert chosen_blocks(model, RecomputeConfig(classes=("Embedding",))) == ["tokens", "positions"]
    assert chosen_blocks(model, RecomputeConfig(modules=("blocks.[13]",))) == ["blocks.1", "blocks.3"]
    with pytest.raises(ConfigError, match=r"nothing that is Blok.*recompute.classes \(Block, Embedding, LayerNorm"):
        chosen_blocks(model, RecomputeConfig(classes=("Blok",)))
    with pytest.raises(ConfigError, match="nothing that is a block that stands several times"):
        chosen_blocks(MLP(), RecomputeConfig())
    model.blocks[2]._compiled_call_impl = lambda x: x  # what Module.compile() sets
    with pytest.raises(ConfigError, match=r"block 'blocks.2' is compiled"):
        chosen_blocks(model, RecomputeConfig())


def test_the_engine_refuses_before_it_takes_the_parameters_and_leaves_the_model_as_it_was():
    model = MLP()
    with pytest.raises(ConfigError, match="recompute: the model has nothing"):
        trilithon.initialize(model, {"recompute": {}, "optimizer": {"kind": "sgd", "lr": 0.1}})
    model = gpt()
    with trilithon.initialize(
        model, {"recompute": {"tier": "host"}, "optimizer": {"kind": "sgd", "lr": 0.1}}
    ) as engine:
        loss = engine(tokens())
        assert engine.memory()["checkpoints"] == LAYERS * INPUT_BYTES
        engine.backward(loss)
        engine.step()
    assert all("forward" not in vars(module) for module in model.modules())
