"""Single cut layers against the whole ones: losses, random streams, recomputation, and a model's way back."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from mesh_runs import BERT_SHAPE, GPT_SHAPE, make
from torch import nn
from torch.utils.checkpoint import checkpoint

from trilithon import zero
from trilithon.comm.collectives import Group
from trilithon.contracts import Tag
from trilithon.engine.build import initialize
from trilithon.models import GPT
from trilithon.parallel import ParameterSlice
from trilithon.parallel.cross_entropy import vocabulary_cross_entropy
from trilithon.parallel.sequence import heads_for_tokens, tokens_for_heads
from trilithon.parallel.tensor import cut_model
from trilithon.testing import ranks

TAG = Tag("test")


def world() -> Group:
    return Group(dist.group.WORLD, name="tensor")


def everywhere(group: Group, tensor: torch.Tensor) -> list[torch.Tensor]:
    full = tensor.new_empty(group.world_size, *tensor.shape)
    group.all_gather(full.view(-1), tensor.contiguous().view(-1), TAG).wait()
    return list(full)


@ranks(2, 4)
@pytest.mark.parametrize("vocabulary", [5, 64])  # of 5, four ranks hold 2, 2, 1 and none
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_of_a_cut_vocabulary_is_torchs(world_size, vocabulary, smoothing):
    group = world()
    logits = (10 * torch.randn(12, vocabulary)).requires_grad_()
    targets = torch.randint(0, vocabulary, (12,))
    targets[3] = targets[7] = -100
    expected = F.cross_entropy(logits.double(), targets, label_smoothing=smoothing, reduction="none")
    weights = torch.randn(12)
    (expected * weights).sum().backward()
    cut = ParameterSlice.of("v", (vocabulary,), dim=0, degree=world_size, index=group.rank, pad=True)
    start, stop = cut.ranges()[0]
    here = logits.detach()[:, start:stop].clone().requires_grad_()
    losses = vocabulary_cross_entropy(here, targets, group, start=start, total=vocabulary, label_smoothing=smoothing)
    (losses * weights).sum().backward()
    torch.testing.assert_close(losses.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(here.grad, logits.grad[:, start:stop], rtol=1e-5, atol=1e-6)


@ranks(2)
def test_exchanging_heads_for_tokens_and_back_changes_nothing_and_moves_the_right_ones(world_size):
    group = world()
    query = torch.randn(2, 4, 6, 3)
    key = torch.randn(2, 2, 6, 3)
    here = slice(group.rank * 3, group.rank * 3 + 3)
    parts = [x[:, :, here].clone().requires_grad_() for x in (query, key)]
    scattered = heads_for_tokens(parts, group, TAG)
    for whole, part in zip((query, key), scattered):
        heads = whole.shape[1] // world_size
        assert torch.equal(part, whole[:, group.rank * heads : (group.rank + 1) * heads])
    back = tokens_for_heads(scattered, group, TAG)
    assert all(torch.equal(a, b) for a, b in zip(back, parts))
    weights = [torch.randn_like(part) for part in parts]
    sum((x * w).sum() for x, w in zip(back, weights)).backward()
    assert all(torch.equal(part.grad, w) for part, w in zip(parts, weights))


class Noisy(nn.Module):
    """Dropout of torch inside the cut region and after it."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)
        self.inner, self.outer = nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, x):
        self.hidden = self.inner(torch.ones_like(self.up(x)))
        return self.outer(torch.ones_like(self.down(self.hidden)))


@ranks(2)
def test_torchs_dropout_differs_between_slices_and_agrees_where_tensors_are_whole(world_size):
    group = world()
    model = Noisy()
    cut_model(model, group)
    state = torch.get_rng_state()
    out = model(torch.ones(16, 8))
    inner, outer = everywhere(group, model.hidden), everywhere(group, out)
    assert not torch.equal(*inner) and torch.equal(*outer)
    assert torch.equal(*everywhere(group, torch.get_rng_state()))
    torch.set_rng_state(state)  # the common state says everything
    assert torch.equal(model(torch.ones(16, 8)), out) and torch.equal(model.hidden, inner[group.rank])


@ranks(2)
@pytest.mark.parametrize("cut_norms", [False, True])
def test_recomputed_blocks_give_the_same_bits_with_dropout_on(world_size, cut_norms):
    tokens = torch.randint(0, 61, (2, 8))
    gradients = []
    for recompute in (False, True):
        model = make("gpt")
        cut_model(model, world(), cut_norms=cut_norms)
        if recompute:
            for block in model.blocks:
                forward = block.forward
                block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)
        torch.manual_seed(4)
        model(tokens, tokens).backward()
        gradients.append([param.grad for param in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients))


@ranks(2)
def test_an_engine_gives_the_model_back_as_it_was(world_size):
    model = make("bert")
    modules = {name: type(module) for name, module in model.named_modules()}
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    config = {"mesh": {"tensor": 2}, "tensor": {"cut_norms": True}, "optimizer": {"kind": "sgd", "lr": 0.0}}
    for stage in (0, 3):  # the second engine finds an ordinary model
        with initialize(model, {**config, "zero": {"stage": stage}}) as engine:
            assert model.blocks[0].attention.query.weight.numel() == BERT_SHAPE.width**2 // 2 or stage == 3
            assert engine.slices["embedding.weight"].shape == (61, BERT_SHAPE.width)
            tokens = torch.randint(0, 61, (1, 8))
            engine.train_step([(tokens, tokens)])
            whole = engine.state_dict()
        assert {name: type(module) for name, module in model.named_modules()} == modules
        for name, param in model.named_parameters():
            assert torch.equal(param, before[name]) and torch.equal(whole[name], before[name])
    assert model.blocks[0].attention.num_heads == BERT_SHAPE.num_heads
    model.eval()(tokens, tokens).backward()


@ranks(2)
def test_logits_and_generated_text_are_those_of_the_whole_model(world_size):
    alone = make("gpt").eval()
    tokens = torch.randint(0, 61, (1, 3))
    expected, text = alone(tokens), alone.generate(tokens, 4, temperature=0.0)
    for axes, cut_norms in (({"tensor": 2}, False), ({"sequence": 2}, False), ({"tensor": 2}, True)):
        tensor = {"tensor": {"cut_norms": True}} if cut_norms else {}
        with initialize(make("gpt"), {"mesh": axes, **tensor}) as engine:
            engine.eval()
            if not cut_norms and "tensor" in axes:  # otherwise 3 tokens do not divide; generate() pads
                torch.testing.assert_close(engine(tokens), expected, rtol=1e-5, atol=1e-6)
            assert torch.equal(engine.module.generate(tokens, 4, temperature=0.0), text)


@ranks(2)
def test_a_model_built_in_slices_is_cut_like_any_other(world_size):
    losses = []
    tokens = torch.randint(0, 61, (1, 8))
    for sliced in (False, True):
        torch.manual_seed(3)
        with zero.init(enabled=sliced):
            model = GPT(GPT_SHAPE)
        torch.manual_seed(11)
        with initialize(model, {"mesh": {"tensor": 2}, "optimizer": "sgd", "zero": {"stage": 3}}) as engine:
            losses.append([engine.train_step([(tokens, tokens)]) for _ in range(2)])
    assert losses[0] == losses[1]
