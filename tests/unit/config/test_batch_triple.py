"""The batch triple: every combination that determines a solution is solved, every other one is refused with advice."""

from __future__ import annotations

import itertools

import pytest

from trilithon.config import BatchConfig, Config, ResolvedBatch, data_parallel_size
from trilithon.errors import ConfigError


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("given", list(itertools.product([False, True], repeat=3)))
def test_every_combination_of_given_sizes_is_solved(ranks, given):
    """Sizes made from a known solution come back whichever of them are given; the rest takes accumulation 1."""
    micro, steps = 4, 5
    sizes = {"global_size": micro * steps * ranks, "micro_size": micro, "accumulation": steps}
    asked = {name: size for (name, size), keep in zip(sizes.items(), given) if keep}
    solved = BatchConfig(**asked).resolve(ranks)
    assert solved.global_size == solved.micro_size * solved.accumulation * ranks
    assert solved.data_parallel_size == ranks
    for name, size in asked.items():
        assert getattr(solved, name) == size
    if len(asked) >= 2:
        assert (solved.micro_size, solved.accumulation) == (micro, steps)
    if set(asked) == {"global_size"}:
        assert solved.accumulation == 1
    if not asked:
        assert (solved.micro_size, solved.accumulation) == (1, 1)


def solutions(size, micro, steps, ranks):
    """The plainest search: all (micro, steps) up to the size that fit what is given."""
    return [
        (m, k)
        for m, k in itertools.product(range(1, size + 1), repeat=2)
        if m * k * ranks == size and micro in (None, m) and steps in (None, k)
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_resolve_agrees_with_searching_all_triples(ranks):
    for size, micro, steps in itertools.product([1, 6, 7, 12], [None, 1, 2, 3], [None, 1, 2, 5]):
        batch = BatchConfig(global_size=size, micro_size=micro, accumulation=steps)
        found = solutions(size, micro, steps, ranks)
        if not found:
            with pytest.raises(ConfigError):
                batch.resolve(ranks)
            continue
        solved = batch.resolve(ranks)
        assert (solved.micro_size, solved.accumulation) in found


def test_a_contradiction_names_all_values_the_ranks_and_each_way_out():
    with pytest.raises(ConfigError) as caught:
        BatchConfig(global_size=96, micro_size=3, accumulation=2).resolve(8)
    text = str(caught.value)
    for part in ("batch.global_size=96", "batch.micro_size=3", "batch.accumulation=2", "8 data-parallel ranks"):
        assert part in text
    assert "batch.global_size to 48" in text
    assert "batch.accumulation to 4" in text
    assert "batch.micro_size to 6" in text


def test_the_ways_out_named_in_a_contradiction_work():
    for change in ({"global_size": 48}, {"accumulation": 4}, {"micro_size": 6}):
        sizes = {"global_size": 96, "micro_size": 3, "accumulation": 2, **change}
        assert isinstance(BatchConfig(**sizes).resolve(8), ResolvedBatch)


def test_a_size_that_does_not_divide_names_the_nearest_that_do():
    with pytest.raises(ConfigError, match=r"24\. Change batch.global_size; .* 96 and 120"):
        BatchConfig(global_size=100, micro_size=3).resolve(8)
    for size in (96, 120):
        BatchConfig(global_size=size, micro_size=3).resolve(8)


def test_a_size_below_the_number_of_ranks_names_the_smallest_that_works():
    with pytest.raises(ConfigError, match="nearest sizes that work: 8"):
        BatchConfig(global_size=3).resolve(8)


@pytest.mark.parametrize("missing", [0, None, -1, 2.0, True, "4"])
def test_a_missing_number_of_ranks_is_named(missing):
    with pytest.raises(ConfigError, match="data_parallel_size="):
        BatchConfig(global_size=8).resolve(missing)


def test_data_parallel_size_divides_the_world_by_the_model_parallel_size():
    assert data_parallel_size(8, 2) == 4
    with pytest.raises(ConfigError, match="world_size=None"):
        data_parallel_size(None)
    with pytest.raises(ConfigError, match="model_parallel_size=0"):
        data_parallel_size(8, 0)
    with pytest.raises(ConfigError, match="Nearest world sizes that do: 6 and 9"):
        data_parallel_size(8, 3)


def test_resolving_from_the_whole_configuration_says_where_each_size_was_written():
    config = Config.load({"batch": {"micro_size": 3}}, overrides={"batch.global_size": 100})
    with pytest.raises(
        ConfigError, match=r"global_size comes from override; batch\.micro_size comes from config:batch"
    ):
        config.resolve_batch(8)
    sized = Config.load(config, overrides={"batch.global_size": 96})
    assert sized.resolve_batch(8) == sized.batch.resolve(8)


@pytest.mark.parametrize("value", [0, -4, 2.5, "8", True])
def test_sizes_that_are_not_positive_whole_numbers_are_refused(value):
    with pytest.raises(ConfigError, match="micro_size="):
        BatchConfig(micro_size=value)
