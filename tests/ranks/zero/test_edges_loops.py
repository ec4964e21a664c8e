"""Training loops as people write them, at every stage: each gives what plain PyTorch on one process gives."""

# ruff: noqa: PLW0108  (a lambda reads the attribute when it is called, inside pytest.raises)
from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import trilithon
from against_plain import STAGES, assert_trains_like_plain, engine_for, train_engine, train_plainly
from trilithon.errors import ProtocolError, ShardedParameterError
from trilithon.testing import ranks
from trilithon.testing.models import MLP
from trilithon.testing.parity import assert_same_training, rank_part, tolerance, vector_batches


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x))) * self.scale


class Stack(nn.Module):
    """recompute: None, "reentrant" or "plain", for every second call; shared: the same block each time."""

    def __init__(self, *, shared: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList(Block() for _ in range(1 if shared else 3))
        self.calls = [0, 0, 0, 0] if shared else [0, 1, 2]
        self.out = nn.Linear(16, 4)
        self.recompute: str | None = None
        self.every = 2

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        if self.recompute == "reentrant":
            x = x.requires_grad_()
        for position, index in enumerate(self.calls):
            block = self.blocks[index]
            if self.recompute and position % self.every == 0:
                x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
            else:
                x = block(x)
        return F.mse_loss(self.out(x), target)


def recompute(kind: str, every: int) -> Any:
    def change(model: Stack) -> None:
        model.recompute, model.every = kind, every

    return change


@ranks(2)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kind", ["reentrant", "plain"])
@pytest.mark.parametrize("every", [1, 2])
def test_recomputation_changes_nothing(kind, every, shared):
    for stage in STAGES:
        assert_trains_like_plain(lambda: Stack(shared=shared), stage, accumulation=2, change=recompute(kind, every))


def two_forwards(call: Any, x: Tensor, target: Tensor) -> Tensor:
    return call(x, target) + 0.5 * call(-x, target)


@ranks(2, 3)
def test_two_forwards_before_one_backward():
    for stage in STAGES:
        for change in (recompute("plain", 1), lambda model: None):
            assert_trains_like_plain(Stack, stage, accumulation=2, loss_of=two_forwards, change=change)


@ranks(2)
@pytest.mark.parametrize("retain_graph", [False, True])
def test_several_backwards_before_one_step_add_up(retain_graph, world_size):
    batches = vector_batches(3, 2 * world_size, width=16)

    def plainly(call: Any, x: Tensor, target: Tensor) -> Tensor:
        return call(x, target) + (2 * call(x, target) if retain_graph else call(-x, target))

    reference = train_plainly(Stack, batches, world_size, plainly)
    for stage in STAGES:
        engine = engine_for(Stack(), stage)
        norms = []
        for ((batch,),) in zip(batches, strict=True):
            x, target = rank_part(batch, engine.rank, world_size)
            if retain_graph:
                loss = engine(x, target)
                engine.backward(loss, retain_graph=True)
                engine.backward(2 * loss)
            else:
                engine.backward(engine(x, target))
                engine.backward(engine(-x, target))
            assert engine.step()
            norms.append(engine.grad_norm)
        got = dict(engine.full_parameters())
        engine.close()
        assert_same_training(reference, reference.losses, got, tolerance("fp32", 3, optimizer="sgd"), norms)


@ranks(2)
def test_evaluation_and_generation_between_forward_and_backward_change_nothing(world_size):
    batches = vector_batches(3, 2 * world_size)
    reference = train_plainly(Stack, batches, world_size)
    for stage in STAGES:
        engine = engine_for(Stack(), stage)

        def evaluate_too(call: Any, x: Tensor, target: Tensor, engine: Any = engine) -> Tensor:
            loss = call(x, target)
            before = engine.eval_step((x, target))
            with torch.no_grad():
                for _ in range(3):
                    call(x, target)
            assert torch.equal(before, loss.detach())
            engine.eval()
            with torch.inference_mode():
                call(x, target)
            engine.train()
            return loss

        losses, norms = train_engine(engine, batches, evaluate_too)
        got = dict(engine.full_parameters())
        engine.close()
        assert_same_training(reference, losses, got, tolerance("fp32", 3, optimizer="sgd"), norms)


class Failing(Stack):
    where = ""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        hidden = self.blocks[0](x)
        if self.where == "forward":
            raise KeyError("in forward")
        if self.where == "backward":
            hidden.register_hook(_fail)
        return F.mse_loss(self.out(self.blocks[2](self.blocks[1](hidden))), target)


def _fail(grad: Tensor) -> None:
    raise KeyError("in backward")


@ranks(2)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_an_exception_leaves_the_engine_usable(where, accumulation, world_size):
    batches = vector_batches(3, 2 * world_size, accumulation)
    reference = train_plainly(Failing, batches, world_size)
    for stage in STAGES:
        model = Failing()
        engine = engine_for(model, stage, accumulation=accumulation)
        part = rank_part(batches[0][0], engine.rank, world_size)

        def try_first(call: Any, *part: Tensor, engine: Any = engine, model: Any = model) -> Tensor:
            if engine._window.backwards == 0:
                model.where = where
                with pytest.raises(KeyError, match=f"in {where}"):
                    engine.backward(engine(*part))
                model.where = ""
            return call(*part)

        losses, norms = train_engine(engine, batches, try_first)
        assert engine.eval_step(part) is not None
        got = dict(engine.full_parameters())
        engine.close()
        assert_same_training(reference, losses, got, tolerance("fp32", 3, optimizer="sgd"), norms)


@ranks(2)
def test_after_an_exception_in_backward_the_accumulation_starts_again(world_size):
    batches = vector_batches(2, 2 * world_size, 2)
    reference = train_plainly(Failing, batches, world_size)
    for stage in STAGES:
        model = Failing()
        engine = engine_for(model, stage, accumulation=2)
        first, second = (rank_part(batch, engine.rank, world_size) for batch in batches[0])
        engine.backward(engine(*first))
        model.where = "backward"
        with pytest.raises(KeyError, match="in backward") as caught:
            engine.backward(engine(*second))
        assert "gradients of 1 earlier micro-batches of this step are dropped" in caught.value.__notes__[0]
        model.where = ""
        losses, norms = train_engine(engine, batches)
        got = dict(engine.full_parameters())
        engine.close()
        assert_same_training(reference, losses, got, tolerance("fp32", 2, optimizer="sgd"), norms)


@ranks(2)
def test_plain_backward_is_refused_and_the_engine_stays_usable(world_size):
    batches = vector_batches(2, 2 * world_size)
    reference = train_plainly(Stack, batches, world_size)
    for stage in STAGES:
        engine = engine_for(Stack(), stage)
        with pytest.raises(ProtocolError, match=r"outside engine\.backward\(\).*Call engine\.backward\(loss\)"):
            engine(*rank_part(batches[0][0], engine.rank, world_size)).backward()
        losses, norms = train_engine(engine, batches)
        got = dict(engine.full_parameters())
        engine.close()
        assert_same_training(reference, losses, got, tolerance("fp32", 2, optimizer="sgd"), norms)


@ranks(2)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("how", ["block", "whole", "in_place", "blocks_in_place"])
def test_compiled_modules_train_like_plain(how, backend):
    torch._dynamo.config.disable = False

    def change(model: Stack) -> nn.Module | None:
        torch._dynamo.reset()
        if how == "whole":
            return torch.compile(model, backend=backend)
        if how == "in_place":
            model.compile(backend=backend)
        for index, block in enumerate(model.blocks):
            if how == "block":
                model.blocks[index] = torch.compile(block, backend=backend)
            if how == "blocks_in_place":
                block.compile(backend=backend)
        return model

    for stage in STAGES:
        assert_trains_like_plain(Stack, stage, change=change)


@ranks(2)
def test_closing_gives_a_plain_model_back(world_size):
    batches = vector_batches(2, 2 * world_size)
    reference = train_plainly(MLP, batches, world_size)
    for stage in STAGES:
        model = MLP()
        engine = engine_for(model, stage)
        train_engine(engine, batches)
        whole = engine.state_dict()
        engine.close()
        assert all(type(p) is nn.Parameter and p.grad is None for p in model.parameters())
        assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters())
        assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())
        fresh = MLP(seed=1)
        fresh.load_state_dict(whole, strict=True)
        fresh.load_state_dict(model.state_dict(), strict=True)
        x, target = batches[0][0]
        loss = copy.deepcopy(pickle.loads(pickle.dumps(model)))(x, target)
        torch.testing.assert_close(loss, fresh(x, target), rtol=0, atol=0)
        model(x, target).backward()
        assert all(p.grad is not None for p in model.parameters())
        limits = tolerance("fp32", 2, optimizer="sgd")
        assert_same_training(reference, reference.losses, dict(fresh.named_parameters()), limits)
        with pytest.raises(ProtocolError, match="closed"):
            engine(x, target)


