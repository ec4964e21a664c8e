import pytest
import torch

from trilithon.comm.ordered import ordered_reduce, ordered_sum, refuse_unsupported
from trilithon.contracts import ReduceOp
from trilithon.errors import CollectiveError

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
NUMELS = [0, 1, 1000, (1 << 16) + 7]  # the last one is cut into two chunks


def pieces_of(numel, dtype, count=3):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype) for _ in range(count)]


def plain_sum(pieces, scale=1.0):
    """Left to right in fp32 or fp64, then the scale."""
    wide = torch.float64 if pieces[0].dtype is torch.float64 else torch.float32
    total = pieces[0].to(wide)
    for piece in pieces[1:]:
        total = total + piece.to(wide)
    return total * scale


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", NUMELS)
def test_the_sum_is_taken_in_order_and_rounded_once(numel, dtype):
    pieces = pieces_of(numel, dtype)
    for out_dtype in DTYPES:
        out = torch.full((numel,), torch.nan, dtype=out_dtype)
        ordered_sum(pieces, out, 1 / 3)
        assert torch.equal(out, plain_sum(pieces, 1 / 3).to(out_dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_accumulate_adds_the_scaled_sum_in_the_wider_dtype(dtype):
    pieces = pieces_of(100, dtype)
    for out_dtype in DTYPES:
        start = pieces_of(100, out_dtype, 4)[3]
        out = start.clone()
        ordered_sum(pieces, out, 0.5, True)
        assert torch.equal(out, (start + plain_sum(pieces, 0.5)).to(out_dtype))


@pytest.mark.parametrize("mine", [0, 1, 2])
def test_out_may_be_any_one_of_the_pieces(mine):
    pieces = pieces_of(NUMELS[-1], torch.float32)
    expected = plain_sum(pieces)
    ordered_sum(pieces, pieces[mine])
    assert torch.equal(pieces[mine], expected)


def test_order_matters_so_these_tests_can_tell():
    big, small = torch.tensor([2.0**24]), torch.tensor([1.0])
    forward, backward = torch.empty(1), torch.empty(1)
    ordered_sum([small, small, big], forward)
    ordered_sum([big, small, small], backward)
    assert forward.item() - backward.item() == 2.0


@pytest.mark.parametrize("op", [ReduceOp.MAX, ReduceOp.MIN])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64, torch.uint8, torch.bool])
def test_maximum_and_minimum(op, dtype):
    pieces = [piece.to(dtype) for piece in (torch.tensor([1, 0, 3]), torch.tensor([0, 0, 7]), torch.tensor([2, 1, 5]))]
    out = pieces[1]
    expected = [max, min][op is ReduceOp.MIN]
    values = [expected(column) for column in zip(*(piece.tolist() for piece in pieces))]
    ordered_reduce(pieces, out, op)
    assert out.tolist() == values


def test_nan_on_one_rank_is_never_lost():
    for op in ReduceOp:
        out = torch.empty(1)
        ordered_reduce([torch.tensor([1.0]), torch.tensor([torch.nan]), torch.tensor([2.0])], out, op)
        assert out.isnan().all()


def test_integers_are_summed_exactly():
    out = torch.zeros(1, dtype=torch.int64)
    ordered_reduce([torch.tensor([2**60]), torch.tensor([1]), torch.tensor([-(2**60)])], out, ReduceOp.SUM)
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
