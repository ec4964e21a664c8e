"""What stands in each file of DeepSpeed's layout: dictionaries with DeepSpeed's keys, for one rank at a time.

Stages 1 and 2: each group's parameters one after the other, padded to a multiple of twice the number of ranks, cut
evenly. Stage 3: each parameter cut into ceil(n / ranks) elements a rank, a rank's shares one after the other by
sub-group. (ZeRO: Rajbhandari et al. 2020, arXiv:1910.02054, section 5; the layout is that of DeepSpeed 0.19.8.)
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trilithon.checkpoint.deepspeed_pickle import FragmentAddress, Stage
from trilithon.checkpoint.deepspeed_source import Group, Source
from trilithon.checkpoint.deepspeed_write import LAYOUT_RELEASE, loss_scaler

Shapes = OrderedDict[str, torch.Size]


def sub_groups(source: Source, stage: int, ranks: int, limit: int) -> list[tuple[int, Shapes]]:
    """(parameter group, shapes) in the order of the flat tensors. Stage 3 begins another one once a rank's shares have
    reached `limit` elements; stages 1 and 2 have one for each group."""
    found: list[tuple[int, Shapes]] = []
    for index, group in enumerate(source.groups):
        shapes: Shapes = OrderedDict()
        for name, shape in group.shapes.items():
            shapes[name] = shape
            if stage == 3 and sum(-(-math.prod(shape) // ranks) for shape in shapes.values()) >= limit:
                found.append((index, shapes))
                shapes = OrderedDict()
        if shapes or (stage < 3 and not group.shapes):
            found.append((index, shapes))
    return found


def model_states(source: Source, stage: int, rank: int, ranks: int, cut: list[tuple[int, Shapes]]) -> dict[str, Any]:
    """The file of one rank at stage 3, and the only one below it."""
    counters = source.counters
    frozen = OrderedDict((one.name, torch.Size(one.shape)) for one in source.reader.entries("frozen"))
    shared = {alias: name for alias, name in source.aliases.items() if source.reader.find("buffer", name) is None}
    scheduler = (source.schedule or {}).get("scheduler")
    if scheduler is None and source.schedule is not None:
        scheduler = {"last_batch_iteration": int(source.schedule["updates"]) - 1}
    return {
        "module": _module(source, placeholders=stage == 3),
        "buffer_names": [one.name for one in source.reader.entries("buffer")],
        "optimizer": None,
        "param_shapes": [shapes for _, shapes in cut],
        "frozen_param_shapes": frozen if frozen and stage >= 2 else None,
        "shared_params": shared if rank == 0 else {},
        "frozen_param_fragments": _frozen(source, stage, rank, ranks) if frozen and stage >= 2 else None,
        "lr_scheduler": scheduler,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": int(counters["skipped_steps"]),
        "global_steps": int(counters["steps"]) + int(counters["skipped_steps"]),
        "global_samples": int(counters["global_samples"]),
        "dp_world_size": ranks,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": source.ds_config(stage),
        "ds_version": LAYOUT_RELEASE,
        **(source.own.get("client_state") or {}),
    }


def _module(source: Source, *, placeholders: bool) -> OrderedDict[str, Tensor]:
    found: OrderedDict[str, Tensor] = OrderedDict()
    for name, entry in source.weights():
        empty = placeholders and entry.part != "buffer"
        found[name] = torch.empty(0, dtype=entry.torch_dtype) if empty else source.read(entry)
    for alias, name in source.aliases.items():
        found[alias] = found[name]  # one tensor under two names, as when they are tied
    return found


def _frozen(source: Source, stage: int, rank: int, ranks: int) -> OrderedDict[str, Tensor]:
    found: OrderedDict[str, Tensor] = OrderedDict()
    for entry in source.reader.entries("frozen"):
        whole = source.read(entry)
        found[entry.name] = share_of(whole, rank, ranks) if stage == 3 else whole
    return found


def share_of(whole: Tensor, rank: int, ranks: int) -> Tensor:
    """This rank's ceil(n / ranks) elements, the last ones zero where the tensor has ended."""
    share = -(-whole.numel() // ranks)
    mine = whole.new_zeros(share)
    part = whole.reshape(-1)[rank * share : (rank + 1) * share]
    mine[: part.numel()] = part
    return mine


def optimizer_states(
    source: Source, stage: int, rank: int, ranks: int, cut: list[tuple[int, Shapes]]
) -> dict[str, Any]:
    """The file with one rank's part of the fp32 values and of the optimizer's state."""
    inside = _sharded(source, rank, ranks, cut) if stage == 3 else _flat(source, stage, rank, ranks)
    return {"optimizer_state_dict": inside, "ds_config": source.ds_config(stage), "ds_version": LAYOUT_RELEASE}


def _state(source: Source, fields: Mapping[str, Tensor]) -> dict[str, Any]:
    return {"step": torch.tensor(float(source.updates)), **fields}


def _scaling(source: Source) -> dict[str, Any]:
    scaler = loss_scaler(source.scaler, source.scale_rule)
    return {"loss_scaler": scaler, "dynamic_loss_scale": source.scaler.get("kind") == "dynamic", "overflow": False}


def part_numel(group: Group, ranks: int) -> int:
    """Elements of one rank's part of a group at stages 1 and 2, padding included."""
    unit = 2 * ranks
    return -(-group.numel // unit) * unit // ranks


def _flat(source: Source, stage: int, rank: int, ranks: int) -> dict[str, Any]:
    masters, state, paddings, mappings = [], {}, [], []
    for index, group in enumerate(source.groups):
        size = part_numel(group, ranks)
        start = rank * size
        there = min(max(group.numel - start, 0), size)  # without padding
        masters.append(source.values("master", group.shapes, start, start + there))
        state[index] = _state(source, {f: source.values(f, group.shapes, start, start + size) for f in source.fields})
        paddings.append(size - there)
        mappings.append(_addresses(group.shapes, start, there))
    groups = [{**source.settings(group), "params": [index]} for index, group in enumerate(source.groups)]
    return {  # without "clip_grad": its value would replace that of the configuration which DeepSpeed loads this with
        **_scaling(source),
        "base_optimizer_state": {"state": state, "param_groups": groups},
        "single_partition_of_fp32_groups": masters,
        "zero_stage": Stage(stage),
        "group_paddings": paddings,
        "param_alignment_paddings": [[0] * len(group.shapes) for group in source.groups],
        "partition_count": [ranks] * len(source.groups),
        "ds_version": LAYOUT_RELEASE,
        "param_slice_mappings": mappings,
    }


def _addresses(shapes: Mapping[str, torch.Size], start: int, numel: int) -> OrderedDict[str, FragmentAddress]:
    """Where each parameter lies inside of elements [start, start + numel)."""
    found: OrderedDict[str, FragmentAddress] = OrderedDict()
    at = 0
    for name, shape in shapes.items():
        low, high = max(start, at), min(start + numel, at + math.prod(shape))
        if low < high:
            address = FragmentAddress()
            address.numel, address.start = high - low, low - start
            found[name] = address
        at += math.prod(shape)
    return found


def _sharded(source: Source, rank: int, ranks: int, cut: list[tuple[int, Shapes]]) -> dict[str, Any]:
    def shares(part: str, shapes: Shapes) -> Tensor:
        found = []
        for name, shape in shapes.items():
            share = -(-math.prod(shape) // ranks)
            found.append(source.values(part, OrderedDict({name: shape}), rank * share, (rank + 1) * share))
        return torch.cat(found) if found else torch.zeros(0)

    members: list[list[int]] = [[] for _ in source.groups]
    for index, (group, _) in enumerate(cut):
        members[group].append(index)
    state = {i: _state(source, {f: shares(f, shapes) for f in source.fields}) for i, (_, shapes) in enumerate(cut)}
    groups = [{**source.settings(group), "params": own} for group, own in zip(source.groups, members)]
    return {
        "zero_stage": Stage(3),
        **_scaling(source),
        "partition_count": ranks,
        "optimizer_state_dict": {"state": state, "param_groups": groups},
        "fp32_flat_groups": [shares("master", shapes) for _, shapes in cut],
    }
