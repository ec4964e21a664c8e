"""With shuffle on, orders differ between epochs, follow from the seed, and contain every item once."""

from torch.utils.data import Dataset

from trilithon.data import prepare_loader

ITEMS = [f"item {number}" for number in range(12)]


class Labelled(Dataset[str]):
    def __len__(self) -> int:
        return len(ITEMS)

    def __getitem__(self, index: int) -> str:
        return ITEMS[index]


def three_epochs(**options) -> list[list[str]]:
    """What two ranks see together in each of three epochs."""
    loaders = [prepare_loader(Labelled(), 2, rank=rank, world_size=2, **options) for rank in range(2)]
    return [[item for loader in loaders for batch in loader for item in batch] for _ in range(3)]


def test_each_item_is_seen_once_per_epoch():
    for shuffle in (True, False):
        for epoch in three_epochs(shuffle=shuffle):
            assert sorted(epoch) == sorted(ITEMS)


def test_orders_differ_between_epochs_and_follow_from_the_seed():
    first, second, third = three_epochs(seed=7)
    assert len({tuple(epoch) for epoch in (first, second, third)}) == 3
    assert three_epochs(seed=7) == [first, second, third]
    assert three_epochs(seed=8) != [first, second, third]


def test_shuffling_is_the_default_and_can_be_turned_off():
    assert three_epochs() == three_epochs(shuffle=True)
    first, second, _ = three_epochs(shuffle=False)
    assert first == second
