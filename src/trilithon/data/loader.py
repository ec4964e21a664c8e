"""Batches for one rank: a data set split over the ranks, resumable in the middle of an epoch.

    loader = Loader(dataset, micro_size=4, rank=rank, world_size=world_size)
    for batch in loader: ...                  # to the end of the epoch; the next loop is the next epoch
    batches = loader.endless()                # or for ever
    saved = loader.state_dict()               # after any batch, the same on every rank

The position counts the batches that were handed out, not those that loader workers have read ahead. Nothing here draws
from PyTorch's global random numbers, so a resumed run sees the same dropout masks as one that was never stopped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from trilithon.data.sampler import GlobalBatch, StreamSampler
from trilithon.errors import DataError

logger = logging.getLogger(__name__)


class Loader:
    """A map-style data set as batches of `micro_size` samples for this rank; shuffled unless told otherwise."""

    def __init__(
        self,
        dataset: Dataset[Any],
        micro_size: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = True,
        num_workers: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        """See `StreamSampler` for what `shuffle`, `seed` and `drop_last` mean; `num_workers` are loader
        processes.

        With drop_last=False ranks may see different numbers of batches in an epoch: wrap the loop in `engine.uneven()`.
        Raises DataError for a data set without a length, or too small for one batch on every rank.
        """
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise DataError(
                f"{type(dataset).__name__} has no length, so its samples cannot be split over ranks or resumed at a "
                "position. Give a data set with __len__ and __getitem__, or a DataLoader that splits by itself."
            )
        self.dataset = dataset
        self.sampler = StreamSampler(
            len(dataset),
            micro_size,
            rank=rank,
            world_size=world_size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )
        self._num_workers, self._collate = num_workers, collate

    @property
    def position(self) -> int:
        """Samples of all ranks handed out so far, over all epochs."""
        return self.sampler.position

    def __len__(self) -> int:
        """Batches in a whole epoch for this rank (with drop_last=False: of the rank that gets most)."""
        whole, rest = divmod(self.sampler.num_samples, self.sampler.global_size)
        return whole + bool(rest and not self.sampler.drop_last)

    def __iter__(self) -> Iterator[Any]:
        """The rest of the current epoch, which is all of it at its beginning."""
        yield from self._batches(self.sampler.epoch_batches())

    def endless(self) -> Iterator[Any]:
        """Batches for ever, each full: one that begins at the end of an epoch is filled from the next."""
        yield from self._batches(self.sampler.endless_batches())

    def state_dict(self) -> dict[str, Any]:
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.sampler.load_state_dict(state)

    def _batches(self, planned: Iterator[GlobalBatch]) -> Iterator[Any]:
        ends: list[int] = []  # of the batches that are planned but not handed out, in order

        def indices() -> Iterator[list[int]]:
            for batch in planned:
                ends.append(batch.end)
                if batch.indices:
                    yield batch.indices

        # An own generator, because a DataLoader would draw its workers' seed from the global one.
        generator = torch.Generator().manual_seed(self.sampler.seed + self.sampler.position)
        inner: DataLoader[Any] = DataLoader(
            self.dataset,
            batch_sampler=indices(),
            num_workers=self._num_workers,
            collate_fn=self._collate,
            generator=generator,
        )
        for batch in inner:
            # Moved before the batch is handed out: a state saved while it is in use continues behind it.
            self.sampler.position = ends.pop(0)
            yield batch
        if ends:  # this rank's share of the tail was empty
            self.sampler.position = ends.pop()


class EpochLoader(DataLoader[Any]):
    """torch's DataLoader, whose DistributedSampler learns of each pass: another order every time, alike on all ranks.

    Also an iterator, over the pass that was begun last. epochs: passes that were begun.
    """

    epochs = 0
    _running: Iterator[Any] | None = None

    def __iter__(self) -> Any:
        if isinstance(self.sampler, DistributedSampler):
            self.sampler.set_epoch(self.epochs)
        self.epochs += 1
        self._running = super().__iter__()
        return self._running

    def __next__(self) -> Any:
        return next(self._running or iter(self))


class RepeatingLoader:
    """An iterator over `loader` for ever: it begins anew when it is at its end. Raises DataError for an empty one."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        for batch in self.data_iter:
            return batch
        self.data_iter = iter(self.loader)
        for batch in self.data_iter:
            return batch
        raise DataError(
            f"a {type(self.loader).__name__} that is to be repeated is empty, or cannot be begun anew: pass a loader "
            "or a list with at least one batch."
        )


def prepare_loader(
    data: Dataset[Any] | DataLoader[Any] | Loader,
    micro_size: int,
    *,
    rank: int = 0,
    world_size: int = 1,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = True,
    num_workers: int = 0,
    collate: Callable[[list[Any]], Any] | None = None,
) -> Loader | DataLoader[Any]:
    """A data set becomes a `Loader` that splits it over the ranks; a loader is left alone. Rank 0 logs which it was.

    A DataLoader keeps its sampler, order, batch size and workers. Whether it splits over ranks is its own affair, and
    the log says when it does not seem to.
    """
    if isinstance(data, Loader):
        return data
    if isinstance(data, DataLoader):
        if rank == 0:
            _log_left_alone(data, world_size)
        return data
    loader = Loader(
        data,
        micro_size,
        rank=rank,
        world_size=world_size,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
        num_workers=num_workers,
        collate=collate,
    )
    if rank == 0:
        logger.info(
            "data set of %d samples: split over %d ranks without overlap, %s, micro-batches of %d",
            len(data),  # type: ignore[arg-type]  # Loader has checked that it has a length
            world_size,
            f"shuffled anew each epoch from seed {seed}" if shuffle else "in order (shuffle is off)",
            micro_size,
        )
    return loader


def _log_left_alone(loader: DataLoader[Any], world_size: int) -> None:
    sampler = loader.sampler if loader.batch_sampler is None else getattr(loader.batch_sampler, "sampler", None)
    name = type(sampler if sampler is not None else loader.batch_sampler).__name__
    built_in = name in ("RandomSampler", "SequentialSampler", "_InfiniteConstantSampler")
    if world_size > 1 and built_in and not isinstance(sampler, DistributedSampler):
        logger.warning(
            "a DataLoader with %s is used as it is: each of the %d ranks draws from all the samples. "
            "To have them split, give the data set itself or a DataLoader with a DistributedSampler.",
            name,
            world_size,
        )
    else:
        logger.info("a DataLoader with its own %s is used as it is: order and split are its own", name)
