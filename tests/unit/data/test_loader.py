import logging
from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, SubsetRandomSampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from trilithon.data import EpochLoader, Loader, RepeatingLoader, prepare_loader
from trilithon.errors import DataError


class Numbers(Dataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


class Endless(IterableDataset[int]):
    def __iter__(self):
        return iter(range(10))


def ids(batches) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def test_a_loop_is_an_epoch_and_the_next_loop_the_next(caplog):
    loader = Loader(Numbers(7), 2, shuffle=False)
    assert len(loader) == 3
    assert ids(loader) == [[0, 1], [2, 3], [4, 5]]
    assert loader.position == 7
    assert ids(loader) == [[0, 1], [2, 3], [4, 5]]
    assert loader.position == 14


def test_the_rest_of_an_epoch_can_be_kept():
    loader = Loader(Numbers(7), 2, shuffle=False, drop_last=False)
    assert len(loader) == 4
    assert ids(loader) == [[0, 1], [2, 3], [4, 5], [6]]


def test_a_rank_without_a_share_of_the_rest_still_ends_the_epoch():
    loaders = [Loader(Numbers(9), 2, rank=rank, world_size=4, shuffle=False, drop_last=False) for rank in range(4)]
    assert [ids(loader) for loader in loaders] == [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7], [8]]]
    assert [loader.position for loader in loaders] == [9, 9, 9, 9]


def test_endless_batches_are_full_across_epochs():
    loader = Loader(Numbers(5), 2, shuffle=False)
    assert ids(islice(loader.endless(), 5)) == [[0, 1], [2, 3], [4, 0], [1, 2], [3, 4]]
    assert loader.position == 10


def test_each_pass_is_another_epoch_of_a_distributed_sampler():
    data = TensorDataset(torch.arange(12))
    loader = EpochLoader(data, batch_size=3, sampler=DistributedSampler(data, num_replicas=2, rank=1))
    plain = DistributedSampler(data, num_replicas=2, rank=1)
    seen = []
    for epoch in range(2):
        plain.set_epoch(epoch)
        seen.append([index for batch in loader for index in batch[0].tolist()])
        assert seen[epoch] == list(plain) and loader.epochs == epoch + 1
    assert seen[0] != seen[1]
    ordered = EpochLoader(data, batch_size=5)  # by hand, as an iterator
    assert next(ordered)[0].tolist() == [0, 1, 2, 3, 4] and next(ordered)[0].tolist() == [5, 6, 7, 8, 9]


def test_any_loader_can_be_repeated():
    repeated = RepeatingLoader(DataLoader(TensorDataset(torch.arange(3)), batch_size=2))
    assert [batch[0].tolist() for batch in islice(repeated, 5)] == [[0, 1], [2], [0, 1], [2], [0, 1]]
    assert iter(repeated) is repeated
    for wrong in ([], iter(())):
        with pytest.raises(DataError, match="empty, or cannot be begun anew"):
            next(RepeatingLoader(wrong))


def test_the_position_is_that_of_batches_handed_out():
    loader = Loader(Numbers(12), 2, shuffle=False)
    batches = iter(loader)
    assert loader.position == 0
    next(batches)
    assert loader.position == 2
    next(batches)
    assert loader.position == 4


@pytest.mark.parametrize("num_workers", [0, 2])
def test_stopping_and_going_on_sees_the_same_batches(num_workers):
    whole = ids(islice(Loader(Numbers(20), 3, seed=4).endless(), 12))
    first = Loader(Numbers(20), 3, seed=4, num_workers=num_workers)
    begun = ids(islice(first.endless(), 5))
    second = Loader(Numbers(20), 3, seed=4, num_workers=num_workers)
    second.load_state_dict(first.state_dict())
    assert begun + ids(islice(second.endless(), 7)) == whole


def test_loading_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    list(Loader(Numbers(8), 2))
    assert torch.equal(torch.get_rng_state(), before)


def test_samples_of_several_tensors_are_stacked_and_a_collate_replaces_that():
    dataset = TensorDataset(torch.arange(6).view(6, 1), torch.arange(6) * 10)
    first, second = next(iter(Loader(dataset, 3, shuffle=False)))
    assert first.shape == (3, 1) and second.tolist() == [0, 10, 20]
    assert next(iter(Loader(Numbers(4), 2, shuffle=False, collate=sum))) == 1


def test_data_without_a_length_is_refused_with_a_way_out():
    with pytest.raises(DataError, match="Endless has no length"):
        Loader(Endless(), 2)


@pytest.mark.parametrize(
    "make",
    [
        lambda data: DataLoader(data, batch_size=2, shuffle=True),
        lambda data: DataLoader(data, batch_size=2, sampler=SubsetRandomSampler([3, 1])),
        lambda data: DataLoader(data, batch_sampler=[[0, 1], [5]]),
        lambda data: DataLoader(data, batch_size=None),
        lambda data: Loader(data, 2),
    ],
)
def test_a_loader_is_returned_as_it_is(make):
    given = make(Numbers(6))
    assert prepare_loader(given, 5, rank=1, world_size=2) is given


def test_only_a_loader_that_does_not_split_is_warned_about(caplog):
    caplog.set_level(logging.INFO, logger="trilithon.data.loader")
    data = Numbers(6)
    prepare_loader(DataLoader(data, batch_size=2), 2, world_size=2)
    assert caplog.records[-1].levelno == logging.WARNING and "each of the 2 ranks" in caplog.text
    caplog.clear()
    prepare_loader(DataLoader(data, sampler=DistributedSampler(data, 2, 0)), 2, world_size=2)
    prepare_loader(DataLoader(data, batch_size=2), 2, world_size=1)
    assert [record.levelno for record in caplog.records] == [logging.INFO, logging.INFO]
