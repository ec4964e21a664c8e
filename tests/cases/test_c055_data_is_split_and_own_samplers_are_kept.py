"""A data set is split over ranks without overlap; a loader with its own sampler is left alone; the log says which."""

import logging

import pytest
from torch.utils.data import DataLoader, Dataset, Sampler

from trilithon.data import prepare_loader


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> int:
        return index


class Backwards(Sampler[int]):
    def __iter__(self):
        return iter(range(23, -1, -1))

    def __len__(self) -> int:
        return 24


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_data_set_is_split_without_overlap(shuffle):
    seen = [
        [i for batch in prepare_loader(Numbers(), 3, rank=rank, world_size=2, shuffle=shuffle) for i in batch.tolist()]
        for rank in range(2)
    ]
    assert len(seen[0]) == len(seen[1]) == 12
    assert sorted(seen[0] + seen[1]) == list(range(24))
    if not shuffle:
        assert seen[0] == [0, 1, 2, 6, 7, 8, 12, 13, 14, 18, 19, 20]


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_loader_with_its_own_sampler_keeps_its_order(shuffle):
    given = DataLoader(Numbers(), batch_size=4, sampler=Backwards())
    loader = prepare_loader(given, 3, rank=0, world_size=2, shuffle=shuffle)
    assert [i for batch in loader for i in batch.tolist()] == list(range(23, -1, -1))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (Numbers(), "split over 2 ranks without overlap, shuffled anew each epoch"),
        (DataLoader(Numbers(), sampler=Backwards()), "its own Backwards is used as it is"),
        (DataLoader(Numbers()), "each of the 2 ranks draws from all the samples"),
    ],
)
def test_what_was_chosen_is_logged_once_by_rank_0(caplog, data, words):
    caplog.set_level(logging.INFO, logger="trilithon.data.loader")
    for rank in range(2):
        loader = prepare_loader(data, 3, rank=rank, world_size=2)
        for _ in range(2):
            list(loader)
    assert [words in record.message for record in caplog.records] == [True]
