"""Stage 3 at work: parameters are gathered when a module's forward or backward needs them and freed after it.

Hooks on the modules that own units open and close a *frame*; a frame holds its units whole while it runs. The outputs
of a forward carry a hook that gathers the same units again before the backward of that module starts. Autograd runs
nodes latest first, so when the backward of an earlier module starts, those of later ones that it is not inside are
over. A parameter read outside its own module while a frame is open joins that frame; read outside any it raises.

The order of gathers is recorded and drives read-ahead; when it changes it is recorded anew, never an error.
(Rajbhandari et al. 2020, arXiv:1910.02054, section 5.3; recorded order: Rajbhandari et al. 2021, arXiv:2104.07857,
section 6.2.)
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence, ValuesView
from itertools import islice, tee
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import set_eval_frame
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from trilithon.contracts import Collectives, ReduceOp, Tag
from trilithon.errors import CollectiveError, ShardedParameterError, TierError
from trilithon.zero.prefetch import Trace
from trilithon.zero.unit import Residency, Unit

logger = logging.getLogger(__name__)

READ_AHEAD_UNITS = 8  # of those that rest off the device; how many fit into the buffers is up to the store


@dataclasses.dataclass(eq=False)
class Frame:
    """One running forward (or one open backward) of a module, and the units it keeps whole."""

    module: str
    units: list[Unit]


def in_backward() -> bool:
    """Autograd is executing a graph in this thread."""
    return torch._C._current_graph_task_id() != -1


class GatherOnUse:
    """Gathers units around the modules that use them.

    owners: module name -> (module, its units); the root module "" is always there. comm: the group for gathers.
    prefetch_numel, max_live_numel: elements read ahead, and whole elements alive at once while reading ahead. fallible:
    values come from a disk, where one rank alone may fail; without gradients the ranks agree on that at every gather
    (with gradients, at the end of the step).
    """

    def __init__(
        self, owners: Mapping[str, tuple[nn.Module, list[Unit]]], comm: Collectives, *, prefetch_numel: int,
        max_live_numel: int, keep: Callable[[str], bool], fallible: bool = False,
    ) -> None:  # fmt: skip
        self._fallible = fallible
        self._comm, self._keep_module = comm, keep
        self._prefetch_numel, self._max_live_numel = prefetch_numel, max_live_numel
        self._units = [unit for _, units in owners.values() for unit in units]
        self._kept = {unit for name, (_, units) in owners.items() for unit in units if keep(name)}
        self._rest = any(unit.rest is not None for unit in self._units)
        self._root = set(owners[""][1])
        self._by_index = {unit.index: unit for unit in self._units}
        self._unit_of = {id(param): unit for unit in self._units for param in unit.params}
        self._frames: list[Frame] = []
        self._backward: list[Frame] = []
        self._traces = {True: Trace(), False: Trace()}
        self._training = False  # what the outermost running forward is part of
        self._newest: Unit | None = None  # gathered latest in this step's forward ...
        self._last_forward: Unit | None = None  # ... and last of all in the step before: backward needs it first
        self.uneven = False
        self._at = (-1, -1)
        self._handles: list[RemovableHandle] = []
        self._inside = _modules_by_owner(owners)
        self._side_outputs: WeakIdKeyDictionary = WeakIdKeyDictionary()  # tensors left in attributes, once hooked
        for name, (module, units) in owners.items():
            self._install(name, module, units)

    def _install(self, name: str, module: nn.Module, units: list[Unit]) -> None:
        modules = self._inside[name]
        enter = _not_compiled(lambda *_: self.enter(name, units))
        leave = _not_compiled(lambda _module, _inputs, output: self.leave(output, modules))
        self._handles.append(module.register_forward_pre_hook(enter, prepend=True))
        self._handles.append(module.register_forward_hook(leave, always_call=True))

    # ------------------------------------------------------------------------------------------------- forward
    def enter(self, name: str, units: Sequence[Unit]) -> None:
        frame = Frame(name, [])
        if not self._frames:
            self._training = torch.is_grad_enabled() or in_backward()
            if not self._training:
                self._traces[False].restart()
        self._frames.append(frame)
        for unit in units:
            self._join(frame, unit)

    def leave(self, output: Any, modules: Sequence[nn.Module]) -> None:
        frame = self._frames.pop()
        if torch.is_grad_enabled():
            hook = _once_each_time(lambda: self._enter_backward(frame))
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    _hook_first(tensor, hook)
            for tensor in _left_behind(modules):  # backward may start at an auxiliary loss kept there
                if tensor not in self._side_outputs:
                    self._side_outputs[tensor] = True
                    _hook_first(tensor, hook)
        for unit in frame.units:
            unit.users -= 1
            if unit.users == 0 and not self._stays(unit):
                unit.free()

    def _stays(self, unit: Unit) -> bool:
        """After its forward: is it needed again so soon that freeing it would only cost another gather?"""
        if not torch.is_grad_enabled():
            return False
        if (
            in_backward()
        ):  # recomputed inside backward: its own backward follows, or is what asked for the recomputation
            return unit.trainable or any(unit in frame.units for frame in self._backward)
        return unit in self._kept or unit in self._root or unit is self._last_forward

    def _join(self, frame: Frame, unit: Unit) -> None:
        if unit not in frame.units:
            frame.units.append(unit)
            unit.users += 1
            self.ensure(unit)

    # ------------------------------------------------------------------------------------------------ backward
    def begin_step(self, step: int, micro_step: int) -> None:
        self._at = (step, micro_step)

    def _enter_backward(self, frame: Frame) -> None:
        self._training = True
        self._close_finished(frame.module)
        self._backward.append(frame)
        for unit in frame.units:
            self.ensure(unit)

    def _close_finished(self, starting: str) -> None:
        """Free what only modules whose backward is over needed.

        That its gradients have arrived would not do as a sign: nested backwards of recomputation bring them several
        times, and a detached use of a weight needs it longer.
        """
        open_, self._backward = self._backward, []
        for frame in open_:
            if frame.module in ("", starting) or starting.startswith(frame.module + "."):
                self._backward.append(frame)
        needed = {unit for frame in self._backward for unit in frame.units}
        for frame in open_:
            for unit in frame.units:
                if unit not in needed and unit.users == 0:
                    unit.free()

    def finish_backward(self) -> None:
        self._backward.clear()
        self._traces[True].restart()
        self._last_forward = self._newest
        self.free_all()

    def free_all(self) -> None:
        """Free what no forward or context is using."""
        for unit in self._units:
            if unit.users == 0:
                unit.free()

    # ------------------------------------------------------------------------------------------------- gathers
    def ensure(self, unit: Unit) -> None:
        """The unit's parameters are whole when this returns."""
        if unit.residency is Residency.WHOLE:
            return
        if self.uneven:
            self._announce(unit.index)
        if unit.residency is Residency.SHARDED:
            unit.launch_gather(unit.tag(*self._at))
        ahead = self._traces[self._training].follow(unit.index)
        if self._training and not in_backward():
            self._newest = unit
        if not self.uneven:
            self._read_ahead(ahead)
        self._finish(unit)

    def _finish(self, unit: Unit) -> None:
        unit.finish_gather()
        outside_step = not self._training or not (self._frames or in_backward())
        if self._fallible and (self.uneven or outside_step):
            failed = torch.tensor([float(unit.failure is not None)], device=unit.flat.device)
            self._comm.all_reduce(failed, unit.tag(*self._at), ReduceOp.MAX).wait()
            if failed.item():
                unit.failure = unit.failure or TierError(
                    f"another rank could not read its part of the parameters of '{unit.name}' from its disk; see there."
                )
                raise unit.failure

    def failure(self) -> TierError | None:
        """Of the units, those of this pass: a read that failed."""
        return next((unit.failure for unit in self._units if unit.failure is not None), None)

    def _read_ahead(self, ahead: Iterator[int]) -> None:
        if self._prefetch_numel and self._rest:
            ahead = iter(list(islice(ahead, READ_AHEAD_UNITS)))
            ahead, following = tee(ahead)
            for index in following:  # begin to read what is gathered after the next ones, before waiting for those
                if self._by_index[index].residency is Residency.SHARDED:
                    self._by_index[index].prefetch()
        live = sum(u.layout.padded for u in self._units if u.residency is not Residency.SHARDED)
        budget = min(self._prefetch_numel, self._max_live_numel - live)
        for index in ahead:
            unit = self._by_index[index]
            if unit.residency is not Residency.SHARDED:
                if unit.residency is Residency.GATHERING:
                    budget -= unit.layout.padded
                continue
            budget -= unit.layout.padded
            if budget < 0:
                return
            unit.launch_gather(unit.tag(*self._at))

    def make_whole(self, params: Sequence[nn.Parameter], use: str) -> None:
        """Sharded parameters are being read: they join the running forward or backward, or this raises."""
        units = list(dict.fromkeys(self._unit_of[id(param)] for param in params))
        if self._frames:
            for unit in units:
                self._join(self._frames[-1], unit)
        elif in_backward():
            self._backward.append(Frame("", units))
            for unit in units:
                self.ensure(unit)
        else:
            name = next(f.name for f, p in zip(units[0].layout.fields, units[0].params, strict=True) if p is params[0])
            raise ShardedParameterError(
                f"`{use}` reads the values of parameter '{name}', of which this rank holds a slice only (ZeRO stage "
                "3). Use `with trilithon.zero.gathered(params):` on all ranks, or `engine.full_parameters()` / "
                "`engine.state_dict()` for whole copies."
            )

    def hold(self, unit: Unit) -> None:
        """Keep the unit whole until `let_go`."""
        unit.users += 1
        self.ensure(unit)

    def let_go(self, unit: Unit) -> None:
        unit.users -= 1
        if unit.users == 0:
            unit.free()

    # -------------------------------------------------------------------------------------------------- uneven
    def begin_uneven(self) -> None:
        self.free_all()
        self.uneven = True

    def end_uneven(self) -> None:
        """Serve the gathers of ranks that still run, until all are here."""
        try:
            while (index := self._exchange(None)) is not None:
                unit = self._by_index[index]
                unit.launch_gather(unit.tag(*self._at))
                self._finish(unit)
                if unit.users == 0:
                    unit.free()
        finally:
            self.uneven = False

    def abandon_uneven(self) -> None:
        self.uneven = False

    def _announce(self, index: int) -> None:
        self._exchange(index)

    def _exchange(self, index: int | None) -> int | None:
        """What the running ranks gather next; None when no rank runs any more."""
        wanted = self._comm.all_gather_object(index, Tag("uneven()", step=self._at[0]))
        running = {value for value in wanted if value is not None}
        if len(running) > 1:
            names = {rank: self._by_index[v].name for rank, v in enumerate(wanted) if v is not None}
            raise CollectiveError(
                f"inside uneven() the ranks run different modules: {names}. They may differ in how often they call the "
                "model, not in what it runs; make the calls alike."
            )
        return running.pop() if running else None

    def close(self, *, give_back: bool = True) -> bool:
        """Hooks go. give_back: every parameter is whole afterwards, which is collective; False if that cannot be."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        try:
            for unit in self._units if give_back else ():
                self.ensure(unit)
        except TierError as error:  # on all ranks
            logger.warning("the model does not get its parameters back: %s", error)
            return False
        return give_back


def _modules_by_owner(owners: Mapping[str, tuple[nn.Module, list[Unit]]]) -> dict[str, list[nn.Module]]:
    """Name of an owner of units -> the modules inside it that are in no owner below."""
    names = {id(module): name for name, (module, _) in owners.items()}
    found: dict[str, list[nn.Module]] = {}
    for name, (top, _) in owners.items():
        seen, waiting = {id(top): top}, [top]
        while waiting:
            children = [child for child in waiting.pop().children() if id(child) not in names]
            waiting.extend(child for child in children if id(child) not in seen)
            seen.update((id(child), child) for child in children)
        found[name] = list(seen.values())
    return found


_OWN_ATTRIBUTES = frozenset(vars(nn.Module()))


def _left_behind(modules: Sequence[nn.Module]) -> Iterator[Tensor]:
    """Results that a forward stored on its modules, alone or in a list, tuple or dict."""
    for module in modules:
        for key, value in (*vars(module).items(), *module._buffers.items()):
            if key in _OWN_ATTRIBUTES:
                continue
            several = value.values() if isinstance(value, dict) else value
            for tensor in several if isinstance(several, list | tuple | ValuesView) else (value,):
                if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                    yield tensor


def _not_compiled(hook: Callable[..., None]) -> Callable[..., None]:
    """A hook at which torch.compile breaks its graph, and inside which it compiles nothing (collectives, above all).

    As torch.compiler.disable does it, without the second that importing the compiler takes.
    """

    def uncompiled(*args: Any) -> None:
        before = set_eval_frame(None)
        try:
            hook(*args)
        finally:
            set_eval_frame(before)

    uncompiled._torchdynamo_disable = True  # type: ignore[attr-defined]
    return uncompiled


def _once_each_time(action: Callable[[], None]) -> Callable[[Tensor], None]:
    """A tensor hook (returning None leaves the gradient alone) that acts once in each backward."""
    acted_in = -1

    def hook(_grad: Tensor) -> None:
        nonlocal acted_in
        if acted_in != torch._C._current_graph_task_id():
            acted_in = torch._C._current_graph_task_id()
            action()

    return hook


def _hook_first(tensor: Tensor, hook: Callable[[Tensor], None]) -> None:
    """A module that returns what a module inside it returned is entered before that one in backward."""
    earlier = dict(tensor._backward_hooks or {})
    tensor.register_hook(hook)
    if earlier and tensor._backward_hooks is not None:
        for (
            key,
            value,
        ) in earlier.items():  # autograd calls them in order of insertion, which move_to_end does not change
            del tensor._backward_hooks[key]
            tensor._backward_hooks[key] = value


def _tensors(output: Any) -> Iterator[Tensor]:
    """The tensors in a forward's output, inside containers, dataclasses and plain objects, to any depth."""
    seen: set[int] = set()
    waiting = [output]
    while waiting:
        for leaf in pytree.tree_leaves(waiting.pop()):
            if isinstance(leaf, Tensor):
                yield leaf
            elif id(leaf) not in seen and not isinstance(leaf, type | nn.Module | ModuleType):
                seen.add(id(leaf))
                waiting.extend(_attributes(leaf))


def _attributes(value: Any) -> list[Any]:
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return list(vars(value).values()) if hasattr(value, "__dict__") and not callable(value) else []
