"""Which parameters form a unit.

Stages 0 to 2: buckets of about `bucket_numel` elements in order of construction. Stage 3: from the module tree by size,
top down, so that a transformer block becomes one unit; what is too small joins the module around it. A tile of a tiled
layer is always a unit of its own. A parameter that several modules share belongs to their lowest common ancestor.
Containers whose forward is never called own nothing.
Types, trainable or frozen parameters, and parameters of different places never mix in a unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from trilithon.zero.layout import Region
from trilithon.zero.one_unit import is_one_unit
from trilithon.zero.tiling import tiles_of


class Place(Protocol):
    """The ranks that hold a parameter; see `composite.Replicas`. Units never mix places."""

    @property
    def name(self) -> str: ...

    @property
    def world_size(self) -> int: ...


FROZEN = -1  # group index of a parameter that no optimizer changes


@dataclass(eq=False, slots=True)
class Entry:
    """One parameter of the model. dtype: what forward computes in; group: optimizer group or FROZEN."""

    name: str
    param: nn.Parameter
    group: int
    dtype: torch.dtype
    homes: tuple[str, ...]  # names of the modules that hold it
    region: Region | None = None  # where it lies in the plain model's parameter, if it is a block of one
    place: Place | None = None  # the ranks that hold it, if they are not those of the data axis

    @property
    def place_name(self) -> str:
        return self.place.name if self.place is not None else ""

    @property
    def plain_name(self) -> str:
        """What it is called in the plain model."""
        return self.name if self.region is None else self.region.name

    @property
    def plain_shape(self) -> tuple[int, ...]:
        return tuple(self.param.shape) if self.region is None else self.region.shape

    @property
    def trainable(self) -> bool:
        return self.group != FROZEN


@dataclass(eq=False, slots=True)
class UnitPlan:
    """What one unit will hold. module: whose forward gathers it at stage 3; whole: its values stay on every rank."""

    name: str
    module: str
    whole: bool
    entries: list[Entry] = field(default_factory=list)


def entries_of(model: nn.Module, group_of: Callable[[nn.Parameter], int], low: torch.dtype | None) -> Iterator[Entry]:
    """The parameters of `model`, each once. low: what those of at most 32 bits compute in; None for fp32."""
    regions = regions_of(model)
    homes: dict[int, list[str]] = {}
    for module_name, module in model.named_modules(remove_duplicate=False):
        for param in module.parameters(recurse=False):
            homes.setdefault(id(param), []).append(module_name)
    for name, param in model.named_parameters():
        dtype = param.dtype
        if dtype.is_floating_point and dtype != torch.float64:
            dtype = low or torch.float32
        group = group_of(param) if param.requires_grad and dtype.is_floating_point else FROZEN
        yield Entry(name, param, group, dtype, tuple(homes[id(param)]), regions.get(id(param)))


def regions_of(model: nn.Module) -> dict[int, Region]:
    """By id of a tile's parameter: where it lies in the parameter of the plain layer."""
    found = {}
    for name, layer, _, tile in tiles_of(model):
        prefix = f"{name}." if name else ""
        row, row_stop, column, column_stop = tile.place
        shape, block = (layer.out_features, layer.in_features), (row_stop - row, column_stop - column)
        found[id(tile.weight)] = Region(f"{prefix}weight", shape, (row, column), block)
        if tile.bias is not None:
            found[id(tile.bias)] = Region(f"{prefix}bias", shape[:1], (row,), block[:1])
    return found


