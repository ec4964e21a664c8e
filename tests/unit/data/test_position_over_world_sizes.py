"""The saved position means the same to any number of ranks: no sample twice, none left out, in one order."""

import random
from collections import Counter
from collections.abc import Iterator

import pytest
from torch.utils.data import Dataset

from trilithon.data import Loader, epoch_order

NUM_SAMPLES, SEED = 61, 9


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


def loaders(world_size: int, micro_size: int, **options) -> list[Loader]:
    return [
        Loader(Numbers(), micro_size, rank=rank, world_size=world_size, seed=SEED, **options)
        for rank in range(world_size)
    ]


def steps(group: list[Loader], count: int, streams: list[Iterator]) -> list[int]:
    """The samples of the next `count` batches of every rank in stream order; none from ranks that are done."""
    taken: list[int] = []
    for _ in range(count):
        for stream in streams:
            batch = next(stream, None)
            taken += [] if batch is None else batch.tolist()
    return taken


@pytest.mark.parametrize("trial", range(8))
def test_every_sequence_of_world_sizes_reads_the_stream_of_one_rank(trial):
    chance = random.Random(trial)
    state, taken = None, []
    for _ in range(6):
        world_size, micro_size, count = chance.choice([1, 2, 3, 4]), chance.randint(1, 4), chance.randint(0, 4)
        group = loaders(world_size, micro_size)
        for loader in group:
            if state is not None:
                loader.load_state_dict(state)
        taken += steps(group, count, [loader.endless() for loader in group])
        states = [loader.state_dict() for loader in group]
        assert all(other == states[0] for other in states)
        state = states[0]
        assert state["position"] == len(taken) and state["epoch"] == len(taken) // NUM_SAMPLES
    orders = [epoch_order(NUM_SAMPLES, SEED, epoch).tolist() for epoch in range(len(taken) // NUM_SAMPLES + 1)]
    stream = [index for order in orders for index in order]
    assert taken == stream[: len(taken)]


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (4, 1), (1, 3), (3, 2)])
@pytest.mark.parametrize("stop", [1, 2, 4])
def test_an_epoch_that_changes_ranks_in_the_middle_sees_every_sample_exactly_once(before, after, stop):
    first = loaders(before, 3, drop_last=False)
    taken = steps(first, stop, [iter(loader) for loader in first])
    second = loaders(after, 3, drop_last=False)
    for loader in second:
        loader.load_state_dict(first[0].state_dict())
    for loader in second:
        taken += [index for batch in loader for index in batch.tolist()]
    assert Counter(taken) == Counter(range(NUM_SAMPLES))
    assert {loader.state_dict()["epoch"] for loader in second} == {1}


def test_with_the_rest_left_out_nothing_comes_twice_and_less_than_a_batch_is_missing():
    first = loaders(4, 3)
    taken = steps(first, 3, [iter(loader) for loader in first])
    second = loaders(2, 3)
    for loader in second:
        loader.load_state_dict(first[0].state_dict())
        taken += [index for batch in loader for index in batch.tolist()]
    seen = Counter(taken)
    assert set(seen.values()) == {1} and NUM_SAMPLES - len(seen) < 2 * 3


def test_what_workers_have_read_ahead_does_not_count():
    first = loaders(4, 2, num_workers=1)
    streams = [loader.endless() for loader in first]
    taken = steps(first, 2, streams)
    state = first[0].state_dict()
    assert state["position"] == 16
    del streams
    second = loaders(2, 4)
    for loader in second:
        loader.load_state_dict(state)
    taken += steps(second, 2, [loader.endless() for loader in second])
    assert taken == epoch_order(NUM_SAMPLES, SEED, 0)[:32].tolist()
