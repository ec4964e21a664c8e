"""The tensors of a DeepSpeed checkpoint by part and name, at every stage and in the universal layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trilithon.checkpoint.deepspeed_experts import expert_weights, native_name, pools, stacked
from trilithon.checkpoint.deepspeed_layout import Inventory
from trilithon.checkpoint.deepspeed_pickle import load_file
from trilithon.checkpoint.deepspeed_pieces import (
    Assembly,
    Piece,
    Place,
    Shapes,
    assemble,
    flat_places,
    sharded_places,
    whole,
)
from trilithon.checkpoint.deepspeed_pipeline import buffers_of, load_layers, module_of, renamed, tied_places
from trilithon.errors import CheckpointError

Name = tuple[str, str]  # part, name

_PORTION = 2**20  # elements compared at a time


@dataclass
class Found:
    """What the files hold. raw: the first model file and the first optimizer file, as they are."""

    tensors: dict[Name, Assembly] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    groups: list[list[str]] = field(default_factory=list)  # parameter names of each optimizer group
    stage: int = 0
    ranks: int = 1
    updates: int | None = None  # of the optimizer, from its own count
    model: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)


def find_tensors(inventory: Inventory) -> Found:
    """Open every file (tensors stay on the disk) and say where each parameter lies.

    Raises CheckpointError for files that are damaged, missing, or do not add up.
    """
    models = [load_file(path) for path in inventory.model]
    first: Mapping[str, Any] = models[0] if models else {}
    found = Found(model=first, config=first.get("ds_config") or {}, ranks=int(first.get("dp_world_size") or 1))
    others = [load_file(path) for path in inventory.other_models]
    if inventory.layers:
        return _pipeline(found, inventory, [models[0], *others])
    shapes = _shapes([*models[:1], *others])
    if inventory.atoms is not None:
        _universal(found, inventory.atoms, shapes, cut=bool(others))
    elif inventory.optimizer:
        _zero(found, inventory.optimizer, shapes)
    elif len(inventory.model) > 1 or _stage_of(found.config) == 3:
        raise CheckpointError(
            f"{inventory.path} is of stage 3, where the weights are in the optim_states files, and holds none of them. "
            "Copy the whole folder that DeepSpeed wrote."
        )
    experts = expert_weights([load_file(path) for path in inventory.experts])
    if experts:
        found.model = {**found.model, "module": {**(found.model.get("module") or {}), **experts}}
    _whole_weights(found, models, shapes)
    if experts:
        _under_our_names(found)
    return found


def _under_our_names(found: Found) -> None:
    """Experts stacked, and named as here."""
    found.tensors = stacked(found.tensors)
    found.groups = [list(dict.fromkeys(native_name(name) for name in group)) for group in found.groups]
    found.aliases = {native_name(alias): native_name(name) for alias, name in found.aliases.items()}
    module = found.model["module"]
    found.model = {**found.model, "module": {native_name(name): value for name, value in module.items()}}


def _pipeline(found: Found, inventory: Inventory, models: Sequence[Mapping[str, Any]]) -> Found:
    """Stage by stage; a tied layer, of which each stage has a copy, is taken from the first."""
    layers = load_layers(inventory.layers)
    of_stages = [_shapes([model]) for model in models]
    places = tied_places(
        layers, {name: shape for groups in of_stages for group in groups for name, shape in group.items()}
    )
    every: list[dict[str, torch.Size]] = []
    for groups, files in zip(of_stages, (inventory.optimizer, *inventory.other_optimizers)):
        own = [{renamed(name, places): shape for name, shape in group.items()} for group in groups]
        before = dict(found.tensors)
        if files:
            _zero(found, files, own)
        found.tensors |= before
        for index, group in enumerate(own):
            if index == len(every):
                every.append({})
            every[index] |= group
    found.groups = [list(group) for group in every] if inventory.optimizer else []
    found.ranks *= len(models)
    whole_model = {"module": module_of(layers), "buffer_names": buffers_of(models), "shared_params": {}}
    found.model = {**models[0], **whole_model}
    _whole_weights(found, [found.model], every)
    return found


def _stage_of(config: Mapping[str, Any]) -> int:
    return int((config.get("zero_optimization") or {}).get("stage") or 0)


def _shapes(models: Sequence[Mapping[str, Any]]) -> list[dict[str, torch.Size]]:
    """The shapes of each group, joined over the model files of pipeline stages."""
    joined: list[dict[str, torch.Size]] = []
    for model in models:
        groups = model.get("param_shapes") or []
        for index, group in enumerate([groups] if isinstance(groups, Mapping) else groups):
            if index == len(joined):
                joined.append({})
            joined[index] |= group
    return joined


def _zero(found: Found, files: Sequence[Path], shapes: list[dict[str, torch.Size]]) -> None:
    states = [load_file(path)["optimizer_state_dict"] for path in files]
    found.optimizer = states[0]
    found.config = found.config or {}
    found.groups = [list(group) for group in shapes]
    if len(states) != found.ranks:
        raise CheckpointError(
            f"{files[0].parent} was written by {found.ranks} data-parallel ranks, and {len(states)} of their "
            "optim_states files are here. Copy the files of all ranks: each holds a part of every parameter."
        )
    if "fp32_flat_groups" in states[0]:
        found.stage = 3
        _sharded(found, states, shapes)
    elif "single_partition_of_fp32_groups" in states[0]:
        found.stage = int(states[0].get("zero_stage", 1))
        _flat(found, states, shapes)
    else:
        raise CheckpointError(
            f"{files[0]} holds {', '.join(states[0])}; neither the flat groups of stages 1 and 2 nor "
            "those of stage 3 are among them. Convert the checkpoint with DeepSpeed's ds_to_universal and load that."
        )


def _flat(found: Found, states: Sequence[Mapping[str, Any]], groups: Sequence[Shapes]) -> None:
    """Stages 1 and 2, and the bf16 optimizer."""
    data_first = found.config.get("use_data_before_expert_parallelism") is True
    for index, group in enumerate(groups):
        for members, shapes in pools(group, index, states, data_first=data_first):
            masters = [states[rank]["single_partition_of_fp32_groups"][place] for rank, place in members]
            first, at = members[0]
            gaps = (states[first].get("param_alignment_paddings") or [()] * len(groups))[at]
            places = flat_places(shapes, [len(master) for master in masters], gaps)
            _add(found, shapes, "master", places, masters)
            own = [_group_state(states[rank]["base_optimizer_state"], place) for rank, place in members]
            for name in _fields(own[0], masters[0]):
                _add(found, shapes, name, places, [state[name] for state in own])
            _count_updates(found, own[0])
    if found.updates is None and "base_optimizer_state_step" in states[0]:  # of elastic checkpoints
        found.updates = int(states[0]["base_optimizer_state_step"])
    _count_by_group(found, states[0]["base_optimizer_state"])


def _group_state(base: Any, index: int) -> Mapping[str, Any]:
    """The optimizer's state of one flat group; a list of them in what elastic checkpoints were."""
    return dict(base[index] if isinstance(base, Sequence) else base["state"].get(index, {}))


