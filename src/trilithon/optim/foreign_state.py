"""The state of somebody else's optimizer, between its two forms: by whole parameter, and by group of flat slices.

Stage 0 runs such an optimizer on whole parameters, the other stages on slices; a checkpoint of one loads into the other
as long as the optimizer keeps its state per element.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from trilithon.errors import CheckpointError


def counters_by_name(saved: Mapping[str, Any], names: Sequence[Sequence[str]]) -> dict[str, dict[str, Any]]:
    """{parameter: {counter: value}} of either form. names: of each group, when it was saved."""
    if saved.get("whole"):
        return {name: dict(kept) for name, kept in saved["state"].items()}
    return {name: dict(kept) for group, kept in zip(names, saved["scalars"]) for name in group}


def for_whole_parameters(
    saved: Mapping[str, Any], counters: Mapping[str, Mapping[str, Any]], fields: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, Any]:
    """What `Foreign.load_state_dict` takes at stage 0. fields: {parameter: {field: whole tensor}}."""
    state = {name: {**counters.get(name, {}), **fields.get(name, {})} for name in dict.fromkeys([*counters, *fields])}
    return {"rule": saved["rule"], "whole": True, "state": state}


def for_slices(
    saved: Mapping[str, Any],
    counters: Mapping[str, Mapping[str, Any]],
    fields: Mapping[str, Sequence[str]],
    groups: Sequence[Sequence[str]],
) -> dict[str, Any]:
    """What it takes at the other stages. fields: {parameter: names of its fields}; groups: names of this run's groups.

    Raises CheckpointError when parameters of one group are at different counts: slices share their counters.
    """
    per_group: list[list[str]] = []
    scalars: list[dict[str, Any]] = []
    for names in groups:
        per_group.append(list(dict.fromkeys(field for name in names for field in fields.get(name, ()))))
        kept = [
            {k: v for k, v in counters[name].items() if k not in per_group[-1]} for name in names if counters.get(name)
        ]
        if any(not _same(other, kept[0]) for other in kept[1:]):
            raise CheckpointError(
                f"the state of {saved['rule']} differs between parameters of one group ({_shown(kept)}), and over "
                "slices a group has one. Load at zero.stage=0, or without 'optimizer' in parts."
            )
        scalars.append(dict(kept[0]) if kept else {})
    return {"rule": saved["rule"], "whole": False, "fields": per_group, "scalars": scalars}


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(bool(one[key] == other[key]) for key in one)


def _shown(kept: Sequence[Mapping[str, Any]]) -> str:
    different = [key for key in kept[0] if any(key not in other or kept[0][key] != other[key] for other in kept)]
    return ", ".join(different[:3])
