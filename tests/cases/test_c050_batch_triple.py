"""C050: any two of the batch sizes (or the micro-batch alone) give the rest; a contradiction names all numbers."""

from __future__ import annotations

import itertools

import pytest

from trilithon.config import Config
from trilithon.errors import ConfigError

DEEPSPEED = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
NATIVE = ("global_size", "micro_size", "accumulation")


def load(form, sizes):
    if form == "native":
        return Config.load({"batch": dict(zip(NATIVE, sizes))})
    return Config.load({"zero_optimization": {}, **dict(zip(DEEPSPEED, sizes))})


@pytest.mark.parametrize("form", ["native", "deepspeed"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_all_combinations_of_given_and_not_given(form, ranks):
    whole = (24 * ranks, 4, 6)
    for given in itertools.product([True, False], repeat=3):
        sizes = tuple(size if keep else None for size, keep in zip(whole, given))
        if form == "deepspeed" and not (given[0] or given[1]):
            with pytest.raises(ConfigError, match="train_batch_size or train_micro_batch_size_per_gpu needs"):
                load(form, sizes)
            continue
        solved = load(form, sizes).batch.resolve(ranks)
        found = (solved.global_size, solved.micro_size, solved.accumulation)
        if sum(given) >= 2:
            assert found == whole
        elif given == (True, False, False):
            assert found == (24 * ranks, 24, 1)
        elif given == (False, True, False):
            assert found == (4 * ranks, 4, 1)
        elif given == (False, False, True):
            assert found == (6 * ranks, 1, 6)
        else:
            assert found == (ranks, 1, 1)


@pytest.mark.parametrize("form", ["native", "deepspeed"])
def test_a_contradictory_triple_names_all_numbers_and_their_origin(form):
    config = load(form, (100, 3, 4))
    with pytest.raises(ConfigError) as caught:
        config.resolve_batch(8)
    text = str(caught.value)
    for part in ("global_size=100", "micro_size=3", "accumulation=4", "8 data-parallel ranks", "global_size to 96"):
        assert part in text
    origin = "batch.micro_size" if form == "native" else "train_micro_batch_size_per_gpu"
    assert f"batch.micro_size comes from config:{origin}" in text


@pytest.mark.parametrize(("sizes", "ranks"), [((7, None, None), 2), ((8, 3, None), 2), ((10, None, 4), 3)])
@pytest.mark.parametrize("form", ["native", "deepspeed"])
def test_sizes_that_do_not_divide_name_the_nearest_that_work(form, sizes, ranks):
    with pytest.raises(ConfigError) as caught:
        load(form, sizes).resolve_batch(ranks)
    text = str(caught.value)
    assert f"{ranks} data-parallel ranks" in text
    nearest = [int(word) for word in text.partition("sizes that work: ")[2].partition(".")[0].split(" and ")]
    for size in nearest:
        assert load(form, (size, *sizes[1:])).batch.resolve(ranks).global_size == size