def _sharded(found: Found, states: Sequence[Mapping[str, Any]], groups: Sequence[Shapes]) -> None:
    """Stage 3."""
    count = states[0].get("partition_count")
    if isinstance(count, int) and count != len(states):
        raise CheckpointError(
            f"the parameters were cut into {count} parts over {len(states)} ranks, which hold copies of them (MiCS). "
            "This layout is not read; convert it with DeepSpeed's ds_to_universal."
        )
    joined = {name: shape for group in groups for name, shape in group.items()}
    parts: dict[str, list[tuple[list[Place], Tensor]]] = {}
    for rank, state in enumerate(states):
        flat = state["fp32_flat_groups"]
        inner = state["optimizer_state_dict"]["state"]
        places = sharded_places(groups, [len(part) for part in flat], rank, len(states))
        for index, (here, master) in enumerate(zip(places, flat)):
            own = inner.get(index, {})
            parts.setdefault("master", []).append((here, master))
            for name in _fields(own, master):
                parts.setdefault(name, []).append((here, own[name]))
            if rank == 0:
                _count_updates(found, own)
    _count_by_group(found, states[0]["optimizer_state_dict"])
    for part, pieces in parts.items():
        assembled = assemble(joined, pieces, part)
        found.tensors |= {(part, name): assembly for name, assembly in assembled.items()}