@ranks(2)
def test_a_sharded_parameter_is_honest():
    model = MLP()
    expected = {name: (p.shape, p.dtype, p.numel(), p.stride()) for name, p in model.named_parameters()}
    engine = engine_for(model, 3)
    identity = {id(p) for p in model.parameters()}
    train_engine(engine, vector_batches(1, 4))
    assert {id(p) for p in model.parameters()} == identity
    for name, p in model.named_parameters():
        assert isinstance(p, nn.Parameter)
        assert (p.shape, p.dtype, p.numel(), p.stride()) == expected[name]
        assert (p.size(), p.dim(), p.device.type, p.is_leaf) == (p.shape, len(p.shape), "cpu", True)
        assert p.requires_grad and p.grad is None and p.is_contiguous() and p.layout == torch.strided
        assert p.nelement() * p.element_size() == p.nbytes and len(p) == p.shape[0]
        assert "shape=" in repr(p) and hash(p) == id(p)
    weight = model.last.weight
    uses = [
        lambda: weight + 1, lambda: weight.sum().item(), lambda: weight[0], lambda: weight.tolist(),
        lambda: weight.mul_(2), lambda: torch.equal(weight, weight), lambda: weight.clone(), lambda: weight.numpy(),
        lambda: weight.to(torch.float64), lambda: F.linear(torch.ones(1, 16), weight), lambda: weight.data_ptr(),
        lambda: weight.data.sum(), lambda: weight.detach().sum(), lambda: torch.stack([weight, weight]),
        lambda: bool(weight.isfinite().all()), lambda: model.state_dict(), lambda: weight.copy_(torch.ones(4, 16)),
        lambda: weight.normal_(), lambda: nn.init.zeros_(weight), lambda: weight.view(-1), lambda: list(weight),
        lambda: weight.untyped_storage(), lambda: weight.cpu().numpy(), lambda: weight.expand(1, 4, 16),
        lambda: setattr(weight, "data", torch.ones(4, 16)),
    ]  # fmt: skip
    for index, use in enumerate(uses):
        with pytest.raises(ShardedParameterError, match=r"gathered\(params\)") as caught:
            print(index, use())
        assert "'last.weight'" in str(caught.value) or "'layers.0.weight'" in str(caught.value), index
    for use in (lambda: copy.deepcopy(model), lambda: copy.copy(weight), lambda: pickle.dumps(weight)):
        with pytest.raises(ShardedParameterError, match="cannot be"):
            use()
    engine.close()


