import pytest
import torch

from trilithon.comm.ordered import ordered_reduce, refuse_unsupported
from trilithon.contracts import ReduceOp
from trilithon.errors import CollectiveError

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sum_is_taken_in_order_in_the_wider_dtype_and_rounded_once(dtype):
    generator = torch.Generator().manual_seed(5)
    pieces = torch.randn(3, 1000, generator=generator, dtype=torch.float64).to(dtype)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    expected = (pieces[0].to(wide) + pieces[1].to(wide) + pieces[2].to(wide)).to(dtype)
    ordered_reduce(pieces, pieces[1], ReduceOp.SUM)
    assert torch.equal(pieces[1], expected)


def test_order_matters_so_these_tests_can_tell():
    big, small = 2.0**24, 1.0
    forward, backward = torch.empty(1), torch.empty(1)
    ordered_reduce(torch.tensor([[small], [small], [big]]), forward, ReduceOp.SUM)
    ordered_reduce(torch.tensor([[big], [small], [small]]), backward, ReduceOp.SUM)
    assert forward.item() - backward.item() == 2.0


@pytest.mark.parametrize("op", [ReduceOp.MAX, ReduceOp.MIN])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64, torch.uint8, torch.bool])
def test_maximum_and_minimum(op, dtype):
    pieces = torch.tensor([[1, 0, 3], [0, 0, 7], [2, 1, 5]]).to(dtype)
    out = pieces[1]
    expected = max if op is ReduceOp.MAX else min
    values = [expected(column) for column in zip(*pieces.tolist())]
    ordered_reduce(pieces, out, op)
    assert out.tolist() == values


def test_nan_on_one_rank_is_never_lost():
    for op in ReduceOp:
        out = torch.empty(1)
        ordered_reduce(torch.tensor([[1.0], [torch.nan], [2.0]]), out, op)
        assert out.isnan().all()


def test_integers_are_summed_exactly():
    out = torch.zeros(1, dtype=torch.int64)
    ordered_reduce(torch.tensor([[2**60], [1], [-(2**60)]]), out, ReduceOp.SUM)
    assert out.item() == 1


@pytest.mark.parametrize(
    ("kind", "dtype", "op", "words"),
    [
        ("all_gather", torch.complex64, None, r"all_gather does not support torch.complex64.*view\(torch.uint8\)"),
        ("all_reduce", torch.bool, ReduceOp.SUM, "all_reduce with SUM does not support torch.bool.*Use MAX"),
        ("all_reduce", torch.uint8, ReduceOp.SUM, "torch.uint8, which would overflow"),
        ("reduce_scatter", torch.int64, None, "reduce_scatter does not support torch.int64.*Use all_reduce"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(kind, dtype, op, words):
    with pytest.raises(CollectiveError, match=words):
        refuse_unsupported(kind, dtype, op)