def _fields(state: Mapping[str, Any], like: Tensor) -> list[str]:
    """The names of the per-element tensors; what is left of their padding may differ from the masters'."""
    return [name for name, value in state.items() if isinstance(value, Tensor) and value.ndim == like.ndim == 1]


def _count_updates(found: Found, state: Mapping[str, Any]) -> None:
    if "step" in state:
        found.updates = max(found.updates or 0, int(state["step"]))


def _count_by_group(found: Found, inner: Any) -> None:
    """Where the optimizer counts in its groups and not in its state."""
    for group in inner.get("param_groups", ()) if isinstance(inner, Mapping) and found.updates is None else ():
        _count_updates(found, group)


def _add(found: Found, shapes: Shapes, part: str, places: Sequence[Sequence[Place]], tensors: Sequence[Tensor]) -> None:
    assembled = assemble(shapes, list(zip(places, tensors)), part)
    found.tensors |= {(part, name): assembly for name, assembly in assembled.items()}


def _universal(found: Found, atoms: Path, groups: Sequence[Shapes], *, cut: bool) -> None:
    """One folder for each parameter, one file for each of its states. cut: the model files are tensor parallel."""
    shapes = {name: shape for group in groups for name, shape in group.items()}
    found.groups = [list(group) for group in groups]
    common = atoms / "optimizer_state.pt"
    found.optimizer = load_file(common) if common.exists() else {}
    found.stage = int(found.optimizer.get("zero_stage", _stage_of(found.config)))
    for folder in sorted(path for path in atoms.iterdir() if path.is_dir()):
        name = folder.name
        files = {path.stem: path for path in sorted(folder.glob("*.pt"))}
        trained = name in shapes if shapes else set(files) - {"fp32"}
        if not trained and cut and "fp32" in files:  # whole here, and cut in the model files
            found.tensors["frozen", name] = _atom(files["fp32"], None)
        if not trained or "fp32" not in files:
            continue  # buffers, frozen and tied parameters, which the model file holds in their own types
        if "step" in files:
            found.updates = max(found.updates or 0, int(_bare(load_file(files["step"]), files["step"])))
        for stem, path in files.items():
            if stem != "step":
                part = "master" if stem == "fp32" else stem
                found.tensors[part, name] = _atom(path, shapes.get(name))
    missing = sorted(set(shapes) - {name for part, name in found.tensors if part == "master"})
    if missing:
        raise CheckpointError(
            f"{atoms} holds no '{missing[0]}' (and {len(missing) - 1} more), which the model has. The conversion did "
            "not end, or the folder was copied in part."
        )
    inner = found.optimizer.get("optimizer_state_dict", {}).get("state", {})
    for state in inner.values() if found.updates is None else ():
        _count_updates(found, state)
    _count_by_group(found, found.optimizer)


def _atom(path: Path, shape: torch.Size | None) -> Assembly:
    """A whole parameter; flat and padded when it comes from stage 3, where the shape is the model's."""
    value = load_file(path)
    tensor = _bare(value, path)
    if isinstance(value, Mapping) and value.get("is_expert_param"):
        raise CheckpointError(f"{path} holds experts of DeepSpeed, which are not read in this version.")
    own = not isinstance(value, Mapping) and shape is not None
    assembly = whole(tensor, shape if own else None)
    if assembly.numel > tensor.numel():
        raise CheckpointError(f"{path} has {tensor.numel()} elements, and the parameter {assembly.numel}.")
    # opened again for each read, so that thousands of files are not open at once
    return Assembly(
        assembly.shape,
        tensor.dtype,
        [Piece(0, assembly.numel, lambda: _bare(load_file(path), path).reshape(-1), 0)],
    )


def _bare(value: Any, path: Path) -> Tensor:
    tensor = value.get("param") if isinstance(value, Mapping) else value
    if isinstance(tensor, int | float):
        return torch.tensor(tensor)
    if not isinstance(tensor, Tensor):
        raise CheckpointError(f"{path} holds no tensor.")
    return tensor.detach()


