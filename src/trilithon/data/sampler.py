"""Which samples come next: the order is computed, the position is state.

The order of an epoch is a pure function of (seed, epoch). The epochs laid end to end are one endless stream of samples,
and the position in it, counted in samples of all ranks together, is the whole state. One global batch is the next
world_size * micro_size samples of the stream, of which rank r takes the r-th part; so another number of ranks, or
another micro-batch size, continues at the same sample: none is repeated and none is left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trilithon.errors import ConfigError, DataError


def epoch_order(num_samples: int, seed: int, epoch: int, shuffle: bool = True) -> Tensor:
    """The sample indices of one epoch [num_samples] i64: a permutation that depends on nothing but the arguments.

    It takes 8 bytes a sample while the epoch lasts.
    """
    if not shuffle:
        return torch.arange(num_samples)
    # A digest rather than seed + epoch: epoch 1 of seed 0 must not be epoch 0 of seed 1.
    mixed = int.from_bytes(hashlib.blake2b(f"{seed}:{epoch}".encode(), digest_size=8).digest(), "little")
    generator = torch.Generator().manual_seed(mixed % (1 << 63))
    return torch.randperm(num_samples, generator=generator)


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """One rank's part of the next samples of all ranks."""

    indices: list[int]  # this rank's samples; empty where a shared-out tail leaves it none
    end: int  # position of the stream after this batch


class StreamSampler:
    """Cuts the stream of epochs into this rank's batches and keeps the position.

    `epoch_batches` goes to the end of the current epoch and ends there; `endless_batches` fills each batch across the
    boundary between epochs, so that every batch is full and no sample is ever left out.
    """

    def __init__(
        self,
        num_samples: int,
        micro_size: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = True,
    ) -> None:
        """drop_last: what becomes of the samples at the end of an epoch that do not fill a batch on every rank.

        True leaves them out of this epoch (fewer than world_size * micro_size, others each epoch when shuffled); False
        shares them out as evenly as possible, so that ranks may get a shorter batch or none. No effect when endless.
        """
        if num_samples < 1:
            raise DataError("The data set is empty: there is no sample to draw.")
        if micro_size < 1 or not 0 <= rank < world_size:
            raise ConfigError(f"micro_size={micro_size}, rank={rank}, world_size={world_size} is not a possible split.")
        self.num_samples, self.micro_size = num_samples, micro_size
        self.rank, self.world_size = rank, world_size
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.position = 0  # samples of all ranks that were handed out, over all epochs
        self._order: tuple[int, Tensor] | None = None  # (epoch, its order)

    @property
    def epoch(self) -> int:
        """The epoch of the next sample, from 0."""
        return self.position // self.num_samples

    @property
    def global_size(self) -> int:
        return self.world_size * self.micro_size

    def epoch_batches(self) -> Iterator[GlobalBatch]:
        """From the position to the end of its epoch. The position is moved by whoever consumes the batches.

        Raises DataError when a whole epoch does not fill one batch on every rank and the rest is to be left out.
        """
        if self.drop_last and self.num_samples < self.global_size:
            raise DataError(
                f"{self.num_samples} samples do not fill one batch of {self.micro_size} on each of {self.world_size} "
                "ranks. Give more data, a smaller micro-batch, or drop_last=False."
            )
        position, boundary = self.position, (self.epoch + 1) * self.num_samples
        if self.drop_last and boundary - position < self.global_size:
            self.position = boundary  # resumed on more ranks than before, the rest of the epoch fills no batch
        while position + self.global_size <= boundary:
            batch = self._cut(position)
            # The last full batch also ends the epoch when the rest is to be left out.
            if self.drop_last and boundary - batch.end < self.global_size:
                batch = GlobalBatch(batch.indices, boundary)
            position = batch.end
            yield batch
        rest = boundary - position
        if rest and not self.drop_last:
            first, last = (position + rest * r // self.world_size for r in (self.rank, self.rank + 1))
            yield GlobalBatch(self._samples(first, last), boundary)

    def endless_batches(self) -> Iterator[GlobalBatch]:
        """From the position on, for ever."""
        position = self.position
        while True:
            batch = self._cut(position)
            position = batch.end
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Plain data, the same on every rank. "epoch" is for people: it follows from the position."""
        return {
            "position": self.position,
            "epoch": self.epoch,
            "num_samples": self.num_samples,
            "shuffle": self.shuffle,
            "seed": self.seed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a position, on any number of ranks. Raises DataError if it is a position in another stream."""
        for name in ("num_samples", "shuffle", "seed"):
            mine, theirs = getattr(self, name), state[name]
            if mine != theirs:
                raise DataError(
                    f"The saved position belongs to another order of samples: {name} was {theirs} and is {mine}. "
                    "Resume with the same data, shuffle and seed, or start at position 0."
                )
        self.position = int(state["position"])

    def _cut(self, position: int) -> GlobalBatch:
        first = position + self.rank * self.micro_size
        return GlobalBatch(self._samples(first, first + self.micro_size), position + self.global_size)

    def _samples(self, first: int, last: int) -> list[int]:
        """Indices at stream positions [first, last), which may cross epochs."""
        indices: list[int] = []
        while first < last:
            epoch, offset = divmod(first, self.num_samples)
            count = min(last - first, self.num_samples - offset)
            indices += self._order_of(epoch)[offset : offset + count].tolist()
            first += count
        return indices

    def _order_of(self, epoch: int) -> Tensor:
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, epoch_order(self.num_samples, self.seed, epoch, self.shuffle))
        return self._order[1]
