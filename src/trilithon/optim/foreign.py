"""Somebody else's torch optimizer, run over the flat masters.

Its own `param_groups` dictionaries stay in place, so that schedulers and users who hold them keep their effect; only
the "params" lists inside are replaced, by one flat parameter per slice. Its `step` is called once per update, with all
gradients set, as it would be anywhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trilithon.contracts import ReduceOp, Slice, SyncMode
from trilithon.errors import CheckpointError
from trilithon.kernels.chunks import read_gradient_
from trilithon.optim.elementwise import Settings
from trilithon.tiers import bytes_by_tier

Flat = tuple[nn.Parameter, int, int]  # the optimizer's view of master[start:start + numel] of a slice


class Foreign:
    """`contracts.Update` around `optimizer`.

    whole: give it one parameter per shard, in its true shape; every shard must then be a whole parameter.
    Otherwise it sees one vector per slice, and one further element per group that always has gradient 0: that one's
    state tells, even on a rank that holds nothing of a group, which fields and counters the optimizer keeps.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, groups: Sequence[Settings], *, whole: bool = False) -> None:
        self.groups = groups
        self.name = type(optimizer).__name__
        self._optimizer = optimizer
        self._whole = whole
        self._flats: dict[str, list[Flat]] = {}
        self._names: dict[int, str] = {}  # of whole parameters
        self._loaded: dict[str, Any] | None = None
        optimizer.state.clear()
        self._witnesses: list[nn.Parameter] = []
        for group in optimizer.param_groups:
            group["params"] = []
            if not whole:
                self._witnesses.append(nn.Parameter(torch.zeros(1)))
                group["params"].append(self._witnesses[-1])

    def sync_mode(self, step: int) -> SyncMode:
        return SyncMode.MEAN

    @torch.no_grad()
    def apply(
        self,
        step: int,
        slices: Sequence[Slice],
        grad_scale: float,
        done: Callable[[Slice], None],
        combine: Callable[[Tensor, ReduceOp], Tensor],
    ) -> None:
        for slice_ in slices:
            for parameter, start, numel in self._bind(slice_):
                if self._whole and self._names[id(parameter)] in slice_.idle:
                    continue  # its grad is None, which torch's optimizers skip
                gradient = torch.empty_like(slice_.master[start : start + numel])
                read_gradient_(gradient, slice_.grad[start : start + numel], grad_scale)
                parameter.grad = gradient.view_as(parameter)
        for witness in self._witnesses:
            witness.grad = torch.zeros(1)
        idle = [kept for slice_ in slices for kept in self._idle_values(slice_)]
        self._optimizer.step()
        for live, before in idle:
            live.copy_(before)
        for slice_ in slices:
            for parameter, start, numel in self._flats[slice_.key]:
                parameter.grad = None
                here = slice_.master[start : start + numel]
                if parameter.data_ptr() != here.data_ptr():  # it replaced the tensor instead of writing to it
                    here.copy_(parameter.detach().reshape(-1))
                    parameter.data = here.view(parameter.shape)
            if slice_.low is not None:
                slice_.low.copy_(slice_.master)
            done(slice_)
        self._loaded = None  # every slice has been seen, so nobody will ask for it again

    def _idle_values(self, slice_: Slice) -> list[tuple[Tensor, Tensor]]:
        """(live, copy) of what must not move because its parameter got no gradient; its step counters do move."""
        if self._whole or not slice_.idle:
            return []
        fields = [slice_.master, *self._fields(slice_).values()]
        spans = [slice(s.offset, s.offset + s.numel) for s in slice_.shards if s.name in slice_.idle]
        return [(field[span], field[span].clone()) for field in fields for span in spans]

    def _bind(self, slice_: Slice) -> list[Flat]:
        """The optimizer's parameters for this slice, made when it is first seen."""
        if slice_.key in self._flats:
            return self._flats[slice_.key]
        flats: list[Flat] = []
        if self._whole:
            for shard in slice_.shards:
                assert shard.numel == shard.shape.numel(), f"{shard.name} is cut, but whole parameters were promised"
                view = slice_.master[shard.offset : shard.offset + shard.numel].view(shard.shape)
                flats.append((nn.Parameter(view), shard.offset, shard.numel))
                self._names[id(flats[-1][0])] = shard.name
        else:
            flats.append((nn.Parameter(slice_.master), 0, slice_.master.numel()))
        self._flats[slice_.key] = flats
        for parameter, _, _ in flats:
            self._optimizer.param_groups[slice_.group]["params"].append(parameter)
            self._restore(parameter, slice_.group)
        return flats

    @contextmanager
    def state(self, slice_: Slice, *, write: bool = False) -> Iterator[Mapping[str, Tensor]]:
        """Fields that the optimizer keeps per element; it creates them in its first step, before which there are none.

        With `whole`, see `state_dict` instead: such optimizers keep state of any shape.
        """
        yield {"master": slice_.master, **self._fields(slice_)}

    def _fields(self, slice_: Slice) -> dict[str, Tensor]:
        if self._whole:
            return {}
        ((parameter, _, _),) = self._bind(slice_)
        return {
            name: value for name, value in self._optimizer.state[parameter].items() if _per_element(value, parameter)
        }

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"rule": self.name, "whole": self._whole}
        if self._whole:
            state["state"] = {self._names[id(p)]: dict(s) for p, s in self._optimizer.state.items()}
            return state
        per_group = [dict(self._optimizer.state[witness]) for witness in self._witnesses]
        pairs = list(zip(self._witnesses, per_group))
        state["fields"] = [[name for name, v in kept.items() if _per_element(v, w)] for w, kept in pairs]
        state["scalars"] = [
            {name: _detached(v) for name, v in kept.items() if not _per_element(v, w)} for w, kept in pairs
        ]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """After it, `state(slice)` has every field, as zeros to be filled."""
        if state.get("rule") != self.name or state.get("whole") != self._whole:
            raise CheckpointError(
                f"The optimizer state was written by {state.get('rule')!r} (whole={state.get('whole')!r}), but the "
                f"optimizer in use is {self.name!r} (whole={self._whole}). Use the same optimizer and layout, or load "
                "without optimizer state."
            )
        self._loaded = {**state}
        if self._whole:  # handed out as parameters appear, perhaps after somebody changed what was passed here
            self._loaded["state"] = {
                name: {field: _detached(value) for field, value in kept.items()}
                for name, kept in state["state"].items()
            }
        self._optimizer.state.clear()
        for index, witness in enumerate(self._witnesses):
            self._restore(witness, index)
        for index, group in enumerate(self._optimizer.param_groups):
            for parameter in group["params"]:
                self._restore(parameter, index)

    def _restore(self, parameter: nn.Parameter, group: int) -> None:
        if self._loaded is None:
            return
        if self._whole:
            kept = self._loaded["state"].get(self._names[id(parameter)], {})
            self._optimizer.state[parameter] = {name: _detached(value) for name, value in kept.items()}
        elif self._loaded["fields"][group] or self._loaded["scalars"][group]:
            fields = {name: torch.zeros_like(parameter.detach()) for name in self._loaded["fields"][group]}
            scalars = {name: _detached(value) for name, value in self._loaded["scalars"][group].items()}
            self._optimizer.state[parameter] = {**scalars, **fields}

    def rank_state(self) -> dict[str, Tensor]:
        return {}

    def load_rank_state(
        self, state: Mapping[str, Tensor], saved_ranks: Sequence[Mapping[str, Tensor]] | None = None
    ) -> None:
        """Nothing here belongs to a rank."""

    def synchronize(self, slices: Sequence[Slice]) -> bool:
        return False

    def bytes(self) -> dict[str, int]:
        return bytes_by_tier(
            value for kept in self._optimizer.state.values() for value in kept.values() if isinstance(value, Tensor)
        )

    def close(self) -> None:
        self._optimizer.state.clear()
        for group in self._optimizer.param_groups:
            group["params"] = []
        self._flats.clear()


def _per_element(value: Any, parameter: nn.Parameter) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape and value.is_floating_point()


def _detached(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
