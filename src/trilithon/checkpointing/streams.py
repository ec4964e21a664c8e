"""Named streams of random numbers, to be drawn from in regions of a model that differ between tensor ranks.

What is whole on all tensor ranks draws from torch's default generators, in step; what is cut draws inside
`streams.fork()`, from a stream of this rank (the two streams of Megatron-LM, arXiv:1909.08053, section 5).
Recomputation puts the streams back as it does the default generators, when they are passed to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from trilithon.errors import ProtocolError

TENSOR_STREAM = "model-parallel-rng"  # as Megatron-LM and DeepSpeed call it
_OFFSET = 2718  # between the common seed and those of tensor ranks, there as here

States = dict[str, list[Tensor]]


class RandomStreams:
    """By name, states of the CPU's default generator and of the current CUDA device's, if that is in use."""

    def __init__(self) -> None:
        self._states: States = {}
        self._seeds: set[int] = set()

    def add(self, name: str, seed: int) -> None:
        """A stream that begins at `seed`. Raises ProtocolError for a name or a seed that is there already."""
        if name in self._states or seed in self._seeds:
            what = f"a stream called {name!r}" if name in self._states else f"a stream with seed {seed}"
            raise ProtocolError(f"there is {what} already: reset() the streams first, or choose another.")
        before = _states()
        torch.manual_seed(seed)
        self._states[name] = _states()
        self._seeds.add(seed)
        _set(before)

    @contextmanager
    def fork(self, name: str = TENSOR_STREAM) -> Iterator[None]:
        """Inside, torch's default generators go on from this stream, and outside as if nothing had been drawn."""
        if name not in self._states:
            raise ProtocolError(
                f"there is no stream called {name!r}, only {sorted(self._states)}: add({name!r}, seed) makes it, and "
                "seed_tensor_ranks makes the usual one."
            )
        before = _states()
        _set(self._states[name])
        try:
            yield
        finally:
            self._states[name] = _states()
            _set(before)

    def reset(self) -> None:
        """Forget all streams."""
        self._states.clear()
        self._seeds.clear()

    def get_states(self) -> States:
        """Copies, by name."""
        return {name: [part.clone() for part in state] for name, state in self._states.items()}

    def set_states(self, states: Mapping[str, list[Tensor]]) -> None:
        self._states = {name: [part.clone() for part in state] for name, state in states.items()}

    def state_dict(self) -> States:
        """For `engine.stateful`: streams are saved and restored with the run."""
        return self.get_states()

    def load_state_dict(self, state: Mapping[str, list[Tensor]]) -> None:
        self.set_states(state)

    def mark(self) -> States:
        """For recomputation: where all streams are. States are replaced and never written to, so this is no copy."""
        return dict(self._states)

    def back_to(self, mark: States) -> None:
        self._states = dict(mark)


def seed_tensor_ranks(streams: RandomStreams, seed: int, tensor_rank: int) -> None:
    """Torch's default generators begin at `seed` on all tensor ranks, and the one stream of `streams` apart on each."""
    streams.reset()
    torch.manual_seed(seed)
    streams.add(TENSOR_STREAM, seed + _OFFSET + tensor_rank)


def _states() -> list[Tensor]:
    found = [torch.get_rng_state()]
    return [*found, torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else found


def _set(states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])
