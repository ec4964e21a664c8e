import pytest
import torch

from trilithon.comm.ledger import (
    Ledger,
    all_gather_bytes,
    all_reduce_bytes,
    broadcast_bytes,
    reduce_scatter_bytes,
)


def count(ledger, kind="all_gather", group="data", dtype=torch.float32, sent=12):
    ledger.record(kind, group, dtype, elements_in=3, elements_out=6, sent_bytes=sent)


def test_totals_are_kept_by_kind_group_and_dtype():
    ledger = Ledger()
    count(ledger)
    count(ledger)
    count(ledger, group="tensor")
    count(ledger, dtype=torch.bfloat16, sent=6)
    count(ledger, kind="barrier", sent=0)
    assert [
        (r.kind, r.group, r.dtype, r.calls, r.elements_in, r.elements_out, r.sent_bytes) for r in ledger.rows()
    ] == [
        ("all_gather", "data", torch.bfloat16, 1, 3, 6, 6),
        ("all_gather", "data", torch.float32, 2, 6, 12, 24),
        ("all_gather", "tensor", torch.float32, 1, 3, 6, 12),
        ("barrier", "data", torch.float32, 1, 3, 6, 0),
    ]
    assert ledger.sent_bytes() == 42
    assert ledger.sent_bytes("all_gather", "data") == 30
    assert ledger.sent_bytes(group="tensor") == 12
    assert (ledger.calls(), ledger.calls("barrier")) == (5, 1)


def test_measure_counts_only_its_block_and_nests():
    ledger = Ledger()
    count(ledger)
    with ledger.measure() as outer:
        count(ledger, "reduce_scatter", sent=100)
        with ledger.measure() as inner:
            count(ledger, sent=7)
            count(ledger, "barrier", sent=0)
    count(ledger)
    assert (outer.reduce_scatter_bytes, outer.all_gather_bytes, outer.total_bytes, outer.calls) == (100, 7, 107, 3)
    assert (inner.reduce_scatter_bytes, inner.all_gather_bytes, inner.all_reduce_bytes, inner.calls) == (0, 7, 0, 2)


def test_measure_stops_when_its_block_raises():
    ledger = Ledger()
    with pytest.raises(KeyError), ledger.measure() as sent:
        raise KeyError
    count(ledger)
    assert sent.calls == 0


def test_zero_3_and_zero_2_volumes_of_the_specification():
    """N=4, one million bf16 parameters: stage 2 sends 3.0 MB per rank and step, stage 3 sends 4.5 MB."""
    gather, scatter = all_gather_bytes(250_000, 2, 4), reduce_scatter_bytes(250_000, 2, 4)
    assert gather + scatter == 3_000_000
    assert 2 * gather + scatter == 4_500_000


@pytest.mark.parametrize(
    ("numel", "world_size", "expected"), [(12, 4, 72), (1, 3, 6), (1, 1, 0), (0, 4, 0), (5, 2, 20)]
)
def test_all_reduce_is_two_phases_of_its_part_rounded_up(numel, world_size, expected):
    assert all_reduce_bytes(numel, 4, world_size) == expected


def test_a_group_of_one_sends_nothing():
    assert broadcast_bytes(10, 4, 1) == all_gather_bytes(10, 4, 1) == reduce_scatter_bytes(10, 4, 1) == 0
    assert broadcast_bytes(10, 4, 3) == 40
