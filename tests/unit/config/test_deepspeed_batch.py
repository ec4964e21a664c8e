"""The batch sizes of a DeepSpeed file: what is derived, what fails, and with which words. The table is DeepSpeed's."""

from __future__ import annotations

import pytest

from trilithon.config import Config
from trilithon.errors import BatchError, ConfigError

KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def block(*sizes):
    return {key: size for key, size in zip(KEYS, sizes) if size is not None}


@pytest.mark.parametrize(
    ("given", "ranks", "solved"),
    [  # (train, micro, accumulation), ranks, the same solved
        ((24, 2, 3), 4, (24, 2, 3)),
        ((24, 2, None), 4, (24, 2, 3)),
        ((24, None, 3), 4, (24, 2, 3)),
        ((None, 2, 3), 4, (24, 2, 3)),
        ((24, None, None), 4, (24, 6, 1)),
        ((None, 2, None), 4, (8, 2, 1)),
        ((1, 1, 1), 1, (1, 1, 1)),
        ((5e1, None, None), 1, (50, 50, 1)),
    ],
)
def test_what_is_left_out_is_derived(given, ranks, solved):
    batch = Config.load(block(*given)).resolve_batch(ranks)
    assert (batch.global_size, batch.micro_size, batch.accumulation) == solved


@pytest.mark.parametrize(
    ("given", "ranks"),
    [
        ((24, 2, 3), 2),  # the product is another one
        ((24, 2, 4), 4),
        ((25, 2, None), 4),  # 25 // 2 // 4 = 3, and 2 x 3 x 4 is not 25
        ((4, 8, None), 1),  # no whole accumulation: 0
        ((25, None, 3), 4),
        ((2, None, None), 4),  # no whole micro-batch: 0
        ((9, None, None), 4),
    ],
)
def test_sizes_that_do_not_go_together(given, ranks):
    config = Config.load(block(*given))
    with pytest.raises(BatchError, match=r"^Check batch related parameters: batch.global_size=") as caught:
        config.resolve_batch(ranks)
    assert isinstance(caught.value, AssertionError) and isinstance(caught.value, ConfigError)
    assert f"on {ranks} data-parallel ranks" in str(caught.value) and "comes from config:train_" in str(caught.value)


@pytest.mark.parametrize("given", [(None, None, 2), (None, None, None)])
def test_one_of_the_two_sizes_must_be_there(given):
    with pytest.raises(
        AssertionError, match="Either train_batch_size or train_micro_batch_size_per_gpu needs to be pro"
    ):
        Config.load({**block(*given), "zero_optimization": {"stage": 0}})


def test_a_native_triple_has_its_own_words():
    with pytest.raises(BatchError, match=r"^batch.global_size=3, batch.micro_size=2"):
        Config.load({"batch": {"global_size": 3, "micro_size": 2}}).resolve_batch(2)
