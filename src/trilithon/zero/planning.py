"""From a model and its settings to units: which parameters each holds, how they lie, and what they need elsewhere."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from trilithon.config import ZeroConfig
from trilithon.contracts import Collectives, Tag
from trilithon.zero import grouping
from trilithon.zero.grouping import Entry, UnitPlan
from trilithon.zero.layout import FlatLayout
from trilithon.zero.residency import GatherOnUse
from trilithon.zero.resting import UnitSize
from trilithon.zero.unit import Unit


def plans(
    model: nn.Module, entries: Sequence[Entry], stage: int, settings: ZeroConfig, alone: Callable[[Entry], bool]
) -> list[UnitPlan]:
    """Buckets at stages 0 to 2, units of the module tree at stage 3. alone: no other rank holds a parameter, so that
    nothing is left to cut."""
    if stage < 3:
        trainable = [entry for entry in entries if entry.trainable]
        total = sum(entry.param.numel() for entry in trainable)
        return grouping.buckets(trainable, settings.bucket_numel or grouping.automatic_bucket_numel(total))
    here = [entry for entry in entries if alone(entry) and entry.trainable]
    few = grouping.automatic_bucket_numel(sum(entry.param.numel() for entry in here))
    return grouping.buckets(here, settings.bucket_numel or few, name="here") + grouping.by_module(
        model,
        [entry for entry in entries if not alone(entry)],
        bucket_numel=settings.bucket_numel,
        unit_classes=settings.unit_classes,
        persist_below_numel=settings.persist_below_numel,
        persist_total_numel=settings.persist_total_numel,
    )


def layout_of(plan: UnitPlan, world_size: int) -> FlatLayout:
    """Puts the entries of the plan in the order of the layout as well."""
    plan.entries.sort(key=lambda entry: entry.group)
    regions = {e.name: e.region for e in plan.entries if e.region is not None}
    return FlatLayout.of([(e.name, tuple(e.param.shape), e.group) for e in plan.entries], world_size, regions)


def size_of(plan: UnitPlan, layout: FlatLayout, accumulate: torch.dtype | None) -> UnitSize:
    """accumulate: in what gradients are added; None follows the parameters."""
    first = plan.entries[0]
    gradient = (accumulate or first.dtype).itemsize if first.trainable else 0
    return UnitSize(layout.shard_numel, first.dtype.itemsize, gradient)


def prefetch_numel(units: Sequence[Unit], settings: ZeroConfig) -> int:
    """Elements gathered ahead: as told, or as many as the largest unit has."""
    if not settings.overlap:
        return 0
    if settings.prefetch_numel is not None:
        return settings.prefetch_numel
    return max((unit.layout.padded for unit in units if not unit.whole_values), default=0)


def gather_on_use(
    model: nn.Module, names: Mapping[Unit, str], settings: ZeroConfig, comm: Collectives, *, fallible: bool
) -> GatherOnUse:
    """names: of the module of each unit, in order. fallible: values rest where reading can fail."""
    modules = dict(model.named_modules())
    owners: dict[str, tuple[nn.Module, list[Unit]]] = {"": (model, [])}
    for unit, name in names.items():
        if not unit.whole_values:
            owners.setdefault(name, (modules[name], []))[1].append(unit)
    patterns = settings.keep_gathered
    return GatherOnUse(
        owners,
        comm,
        prefetch_numel=prefetch_numel(list(names), settings),
        max_live_numel=settings.max_live_numel,
        fallible=fallible,
        keep=lambda name: (
            not settings.reshard_after_forward or any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
        ),
    )


def every_name(names: Sequence[str], control: Collectives) -> list[str]:
    """Collective: the names that any rank has, those of the first ranks first."""
    told = control.all_gather_object(list(names), Tag("names of parameters"))
    return list(dict.fromkeys(name for theirs in told for name in theirs))
