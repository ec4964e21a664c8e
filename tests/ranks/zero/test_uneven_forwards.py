"""`engine.uneven()`: ranks call forward a different number of times, and training afterwards is what it would be."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from against_plain import STAGES, engine_for, train_engine, train_plainly
from trilithon.errors import CollectiveError, ProtocolError
from trilithon.testing import ranks
from trilithon.testing.models import TinyGPT
from trilithon.testing.parity import assert_same_training, token_batches, tolerance


def generate(call: object, tokens: torch.Tensor, count: int) -> torch.Tensor:
    for _ in range(count):
        logits = call.module.logits(tokens) if hasattr(call, "module") else call.logits(tokens)
        tokens = torch.cat([tokens, logits[:, -1].argmax(-1, keepdim=True)], 1)
    return tokens


class Generator(TinyGPT):
    """forward(tokens) is the loss while training and the next token's logits in evaluation."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) if self.training else self.logits(tokens)[:, -1]


@ranks(2, 3)
@pytest.mark.parametrize("counts", [(3, 7, 0), (7, 3, 1), (0, 4, 4), (0, 0, 0)])
def test_ranks_may_generate_different_lengths(counts, world_size):
    batches = token_batches(3, 2 * world_size)
    reference = train_plainly(Generator, batches, world_size)
    count = counts[dist.get_rank()]
    for stage in STAGES:
        plain, engine = Generator().eval(), engine_for(Generator(), stage)
        start = torch.tensor([[1, 2, 3]])
        for _ in range(2):
            engine.eval()
            tokens, expected = start, start
            with engine.uneven(), torch.no_grad():
                for _ in range(count):
                    tokens = torch.cat([tokens, engine(tokens).argmax(-1, keepdim=True)], 1)
                    expected = torch.cat([expected, plain(expected).argmax(-1, keepdim=True)], 1)
            assert torch.equal(tokens, expected)
            engine.train()
        losses, norms = train_engine(engine, batches)
        got = dict(engine.full_parameters())
        engine.close()
        assert_same_training(reference, losses, got, tolerance("fp32", 3, optimizer="sgd"), norms)


@ranks(2)
def test_backward_inside_is_refused():
    for stage in STAGES:
        with engine_for(Generator(), stage) as engine:
            tokens = token_batches(1, 2)[0][0][0]
            with pytest.raises(ProtocolError, match=r"inside uneven\(\)"):
                with engine.uneven():
                    engine.backward(engine(tokens))
            with engine.uneven():
                pass
            train_engine(engine, token_batches(1, 4))


@ranks(2)
def test_an_exception_on_every_rank_leaves_the_engine_usable():
    for stage in STAGES:
        with engine_for(Generator(), stage) as engine:
            with pytest.raises(KeyError):
                with engine.uneven():
                    raise KeyError
            train_engine(engine, token_batches(1, 4))


@ranks(2)
def test_different_modules_are_named():
    """At stage 3 the ranks run different parts: both are told which."""
    model = Generator()
    engine = engine_for(model, 3)
    with pytest.raises(CollectiveError, match=r"different modules: .*0: .*1: "):
        with engine.uneven(), torch.no_grad():
            hidden = torch.ones(1, 2, 32)
            if engine.rank == 0:
                model.blocks[0](hidden)
            else:
                model.blocks[1](hidden)


@ranks(2)
def test_gathered_inside_serves_nobody_and_is_refused():
    model = Generator()
    engine = engine_for(model, 3)
    import trilithon

    with pytest.raises(ProtocolError, match="uneven"):
        with engine.uneven():
            with trilithon.zero.gathered(model.norm):
                pass
    train_engine(engine, token_batches(1, 4))
    engine.close()
