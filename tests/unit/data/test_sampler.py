from collections import Counter
from itertools import islice

import pytest
import torch

from trilithon.data import StreamSampler, epoch_order
from trilithon.errors import ConfigError, DataError


def ranks(num_samples: int, micro_size: int, world_size: int, **options) -> list[StreamSampler]:
    return [
        StreamSampler(num_samples, micro_size, rank=rank, world_size=world_size, **options)
        for rank in range(world_size)
    ]


def take(samplers: list[StreamSampler], steps: int) -> list[int]:
    """The samples of the next global batches in stream order; moves every position as a loader would."""
    taken = []
    streams = [islice(sampler.endless_batches(), steps) for sampler in samplers]
    for batches in zip(*streams):
        for sampler, batch in zip(samplers, batches):
            taken += batch.indices
            sampler.position = batch.end
    return taken


def test_an_order_is_a_permutation_that_depends_on_seed_and_epoch_alone():
    torch.manual_seed(1)
    orders = {(seed, epoch): tuple(epoch_order(50, seed, epoch).tolist()) for seed in range(3) for epoch in range(3)}
    torch.manual_seed(2)
    for (seed, epoch), order in orders.items():
        assert sorted(order) == list(range(50))
        assert tuple(epoch_order(50, seed, epoch).tolist()) == order
    assert len(set(orders.values())) == 9, "seed + 1 must not be the next epoch"
    assert epoch_order(5, 0, 3, shuffle=False).tolist() == [0, 1, 2, 3, 4]


def test_drawing_an_order_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    epoch_order(10, 0, 0)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_size", [1, 3])
def test_the_endless_stream_is_the_epochs_end_to_end(world_size, micro_size):
    taken = take(ranks(10, micro_size, world_size, seed=5), steps=12)
    expected = [i for epoch in range(20) for i in epoch_order(10, 5, epoch).tolist()]
    assert taken == expected[: len(taken)] and len(taken) == 12 * world_size * micro_size


def test_every_sample_comes_exactly_once_when_the_number_of_ranks_changes():
    state = {"position": 0, "num_samples": 60, "shuffle": True, "seed": 3}
    taken = []
    for world_size, micro_size, steps in [(2, 3, 3), (4, 3, 2), (1, 2, 3), (3, 4, 1)]:  # 18 + 24 + 6 + 12 = 60
        samplers = ranks(60, micro_size, world_size, seed=3)
        for sampler in samplers:
            sampler.load_state_dict(state)
        taken += take(samplers, steps)
        states = [sampler.state_dict() for sampler in samplers]
        assert all(other == states[0] for other in states)
        state = states[0]
    assert state["position"] == 60
    assert taken == epoch_order(60, 3, 0).tolist()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_an_epoch_without_its_rest_has_full_batches_on_every_rank(world_size):
    samplers = ranks(23, 2, world_size)
    for epoch in range(3):
        batches = [list(sampler.epoch_batches()) for sampler in samplers]
        assert {len(each) for each in batches} == {23 // (2 * world_size)}
        seen = Counter(i for each in batches for batch in each for i in batch.indices)
        assert set(seen.values()) == {1} and all(len(batch.indices) == 2 for each in batches for batch in each)
        for sampler, each in zip(samplers, batches):
            sampler.position = each[-1].end
            assert sampler.epoch == epoch + 1 and sampler.position == 23 * (epoch + 1)


@pytest.mark.parametrize("num_samples", [5, 16, 17, 19, 23])
def test_a_shared_rest_gives_every_sample_to_exactly_one_rank(num_samples):
    samplers = ranks(num_samples, 2, 4, drop_last=False)
    batches = [list(sampler.epoch_batches()) for sampler in samplers]
    seen = Counter(i for each in batches for batch in each for i in batch.indices)
    assert seen == Counter(range(num_samples))
    assert len({len(each) for each in batches}) == 1, "positions move alike on every rank"
    assert {each[-1].end for each in batches} == {num_samples}
    last = [len(each[-1].indices) for each in batches]
    assert max(last) - min(last) <= 1


def test_an_epoch_resumed_in_the_middle_ends_where_it_would_have():
    sampler = StreamSampler(20, 3, seed=1)
    whole = [batch.indices for batch in sampler.epoch_batches()]
    sampler.position = 9
    assert [batch.indices for batch in sampler.epoch_batches()] == whole[3:]


def test_a_rest_too_small_for_more_ranks_ends_the_epoch():
    sampler = StreamSampler(20, 3, world_size=4)
    sampler.position = 12  # eight left, and a batch takes twelve
    assert list(sampler.epoch_batches()) == []
    assert sampler.position == 20 and len(list(sampler.epoch_batches())) == 1


@pytest.mark.parametrize("change", [{"num_samples": 61}, {"seed": 4}, {"shuffle": False}])
def test_a_position_in_another_stream_is_refused(change):
    saved = StreamSampler(60, 2, seed=3).state_dict()
    options = {"num_samples": 60, "micro_size": 2, "seed": 3} | change
    with pytest.raises(DataError, match=f"{next(iter(change))} was .* and is"):
        StreamSampler(**options).load_state_dict(saved)


def test_a_data_set_too_small_for_every_rank_is_an_error_with_a_way_out():
    with pytest.raises(DataError, match="5 samples do not fill one batch of 3 on each of 2 ranks"):
        next(StreamSampler(5, 3, world_size=2).epoch_batches())
    with pytest.raises(DataError, match="empty"):
        StreamSampler(0, 1)
    with pytest.raises(ConfigError, match="rank=2, world_size=2"):
        StreamSampler(5, 1, rank=2, world_size=2)
