"""LAMB against its definition in fp64, one parameter at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from trilithon.contracts import ReduceOp, Shard, Slice
from trilithon.optim.lamb import Lamb
from trilithon.optim.tensors import NormTable, Stack

SIZES = {"a": 50, "zero": 20, "b": 70_000}  # "b" is longer than one chunk


def alone(local: Tensor, op: ReduceOp) -> Tensor:
    return local


def flat_slice(values: dict[str, Tensor]) -> Slice:
    shards, place = [], 0
    for name, value in values.items():
        shards.append(Shard(name, 0, value.numel(), place, value.shape))
        place += value.numel()
    master = torch.cat(list(values.values()))
    return Slice("unit", 0, master, torch.empty(place), None, shards)


def test_ten_steps_equal_the_definition() -> None:
    lr, betas, eps, decay, bounds = 0.05, (0.9, 0.99), 1e-6, 0.1, (0.05, 2.0)
    values = {name: torch.randn(size) if name != "zero" else torch.zeros(size) for name, size in SIZES.items()}
    group = {
        "lr": lr,
        "betas": betas,
        "eps": eps,
        "weight_decay": decay,
        "min_ratio": bounds[0],
        "max_ratio": bounds[1],
    }
    rule, slice_ = Lamb([group], list(SIZES)), flat_slice(values)
    expected = {name: value.double() for name, value in values.items()}
    m = {name: torch.zeros(size, dtype=torch.float64) for name, size in SIZES.items()}
    v = {name: torch.zeros(size, dtype=torch.float64) for name, size in SIZES.items()}
    ratios = set()
    for step in range(1, 11):
        gradient = {name: torch.randn(size) for name, size in SIZES.items()}
        for name, g in gradient.items():
            m[name] = betas[0] * m[name] + (1 - betas[0]) * g.double()
            v[name] = betas[1] * v[name] + (1 - betas[1]) * g.double() ** 2
            u = (m[name] / (1 - betas[0] ** step)) / ((v[name] / (1 - betas[1] ** step)).sqrt() + eps)
            u = u + decay * expected[name]
            norms = float(expected[name].norm()), float(u.norm())
            ratio = min(max(norms[0] / norms[1], bounds[0]), bounds[1]) if all(norms) else 1.0
            ratios.add(round(ratio, 3))
            expected[name] = expected[name] - lr * ratio * u
        slice_.grad = torch.cat(list(gradient.values()))
        rule.apply(step, [slice_], 1.0, lambda _: None, alone)
    assert len(ratios) > 10  # ratios vary, so the comparison means something
    # Ten steps, each below 0.05 * 2 * 10 per element with a few dozen roundings of 2^-24.
    torch.testing.assert_close(
        slice_.master.double(), torch.cat(list(expected.values())), rtol=0, atol=10 * 30 * 2.0**-24
    )


def test_the_vector_that_ranks_add_has_two_numbers_per_parameter_in_the_agreed_order() -> None:
    seen: list[Tensor] = []

    def record(local: Tensor, op: ReduceOp) -> Tensor:
        seen.append(local.clone())
        return local

    group = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-6}
    values = {"b": torch.full((3,), 2.0)}
    slice_ = flat_slice(values)
    slice_.grad = torch.ones(3)
    Lamb([group], ["a", "b", "c"]).apply(1, [slice_], 1.0, lambda _: None, record)
    Lamb([group], ["a", "b", "c"]).apply(1, [], 1.0, lambda _: None, record)
    assert seen[0].dtype == torch.float64 and seen[0].shape == (6,)
    torch.testing.assert_close(seen[0][:4], torch.tensor([0.0, 0.0, 12.0, 3.0], dtype=torch.float64), rtol=1e-5, atol=0)
    assert torch.equal(seen[1], torch.zeros(6, dtype=torch.float64))


def test_a_stack_has_a_row_for_each_member_and_a_shard_is_cut_where_one_ends() -> None:
    """Four members of ten elements each; this rank's shard begins in the middle of the third of them."""
    table = NormTable(["a", "s", "z"], {"s": Stack(4, 10)})
    assert table.labels == ["a", "s[0]", "s[1]", "s[2]", "s[3]", "z"] and len(table) == 6
    assert table.parameters == ["a", "s", "s", "s", "s", "z"]
    assert list(table.rows("s")) == [1, 2, 3, 4] and list(table.rows("z")) == [5]
    shape = torch.Size((4, 10))
    assert list(table.parts(Shard("s", 24, 13, 100, shape))) == [(3, 100, 106), (4, 106, 113)]
    assert list(table.parts(Shard("s", 10, 10, 0, shape))) == [(2, 0, 10)]
    assert list(table.parts(Shard("z", 3, 5, 7, torch.Size((9,))))) == [(5, 7, 12)]


def test_a_stack_moves_as_its_members_by_themselves_would() -> None:
    torch.manual_seed(0)
    group = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}
    members = [torch.randn(40) * scale for scale in (0.1, 1.0, 10.0)]
    single = flat_slice({f"m{i}": value.clone() for i, value in enumerate(members)})
    stacked = flat_slice({"s": torch.cat(members)})
    rules = Lamb([group], ["m0", "m1", "m2"]), Lamb([group], ["s"], stacks={"s": Stack(3, 40)})
    whole = Lamb([group], ["s"]), flat_slice({"s": torch.cat(members)})
    for step in (1, 2):
        grad = torch.randn(120)
        for rule, slice_ in ((rules[0], single), (rules[1], stacked), whole):
            slice_.grad = grad.clone()
            rule.apply(step, [slice_], 1.0, lambda _: None, alone)
    assert torch.equal(single.master, stacked.master)
    assert not torch.allclose(whole[1].master, stacked.master, rtol=1e-3)
