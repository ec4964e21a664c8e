"""The size of reduction buckets changes messages, never weights.

Reports had other convergence, or NaN, after changing nothing but the bucket size. In fp32 the weights after five steps
have to be the same bits for buckets of one element, of a little less than the largest parameter, and larger than the
model, with communication overlapping and not.
https://github.com/deepspeedai/DeepSpeed/issues/6351
"""

from __future__ import annotations

import pytest

from trilithon.testing import ranks
from trilithon.testing.engine_run import digest_of, train_on_engine
from trilithon.testing.models import MLP
from trilithon.testing.parity import vector_batches

LARGEST = 16 * 16


@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks(2)
def test_weights_are_the_same_bits(stage: int, world_size: int):
    batches = vector_batches(5, rows=2 * world_size, accumulation=2)
    bits = {}
    for size in (1, LARGEST - 1, 10**9):
        for overlap in (True, False):
            zero = {"stage": stage, "bucket_numel": size, "overlap": overlap}
            run = train_on_engine(MLP, batches, {"zero": zero, "optimizer": {"kind": "adamw"}, "clip_norm": 0.1})
            bits[size, overlap] = digest_of(value for _, value in sorted(run.parameters.items()))
    assert len(set(bits.values())) == 1, bits