def _whole_weights(found: Found, models: Sequence[Mapping[str, Any]], groups: Sequence[Shapes]) -> None:
    """What the model files hold themselves: buffers, frozen parameters, tied names, and all weights without ZeRO."""
    trained = {name: shape for group in groups for name, shape in group.items()}
    first = found.model
    module: Mapping[str, Tensor] = first.get("module") or {}
    buffers = set(first.get("buffer_names") or ())
    found.aliases = _aliases(module, first.get("shared_params") or {}, buffers)
    for name in [*found.aliases, *buffers]:
        found.tensors.pop(("frozen", name), None)
    frozen = _frozen_fragments(models)
    found.tensors |= {("frozen", name): assembly for name, assembly in frozen.items()}
    for name, tensor in module.items():
        if name in found.aliases or not isinstance(tensor, Tensor):
            continue
        if name in buffers:
            found.tensors["buffer", name] = whole(tensor)
        elif ("master", name) in found.tensors:
            _note_type(found, name, tensor.dtype)
        elif name in trained or (not trained and not found.groups):
            found.tensors["master", name] = whole(tensor)  # weights alone, in the type in which they are
        elif ("frozen", name) not in found.tensors and tensor.numel():
            found.tensors["frozen", name] = whole(tensor)
    for part, name in [key for key in found.tensors if key[0] == "master"]:
        if ("param", name) not in found.tensors:
            _note_type(found, name, found.tensors[part, name].dtype)


def _note_type(found: Found, name: str, dtype: torch.dtype) -> None:
    """The trained weights in the type that the forward pass read: those of the masters, rounded."""
    master = found.tensors["master", name]
    found.tensors["param", name] = Assembly(master.shape, dtype, master.pieces)


def _aliases(module: Mapping[str, Tensor], shared: Mapping[str, str], buffers: set[str]) -> dict[str, str]:
    """Second names of tied parameters: those that DeepSpeed noted, else those that share memory in the file."""
    if shared:
        return {alias: name for alias, name in shared.items() if alias != name}
    found: dict[str, str] = {}
    seen: dict[tuple[int, torch.Size, tuple[int, ...]], str] = {}
    for name, tensor in module.items():
        if not isinstance(tensor, Tensor) or not tensor.numel() or name in buffers:
            continue
        key = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if seen.setdefault(key, name) != name:
            found[name] = seen[key]
    return found


def _frozen_fragments(models: Sequence[Mapping[str, Any]]) -> dict[str, Assembly]:
    """Frozen parameters of stage 3, cut over the ranks like all others."""
    shapes: Shapes = models[0].get("frozen_param_shapes") or {} if models else {}
    fragments = [model.get("frozen_param_fragments") or {} for model in models]
    found: dict[str, Assembly] = {}
    for name, shape in shapes.items():
        parts = [one[name] for one in fragments if name in one]
        if not parts:
            continue
        numel, share = torch.Size(shape).numel(), parts[0].numel()
        places = [max(0, min(share, numel - rank * share)) for rank in range(len(parts))]
        pieces = [([Place(name, 0, count)], part) for count, part in zip(places, parts)]
        found |= assemble({name: shape}, pieces, "frozen values")
    return found


def disagreements(found: Found) -> list[str]:
    """Trained parameters whose low-precision weights in the model file are not their fp32 values, rounded.

    At stages 0 to 2 the model file holds every weight a second time, so that this tells whether the parts of the fp32
    values were put together in the right order.
    """
    module: Mapping[str, Tensor] = found.model.get("module") or {}
    wrong = []
    for name in [name for part, name in found.tensors if part == "master"]:
        weight, assembly = module.get(name), found.tensors["master", name]
        if not isinstance(weight, Tensor) or weight.numel() != assembly.numel or not weight.numel():
            continue
        flat = weight.detach().reshape(-1)
        for start in range(0, assembly.numel, _PORTION):
            values = torch.empty(min(_PORTION, assembly.numel - start), dtype=weight.dtype)
            assembly.copy(start, values)
            if not torch.equal(values, flat[start : start + values.numel()]):
                wrong.append(name)
                break
    return wrong
