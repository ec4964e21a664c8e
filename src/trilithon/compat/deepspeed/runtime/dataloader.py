"""`engine.deepspeed_io`: the part of a data set that is this data-parallel rank's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler


class DeepSpeedDataLoader(DataLoader[Any]):
    """Batches of the micro size, in another order at each pass; `data_sampler` replaces that.

    num_workers: None for two with a GPU, else none.
    """

    def __init__(
        self, dataset: Dataset[Any], batch_size: int, *, ranks: int, rank: int, pin_memory: bool = False,
        collate_fn: Callable[[Any], Any] | None = None, num_workers: int | None = None,
        data_sampler: Sampler[Any] | None = None, drop_last: bool = False, shuffle: bool = True,
    ) -> None:  # fmt: skip
        gpu = torch.cuda.is_available()
        if data_sampler is None and not isinstance(dataset, IterableDataset):
            data_sampler = DistributedSampler(dataset, num_replicas=ranks, rank=rank, shuffle=shuffle)
        super().__init__(
            dataset, batch_size=batch_size, sampler=data_sampler, collate_fn=collate_fn, drop_last=drop_last,
            num_workers=num_workers if num_workers is not None else 2 if gpu else 0, pin_memory=pin_memory and gpu,
        )  # fmt: skip
        self.epochs = 0

    def __iter__(self) -> Any:
        if isinstance(self.sampler, DistributedSampler):
            self.sampler.set_epoch(self.epochs)
        self.epochs += 1
        self._running: Iterator[Any] = super().__iter__()
        return self._running

    def __next__(self) -> Any:
        return next(self._running if "_running" in vars(self) else iter(self))
