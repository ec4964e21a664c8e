"""What a checkpoint is, as plain data for people and programs: who wrote it, when, what it holds. Reads no tensor."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import Tensor

from trilithon.checkpoint.deepspeed_reader import is_deepspeed
from trilithon.checkpoint.opening import open_checkpoint
from trilithon.checkpoint.reader import CheckpointReader, pointed, tags
from trilithon.errors import CheckpointError


def describe(folder: Path | str, tag: str | None = "latest", *, names: bool = False) -> dict[str, Any]:
    """Plain data (JSON) about one checkpoint and its neighbours.

    names: list every tensor as well. Raises CheckpointError when there is no checkpoint or it is incomplete.
    """
    with open_checkpoint(folder, tag) as reader:
        about = reader.manifest
        found: dict[str, Any] = {
            "path": str(reader.folder),
            "format": "deepspeed" if is_deepspeed(reader.folder) else "trilithon",
            "tag": about.tag,
            "step": about.step,
            "saved_at": datetime.fromtimestamp(about.saved_at, tz=UTC).isoformat(timespec="seconds"),
            "library": about.library if about.library.startswith("DeepSpeed") else f"trilithon {about.library}",
            "world_size": about.world_size,
            "zero_stage": about.zero_stage,
            "precision": about.precision,
            "bytes": about.bytes,
            "parts": _parts(reader),
            "aliases": dict(about.aliases),
            "files": {name: record.bytes for name, record in about.files.items()},
            "state": _state(reader.extra),
            "tags": _tags(Path(folder)),
        }
        if names:
            found["tensors"] = [
                {"part": entry.part, "name": entry.name, "dtype": entry.dtype, "shape": list(entry.shape)}
                for entry in reader.entries()
            ]
        return found


def _parts(reader: CheckpointReader) -> dict[str, dict[str, Any]]:
    """By part: tensors, elements, types, and the bytes that its values are; 0 for what follows from another part."""
    found: dict[str, dict[str, Any]] = {}
    for entry in reader.entries():
        one = found.setdefault(entry.part, {"tensors": 0, "elements": 0, "bytes": 0, "dtypes": []})
        one["tensors"] += 1
        one["elements"] += entry.numel
        one["bytes"] += 0 if entry.of is not None else entry.numel * entry.torch_dtype.itemsize
        if entry.dtype not in one["dtypes"]:
            one["dtypes"].append(entry.dtype)
    return found


def _state(extra: Mapping[str, Any]) -> dict[str, Any]:
    """What is not a tensor, shortened: names of what is there, and the numbers that people ask for."""
    ranks = extra["ranks"]
    own = ranks[0] if ranks else {}
    return {
        "counters": {key: value for key, value in (extra.get("counters") or {}).items() if isinstance(value, int)},
        "groups": [
            {"parameters": len(group["names"]), "settings": _short(group["settings"])}
            for group in extra.get("groups") or ()
        ],
        "loss_scale": (extra.get("scaler") or {}).get("scale"),
        "optimizer": next((rank["update"]["rule"] for rank in ranks if rank.get("update")), None),
        "open_window": bool(own.get("window")),
        "random_states": "random" in own,
        "stateful": sorted({name for rank in ranks for name in rank.get("stateful") or ()}),
        "client_state": sorted(str(key) for key in own.get("client_state") or ()),
    }


def _short(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that are numbers, truth values or tuples of them."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Tensor) and value.numel() == 1:
            found[key] = value.item()
        elif isinstance(value, bool | int | float):
            found[key] = value
        elif isinstance(value, list | tuple) and all(isinstance(item, int | float) for item in value):
            found[key] = list(value)
    return found


def _tags(folder: Path) -> dict[str, Any]:
    """The complete checkpoints of ours that lie in the same folder, the newest last."""
    try:
        return {"complete": tags(folder), "latest": pointed(folder)}
    except (CheckpointError, OSError):
        return {"complete": [], "latest": None}
