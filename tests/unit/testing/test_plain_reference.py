"""The one-process reference, held against arithmetic that is written out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from trilithon.testing.models import MLP, SharedLayerNet, TinyGPT
from trilithon.testing.parity import rank_part, token_batches, train_plain, vector_batches


def test_the_mean_over_parts_is_one_step_on_the_whole_batch():
    batches = vector_batches(3, rows=8, accumulation=2)
    whole = [[tuple(torch.cat(column) for column in zip(*step, strict=True))] for step in batches]
    parts = train_plain(MLP, batches, optimizer="sgd", lr=0.1, world_size=4)
    once = train_plain(MLP, whole, optimizer="sgd", lr=0.1)
    for name, value in once.parameters.items():
        # a mean of 8 parts against one mean: a few roundings of weights below 1 in each of 3 steps
        assert torch.allclose(parts.parameters[name], value, rtol=0, atol=3 * 4 * 2.0**-24)
    assert parts.losses == pytest.approx(once.losses, rel=1e-6)


def test_parts_are_the_rows_of_a_rank_and_have_to_come_out_even():
    batch = vector_batches(1, rows=6)[0][0]
    assert torch.equal(torch.cat([rank_part(batch, rank, 3)[1] for rank in range(3)]), batch[1])
    with pytest.raises(ValueError, match="6 rows do not split over 4 ranks"):
        rank_part(batch, 0, 4)


def test_fp32_is_torch_itself():
    batches = token_batches(3, rows=4)
    run = train_plain(TinyGPT, batches, optimizer="adamw", lr=1e-2, weight_decay=0.1)
    model = TinyGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for ((tokens,),) in batches:
        optimizer.zero_grad()
        model(tokens).backward()
        optimizer.step()
    assert all(torch.equal(run.parameters[name], p) for name, p in model.named_parameters())


def test_the_norm_is_before_clipping_and_one_sgd_step_moves_by_the_clipped_gradient():
    run = train_plain(MLP, vector_batches(1, rows=4), optimizer="sgd", lr=1.0, clip_norm=0.1)
    moved = math.sqrt(sum((run.parameters[n] - run.start[n]).double().square().sum().item() for n in run.start))
    assert run.grad_norms[0] > 0.2
    assert moved == pytest.approx(0.1, rel=1e-4)  # 1e-6 / norm from the rule, the rest from fp32 weights


class OneWeight(nn.Module):
    """loss = weight * x, so the gradient is x, in the type of the model."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([value]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum().float()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_keeps_fp32_masters_and_rounds_once_for_forward(precision):
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    small = 2.0**-14  # lost when added to 1 in either type, kept by the master
    batches = [[(torch.tensor([-small]),)] for _ in range(8)]
    run = train_plain(lambda: OneWeight(1.0), batches, optimizer="sgd", lr=1.0, precision=precision)
    assert run.parameters["weight"].item() == 1.0 + 8 * small
    assert run.losses[0] == -small
    assert (torch.ones((), dtype=dtype) + small).item() == 1.0


def test_gradients_of_parts_are_averaged_in_fp32():
    # 1 and 2^-10 add up to 1 in bf16; their mean in fp32 keeps both
    batches = [[(torch.tensor([1.0, 2.0**-10]),)]]
    run = train_plain(lambda: OneWeight(0.0), batches, optimizer="sgd", lr=1.0, precision="bf16", world_size=2)
    assert run.parameters["weight"].item() == -(1.0 + 2.0**-10) / 2


def test_a_loss_scale_saves_gradients_that_fp16_would_lose():
    tiny = [[(torch.tensor([2.0**-20]),)]]
    half = 2.0**-10  # gradient of the square below: 2 * weight * x = 2^-29, below what fp16 holds
    build = lambda: SquaredWeight(half)  # noqa: E731
    lost = train_plain(build, tiny, optimizer="sgd", lr=1.0, precision="fp16")
    kept = train_plain(build, tiny, optimizer="sgd", lr=1.0, precision="fp16", loss_scale=2.0**14)
    assert lost.grad_norms == [0.0]
    assert kept.grad_norms == [2.0**-29]


class SquaredWeight(OneWeight):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight.square().float() * x.float()).sum()


def test_a_parameter_without_gradient_counts_as_zero_or_is_left_out():
    batches = vector_batches(2, rows=4)
    options = {"optimizer": "adamw", "lr": 0.1, "weight_decay": 0.5}
    zero = train_plain(SharedLayerNet, batches, **options)
    skip = train_plain(SharedLayerNet, batches, missing="skip", **options)
    assert torch.equal(skip.parameters["never.weight"], skip.start["never.weight"])
    assert torch.allclose(zero.parameters["never.weight"], zero.start["never.weight"] * 0.95**2)
    assert torch.equal(zero.parameters["first.weight"], skip.parameters["first.weight"])


def test_the_learning_rate_may_follow_the_step_counted_from_one():
    steps = []
    train_plain(MLP, vector_batches(3, rows=4), optimizer="sgd", lr=lambda step: steps.append(step) or 0.0)
    assert steps == [1, 2, 3]


def test_an_optimizer_of_ones_own_gets_the_named_masters_and_keeps_its_rates():
    def two_groups(named):
        head = [p for name, p in named if name.startswith("last")]
        rest = [p for name, p in named if not name.startswith("last")]
        return torch.optim.SGD([{"params": rest, "lr": 0.0}, {"params": head, "lr": 0.5}])

    run = train_plain(MLP, vector_batches(1, rows=4), optimizer=two_groups, lr=None)
    moved = {name for name in run.start if not torch.equal(run.start[name], run.parameters[name])}
    assert moved == {"last.weight", "last.bias"}


def test_lion_by_hand():
    run = train_plain(lambda: OneWeight(1.0), [[(torch.tensor([g]),)] for g in (2.0, -0.1)], optimizer="lion", lr=0.1)
    # step 1: momentum 0, direction sign(0.1 * 2) = 1; momentum 0.01 * 2 = 0.02
    # step 2: direction sign(0.9 * 0.02 - 0.1 * 0.1) = sign(0.008) = 1, although the gradient is negative
    assert run.parameters["weight"].item() == pytest.approx(0.8, abs=1e-6)


@pytest.mark.parametrize(
    ("weight", "limits", "ratio"),
    [(3.0, (0.01, 10.0), 3.0), (3.0, (0.01, 2.0), 2.0), (0.001, (0.01, 10.0), 0.01), (0.0, (0.5, 10.0), 1.0)],
)
def test_lamb_by_hand(weight, limits, ratio):
    # first step: the corrected moments are g and g^2, so u = 1 and the ratio is |w| / 1 within the limits
    run = train_plain(
        lambda: OneWeight(weight),
        [[(torch.tensor([0.5]),)]],
        optimizer="lamb",
        lr=0.1,
        min_ratio=limits[0],
        max_ratio=limits[1],
    )
    assert run.parameters["weight"].item() == pytest.approx(weight - 0.1 * ratio, abs=1e-6)
