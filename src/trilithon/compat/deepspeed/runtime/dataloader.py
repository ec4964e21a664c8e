"""`engine.deepspeed_io` and `RepeatingLoader`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler


class RepeatingLoader:
    """Begins anew when `loader` is at its end."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


class DeepSpeedDataLoader:
    """The part of a dataset that is this data-parallel rank's, in batches of the micro size.

    Each pass is another permutation; `data_sampler` replaces it. num_workers: None for two with a GPU, else none.
    """

    def __init__(
        self, dataset: Dataset[Any], batch_size: int, *, ranks: int, rank: int, pin_memory: bool = False,
        collate_fn: Callable[[Any], Any] | None = None, num_workers: int | None = None,
        data_sampler: Sampler[Any] | None = None, drop_last: bool = False, shuffle: bool = True,
    ) -> None:  # fmt: skip
        gpu = torch.cuda.is_available()
        if data_sampler is None and not isinstance(dataset, IterableDataset):
            data_sampler = DistributedSampler(dataset, num_replicas=ranks, rank=rank, shuffle=shuffle)
        self.data_sampler, self.batch_size, self.epochs = data_sampler, batch_size, 0
        self.loader: DataLoader[Any] = DataLoader(
            dataset, batch_size=batch_size, sampler=data_sampler, collate_fn=collate_fn, drop_last=drop_last,
            num_workers=num_workers if num_workers is not None else 2 if gpu else 0, pin_memory=pin_memory and gpu,
        )  # fmt: skip
        self._running: Iterator[Any] | None = None

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> DeepSpeedDataLoader:
        if isinstance(self.data_sampler, DistributedSampler):
            self.data_sampler.set_epoch(self.epochs)
        self.epochs += 1
        self._running = iter(self.loader)
        return self

    def __next__(self) -> Any:
        if self._running is None:
            iter(self)
        assert self._running is not None
        return next(self._running)