@ranks(2)
def test_requires_grad_and_grad_of_a_sharded_parameter_can_be_set():
    model = MLP()
    engine = engine_for(model, 3)
    weight = model.last.weight
    weight.grad = None
    weight.requires_grad = False
    assert not weight.requires_grad
    weight.requires_grad_(True)
    model.zero_grad()
    assert weight.requires_grad
    train_engine(engine, vector_batches(1, 4))
    engine.close()


class Collector(nn.Module):
    """Auxiliary losses go into a list that the layer was handed: backward can enter the layer unseen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        collected: list[Tensor] = []
        for layer in self.layers:
            hook = layer.down.register_forward_hook(lambda _m, _i, output: collected.append(output.square().mean()))
            x = layer(x)
            hook.remove()
        self.out(x)
        return torch.stack(collected).sum() * 0.1


@ranks(2)
def test_an_unseen_way_into_a_module_is_right_or_refused_with_a_way_out(world_size):
    batches = vector_batches(2, 2 * world_size)
    reference = train_plainly(Collector, batches, world_size)
    for zero in ({"keep_gathered": ["layers.*"]}, {}):
        engine = engine_for(Collector(), 3, zero={"unit_classes": ["Block"], "bucket_numel": None, **zero})
        if zero:
            losses, norms = train_engine(engine, batches)
            got = dict(engine.full_parameters())
            assert_same_training(reference, losses, got, tolerance("fp32", 2, optimizer="sgd"), norms)
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
                train_engine(engine, batches)
            assert "zero.keep_gathered" in caught.value.__notes__[-1]
        engine.close()


@ranks(2)
def test_a_parameter_unfrozen_after_the_engine_was_made_is_refused():
    for stage in STAGES:
        model = MLP()
        model.last.requires_grad_(False)
        with engine_for(model, stage) as engine:
            train_engine(engine, vector_batches(1, 4))
            model.last.requires_grad_(True)
            with pytest.raises(ProtocolError, match=r"\['last\.weight', 'last\.bias'\] were frozen.*make another"):
                engine(torch.ones(2, 16))
            model.last.requires_grad_(False)
            train_engine(engine, vector_batches(1, 4))


@ranks(2)
def test_a_parameter_frozen_after_the_engine_was_made_stays_as_it_is():
    for stage in STAGES:
        model = MLP()
        with engine_for(model, stage) as engine:
            train_engine(engine, vector_batches(1, 4))
            model.last.requires_grad_(False)
            before = dict(engine.full_parameters())
            train_engine(engine, vector_batches(1, 4))
            for name, value in engine.full_parameters():
                assert torch.equal(value, before[name]) is name.startswith("last"), (stage, name)


def nested() -> nn.Module:
    """Modules that return what a module inside them returned, down to the loss outside."""
    torch.manual_seed(8)
    inner = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Sequential(nn.Linear(16, 16)))
    return nn.Sequential(
        nn.Sequential(nn.Linear(16, 16)), nn.Tanh(), nn.Sequential(inner, nn.Sequential(nn.Linear(16, 4)))
    )


def loss_outside(call: Any, x: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(call(x), target)


@ranks(2)
@pytest.mark.parametrize("zero", [{}, {"unit_classes": ["Sequential"], "bucket_numel": None}, {"bucket_numel": 300}])
def test_a_loss_outside_of_nested_modules(zero):
    for stage in STAGES:
        assert_trains_like_plain(nested, stage, loss_of=loss_outside, zero=zero)


def through_a_part(call: Any, x: Tensor, target: Tensor) -> Tensor:
    module = call.module if isinstance(call, trilithon.Engine) else call
    hidden = module[0](x)
    return F.mse_loss(module[2](torch.tanh(hidden)), target) + hidden.square().mean()


@ranks(2)
def test_forwards_of_parts_of_the_model():
    """Calling submodules instead of the engine: each gathers what it needs."""
    for stage in STAGES:
        assert_trains_like_plain(nested, stage, loss_of=through_a_part)