def automatic_bucket_numel(total: int) -> int:
    """About sixteen buckets, between 1 and 64 Mi elements: enough to overlap, few enough to keep messages long."""
    return min(max(total // 16, 2**20), 2**26)


def buckets(entries: Sequence[Entry], bucket_numel: int, *, name: str = "bucket") -> list[UnitPlan]:
    """Consecutive parameters of one kind until a bucket is full; a larger parameter stands alone."""
    plans: list[UnitPlan] = []
    open_: dict[tuple[torch.dtype, bool, str], tuple[UnitPlan, int]] = {}
    for entry in entries:
        kind = (entry.dtype, entry.trainable, entry.place_name)
        plan, filled = open_.get(kind, (None, 0))
        if plan is None or (filled and filled + entry.param.numel() > bucket_numel):
            plan, filled = UnitPlan(f"{name}.{len(plans)}", "", True), 0
            plans.append(plan)
        plan.entries.append(entry)
        open_[kind] = (plan, filled + entry.param.numel())
    return plans


def by_module(
    model: nn.Module, entries: Sequence[Entry], *, bucket_numel: int | None, unit_classes: Sequence[str],
    persist_below_numel: int, persist_total_numel: int | None,
) -> list[UnitPlan]:  # fmt: skip
    """The units of stage 3, those of the root first, then in order of construction; persistent ones last."""
    persistent = _persistent(entries, persist_below_numel, persist_total_numel)
    tree = _Tree(model, [entry for entry in entries if entry not in persistent], bucket_numel, set(unit_classes))
    plans: dict[tuple[str, torch.dtype, bool, str], UnitPlan] = {}
    for entry in sorted((e for e in entries if e not in persistent), key=lambda e: tree.order[tree.unit_of(e)]):
        module = tree.unit_of(entry)
        kind = (module, entry.dtype, entry.trainable, entry.place_name)
        if kind not in plans:
            suffix = "" if entry.trainable else ":frozen"
            suffix += f":{entry.place_name}" if entry.place_name else ""
            name = (module or "(root)") + suffix
            if any(plan.name == name for plan in plans.values()):  # of another type; names are keys of state
                name += f":{str(entry.dtype).removeprefix('torch.')}"
            plans[kind] = UnitPlan(name, module, False)
        plans[kind].entries.append(entry)
    kept = buckets([e for e in entries if e in persistent], bucket_numel or 2**22, name="persistent")
    return [*plans.values(), *kept]


def _persistent(entries: Sequence[Entry], below: int, total: int | None) -> set[Entry]:
    chosen, used = set(), 0
    for entry in entries:
        if entry.param.numel() < below and (total is None or used + entry.param.numel() <= total):
            chosen.add(entry)
            used += entry.param.numel()
    return chosen


class _Tree:
    """The module tree with sizes, and the modules chosen to own units."""

    def __init__(
        self, model: nn.Module, entries: Sequence[Entry], bucket_numel: int | None, unit_classes: set[str]
    ) -> None:
        self.modules = dict(model.named_modules())
        self.order = {name: index for index, name in enumerate(self.modules)}
        self._homes = {id(entry): common_ancestor(entry.homes) for entry in entries}
        self._numel = dict.fromkeys(self.modules, 0)
        tiles = {self._homes[id(entry)] for entry in entries if entry.region is not None}  # a unit each, of any size
        for entry in (entry for entry in entries if entry.region is None):
            for name in _ancestors(self._homes[id(entry)]):
                self._numel[name] += entry.param.numel()
        total = self._numel[""]
        automatic = min(max(total // 64, 2**16), 2**22)
        self._least = min(bucket_numel, automatic) if bucket_numel else automatic
        self._most = max(total // 8, self._least)
        self._classes = unit_classes
        self._chosen = {"", *tiles}
        self._visit("", in_list=False)

    def unit_of(self, entry: Entry) -> str:
        return next(name for name in _ancestors(self._homes[id(entry)]) if name in self._chosen)

    def _visit(self, name: str, *, in_list: bool) -> None:
        module, numel = self.modules[name], self._numel[name]
        if numel == 0 or (is_compiled(module) and name == ""):
            return
        callable_ = has_forward(module) and not is_traced_from_outside(module)
        if name and callable_:
            named = type(module).__name__ in self._classes or is_one_unit(module)
            if named or (numel >= self._least and (numel <= self._most or in_list or is_compiled(module))):
                self._chosen.add(name)
                return
        if is_traced_from_outside(module) and name:
            return
        before = len(self._chosen)
        prefix = f"{name}." if name else ""
        for child, _ in module.named_children():
            if prefix + child in self.modules:
                self._visit(prefix + child, in_list=isinstance(module, nn.ModuleList | nn.ModuleDict))
        direct = numel - sum(self._numel[n] for n in self._chosen if n.startswith(prefix) and n)
        if name and callable_ and (direct >= self._least or (len(self._chosen) > before and direct > 0)):
            self._chosen.add(name)


def has_forward(module: nn.Module) -> bool:
    """A container such as ModuleList or ParameterDict has none, so its hooks would never run."""
    return type(module).forward is not nn.Module.forward


def is_compiled(module: nn.Module) -> bool:
    """The wrapper that torch.compile(module) returns: its insides run inside one graph, hooks on it do not."""
    return hasattr(module, "_orig_mod")


def is_traced_from_outside(module: nn.Module) -> bool:
    """After `module.compile()` hooks on the module run inside its graph; the module around it owns its parameters."""
    return getattr(module, "_compiled_call_impl", None) is not None


def common_ancestor(names: Sequence[str]) -> str:
    """The lowest module that contains all of `names`."""
    paths = [name.split(".") if name else [] for name in names]
    shared = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) != 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


def _ancestors(name: str) -> list[str]:
    """The module itself first, the root last."""
    parts = name.split(".") if name else []
    return [".".join(parts[:n]) for n in range(len(parts), 0, -1)] + [""]
