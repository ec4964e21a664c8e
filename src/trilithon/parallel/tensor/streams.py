"""Random numbers under tensor slices: one common stream where tensors are whole, one for each rank where they are cut.

`SlicedStream` is entered after the first column product of a region and left before its row product. Its seed is drawn
from the common stream, so the state of torch's default generators says everything: whoever saves and restores that
(recomputation in backward, a checkpoint) replays both. (The two streams: Megatron-LM, arXiv:1909.08053, section 5.)
"""

from __future__ import annotations

import torch

from trilithon.contracts import Collectives, Tag

_STRIDE = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: neighbouring ranks get distant seeds


class SlicedStream:
    """Switches torch's default generators between the common stream and that of one rank."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank, self._device = rank, device
        self._common: list[torch.Tensor] | None = None  # what to go on with after the region; None outside

    def enter(self) -> None:
        """Into the region; entering again inside it changes nothing."""
        if self._common is None:
            seed = int(torch.randint(2**62, ()))
            self._common = states(self._device)
            torch.manual_seed((seed + (self._rank + 1) * _STRIDE) % 2**63)

    def leave(self) -> None:
        """Back to the common stream, one draw further than where the region was entered."""
        if self._common is not None:
            restore(self._common, self._device)
            self._common = None

    def mark(self) -> list[torch.Tensor] | None:
        """Inside a region or not; for recomputation, which may end between the two ends of one."""
        return self._common

    def back_to(self, mark: list[torch.Tensor] | None) -> None:
        """As it was at `mark`; the generators themselves are the caller's affair."""
        self._common = mark


def states(device: torch.device) -> list[torch.Tensor]:
    """The states of torch's default generators that a model on `device` draws from."""
    found = [torch.get_rng_state()]
    return [*found, torch.cuda.get_rng_state(device)] if device.type == "cuda" else found


def restore(saved: list[torch.Tensor], device: torch.device) -> None:
    """Put states from `states` back."""
    torch.set_rng_state(saved[0])
    if len(saved) > 1:
        torch.cuda.set_rng_state(saved[1], device)


def share_stream(group: Collectives, device: torch.device) -> None:
    """Collective: from now on the ranks of the group draw the same random numbers, those of its first rank."""
    if group.world_size == 1:
        return
    mine = states(device)
    for state in mine:
        wire = state.to(device)  # uint8
        group.broadcast(wire, 0, Tag("random state")).wait()
        state.copy_(wire)
    restore(mine, device)
