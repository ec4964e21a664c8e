"""fp32 weights are the same bits whatever the bucket size, whether communication overlaps, and at which stage.

Sums over ranks are taken element by element in rank order, so how elements are packed into messages cannot matter; and
the norm that clips is a sum of squares in fp64, rounded to fp32, so that its order does not show either.
"""

from __future__ import annotations

from typing import Any

from trilithon.testing import ranks
from trilithon.testing.engine_run import digest_of, train_on_engine
from trilithon.testing.models import TinyGPT
from trilithon.testing.parity import token_batches

LARGEST = 4 * 16 * 16  # elements of the largest parameter
SIZES = (1, LARGEST - 1, 10**9)


def model() -> TinyGPT:
    return TinyGPT(dim=16, layers=1, context=8, unused=True)


def weights(world_size: int, accumulation: int, zero: dict[str, Any]) -> str:
    batches = token_batches(5, rows=2 * world_size, accumulation=accumulation, length=9)
    config = {"zero": zero, "optimizer": {"kind": "adamw", "lr": 1e-3}, "clip_norm": 0.1}
    run = train_on_engine(model, batches, config)
    assert all(factor < 1 for factor in run.clip_factors), run.clip_factors
    return digest_of(value for _, value in sorted(run.parameters.items()))


def every_way(
    world_size: int, accumulation: int, stages: tuple[int, ...], sizes: tuple[int, ...] = SIZES
) -> dict[str, str]:
    return {
        f"stage {stage}, bucket {size}, overlap {overlap}": weights(
            world_size, accumulation, {"stage": stage, "bucket_numel": size, "overlap": overlap}
        )
        for stage in stages
        for size in sizes
        for overlap in (True, False)
    }


@ranks(2, 3)
def test_weights_do_not_depend_on_buckets_overlap_or_stage(world_size: int):
    found = every_way(world_size, 1, (0, 1, 2, 3))
    assert len(set(found.values())) == 1, found


@ranks(2)
def test_with_micro_batches_stages_agree_in_pairs(world_size: int):
    """0 and 1 add micro-batches before ranks, 2 and 3 ranks before micro-batches: the same bits within each pair."""
    first, second = (every_way(world_size, 3, pair, (LARGEST - 1,)) for pair in ((0, 1), (2, 3)))
    assert len(set(first.values())) == 1, first
    assert len(set(second.values())) == 1, second


@ranks(2)
def test_reading_ahead_and_keeping_change_nothing_at_stage_3(world_size: int):
    ways: list[dict[str, Any]] = [
        {"prefetch_numel": 0},
        {"max_live_numel": 1},
        {"reshard_after_forward": False},
        {"persist_below_numel": 100},
        {"unit_classes": ("Block",)},
        {"unit_classes": ("Linear", "LayerNorm")},
    ]
    found = {str(way): weights(world_size, 1, {"stage": 3, **way}) for way in ways}
    assert len(set(found.values())) == 1, found
