"""Experts in DeepSpeed's files, and the names and stacks that they become here.

    layer_L_expert_E_mp_rank_00_model_states.pt     weights of expert E (counted over all ranks) of layer L
    *_optim_states.pt, groups with experts          each rank's own experts, counted from 0 on that rank

DeepSpeed calls expert e of a layer `X.deepspeed_moe.experts.deepspeed_experts.e.up.weight`; here all experts of a layer
are one parameter `X.experts.up.weight`, stacked. With P ranks that hold the same experts, a group of experts is cut
over those P, and dense groups over all ranks. (Rajbhandari et al. 2022, arXiv:2201.05596; files of release 0.19.8.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trilithon.checkpoint.deepspeed_pieces import Assembly, Shapes
from trilithon.errors import CheckpointError

_EXPERT = re.compile(r"^((?:.*\.)?)deepspeed_moe\.experts\.deepspeed_experts\.(\d+)\.(.+)$")
_GATE = re.compile(r"^((?:.*\.)?)deepspeed_moe\.gate\.wg\.")


def is_expert(name: str) -> bool:
    return _EXPERT.match(name) is not None


def native_name(name: str) -> str:
    """What a parameter of DeepSpeed's layer is called in ours; other names as they are."""
    match = _EXPERT.match(name)
    return f"{match[1]}experts.{match[3]}" if match else _GATE.sub(r"\1gate.", name)


def expert_weights(files: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """The tensors of all expert files, under DeepSpeed's names with experts counted over all ranks."""
    return {name: tensor for content in files for name, tensor in content.items() if isinstance(tensor, Tensor)}


Member = tuple[int, int]  # a rank, and the place of a parameter group in its file


def pools(
    shapes: Shapes, index: int, states: Sequence[Mapping[str, Any]], *, data_first: bool
) -> Iterator[tuple[list[Member], Shapes]]:
    """Who shares the flat tensor of what is group `index` on rank 0: members in order, and shapes under names that hold
    for all ranks.

    data_first: ranks that hold the same experts are neighbours (use_data_before_expert_parallelism). Groups are known
    by their names: DeepSpeed lists groups of several degrees in an order that may differ from rank to rank.
    """
    ranks = len(states)
    if not any(is_expert(name) for name in shapes):
        yield [(rank, index) for rank in range(ranks)], shapes
        return
    name = _group_names(states[0])[index]
    places = [_group_names(state).index(name) if name in _group_names(state) else -1 for state in states]
    counts = {int(state["partition_count"][place]) for state, place in zip(states, places) if place >= 0}
    same = counts.pop() if len(counts) == 1 and -1 not in places else 0
    if same < 1 or ranks % same:
        raise CheckpointError(
            f"the group {name!r} with experts is not on all ranks, or not cut into as many parts on each, so that it "
            "does not follow which ranks hold the same experts. The files do not belong together."
        )
    degree = ranks // same
    for part in range(degree):
        members = [part * same + i for i in range(same)] if data_first else list(range(part, ranks, degree))
        yield [(rank, places[rank]) for rank in members], _counted(shapes, part)


def _group_names(state: Mapping[str, Any]) -> list[Any]:
    """The name of each group, or its place where it has none."""
    base = state["base_optimizer_state"]
    groups = base.get("param_groups", ()) if isinstance(base, Mapping) else ()
    names = [group.get("name", place) for place, group in enumerate(groups)]
    return names or list(range(len(state["single_partition_of_fp32_groups"])))


def _counted(shapes: Shapes, part: int) -> dict[str, torch.Size]:
    """One rank's names of its experts -> their numbers among all, for the ranks of expert-parallel rank `part`."""
    here: dict[str, int] = {}
    for name in shapes:
        if match := _EXPERT.match(name):
            here[match[1]] = max(here.get(match[1], 0), int(match[2]) + 1)
    found = {}
    for name, shape in shapes.items():
        match = _EXPERT.match(name)
        assert match is not None, "groups hold experts or dense parameters, never both"
        number = part * here[match[1]] + int(match[2])
        found[f"{match[1]}deepspeed_moe.experts.deepspeed_experts.{number}.{match[3]}"] = torch.Size(shape)
    return found


def stacked(tensors: Mapping[tuple[str, str], Assembly]) -> dict[tuple[str, str], Assembly]:
    """All tensors under our names, each layer's experts joined along a first dimension.

    Raises CheckpointError when an expert is missing, or two of a layer differ in shape.
    """
    found: dict[tuple[str, str], Assembly] = {}
    experts: dict[tuple[str, str], dict[int, Assembly]] = {}
    for (part, name), assembly in tensors.items():
        match = _EXPERT.match(name)
        if match is None:
            found[part, native_name(name)] = assembly
        else:
            experts.setdefault((part, native_name(name)), {})[int(match[2])] = assembly
    for (part, name), members in experts.items():
        found[part, name] = _stack(members, f"{part} of '{name}'")
    return found


def _stack(members: Mapping[int, Assembly], what: str) -> Assembly:
    missing = sorted(set(range(max(members) + 1)) - set(members))
    shapes = {assembly.shape for assembly in members.values()}
    if missing or len(shapes) > 1:
        wrong = f"expert {missing[0]} is missing" if missing else f"experts have shapes {sorted(shapes)}"
        raise CheckpointError(f"{what}: {wrong}, of experts up to {max(members)}. Copy the files of all ranks.")
    one = members[0]
    pieces = [
        replace(piece, start=piece.start + expert * one.numel)
        for expert in sorted(members)
        for piece in members[expert].pieces
    ]
    return Assembly((len(members), *one.shape), one.dtype, pieces)
