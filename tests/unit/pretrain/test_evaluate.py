import numpy as np
import pytest
import torch

from trilithon.comm.collectives import Group
from trilithon.data import ByteTokenizer, TokenBlocks
from trilithon.models import GPT, preset
from trilithon.pretrain.agreement import Agreement
from trilithon.pretrain.evaluate import held_out_loss, sample_text

CPU = torch.device("cpu")


class OneOfMany:
    """A rank of several that run one after the other: sums are kept and added up by the test."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.sums = torch.zeros(2, dtype=torch.float64)

    def all_reduce(self, tensor, tag, op=None):
        self.sums += tensor

        class Done:
            def wait(self) -> None:
                pass

        return Done()


def token_mean(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return targets.double().mean()


def blocks(num_blocks: int, context: int = 4) -> TokenBlocks:
    return TokenBlocks(np.arange(num_blocks * context + 1) ** 2 % 251, context)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("num_blocks", [1, 5, 7, 12])
def test_the_mean_is_that_of_all_tokens_for_any_number_of_ranks(world_size, num_blocks):
    data = blocks(num_blocks)
    totals = torch.zeros(2, dtype=torch.float64)
    calls = []
    for rank in range(world_size):
        group = OneOfMany(rank, world_size)
        count = [0]

        def loss_of(inputs, targets, count=count):
            count[0] += 1
            return token_mean(inputs, targets)

        held_out_loss(loss_of, data, Agreement(group), micro_size=2, max_sequences=200, device=CPU)
        totals += group.sums
        calls.append(count[0])
    expected = sum(float(data[i][1].double().mean()) for i in range(num_blocks)) / num_blocks
    assert float(totals[0] / totals[1]) == pytest.approx(expected, rel=1e-12)
    assert int(totals[1]) == num_blocks * 4
    assert len(set(calls)) == 1, "a forward pass is collective at stage 3, so all ranks do equally many"


def test_a_limit_takes_blocks_from_all_over_the_text():
    alone = Agreement(Group(None, name="test"))
    loss = held_out_loss(token_mean, blocks(12), alone, micro_size=2, max_sequences=4, device=CPU)
    data = blocks(12)
    assert loss == pytest.approx(sum(float(data[i][1].double().mean()) for i in (0, 3, 6, 9)) / 4)


@pytest.mark.parametrize(("world_size", "micro_size"), [(1, 2), (2, 2), (3, 1), (2, 8)])
def test_a_limit_takes_the_same_blocks_for_any_number_of_ranks(world_size, micro_size):
    data, totals = blocks(23), torch.zeros(2, dtype=torch.float64)
    for rank in range(world_size):
        group = OneOfMany(rank, world_size)
        held_out_loss(token_mean, data, Agreement(group), micro_size=micro_size, max_sequences=5, device=CPU)
        totals += group.sums
    expected = sum(float(data[i * 23 // 5][1].double().sum()) for i in range(5))
    assert totals.tolist() == pytest.approx([expected, 20], rel=1e-12)


class Corpus:
    tokenizer = ByteTokenizer()


def sample(model: GPT, **changes) -> str:
    options = {"prompt": "ab", "num_tokens": 12, "temperature": 1.0, "top_k": None, "seed": 3, "device": CPU}
    return sample_text(model, Corpus(), **(options | changes))


def test_a_sample_continues_its_prompt_and_follows_from_the_seed():
    torch.manual_seed(0)
    model = GPT(preset("nano", 257, context=8)).train()
    before = torch.get_rng_state()
    text = sample(model)
    assert text.startswith("ab") and len(text) > 2
    assert sample(model) == text and sample(model, seed=4) != text
    assert model.training and torch.equal(torch.get_rng_state(), before)


def test_a_sample_ends_where_the_document_ends():
    class Ends(GPT):
        def forward(self, tokens, targets=None):
            logits = torch.zeros(*tokens.shape, 257)
            logits[:, :, 256 if tokens.shape[1] >= 6 else ord("x")] = 100.0
            return logits

    assert sample(Ends(preset("nano", 257, context=8)), temperature=0) == "abxxx"
