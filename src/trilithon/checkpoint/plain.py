"""Plain data as JSON, and back, with the types kept: what a checkpoint stores besides tensors.

Numbers, text, None, lists and dictionaries are JSON's own; tuples, sets, bytes, other keys than text, numbers that are
not finite, `argparse.Namespace`, small tensors and arrays are written as an object with one key that begins with "$".
Anything else, such as an object of a class or a function, is refused with the path to it: it could only be stored by
pickling it, and a checkpoint of ours runs no code when it is read.
"""

from __future__ import annotations

import argparse
import base64
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trilithon.checkpoint.manifest import DTYPES, dtype_name
from trilithon.errors import CheckpointError


def to_json(value: Any, where: str = "") -> Any:
    """Plain data as what `json.dumps` takes. Raises CheckpointError with the path of what is not plain data."""
    if value is None or (isinstance(value, bool | str | int) and not isinstance(value, Enum)):
        return value if type(value) in (type(None), bool, str, int) else _builtin(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, Mapping):
        return _mapping(value, where)
    if isinstance(value, list | tuple | set | frozenset | deque):
        items = [to_json(item, f"{where}[{index}]") for index, item in enumerate(value)]
        kind = next((name for name, cls in _SEQUENCES.items() if type(value) is cls), None)
        return items if type(value) is list else {kind or "$tuple": items}
    if isinstance(value, bytes | bytearray):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, Tensor):
        return {"$tensor": _tensor(value)}
    if isinstance(value, np.ndarray):
        return {"$array": _tensor(torch.from_numpy(np.array(value, copy=True)))}
    if isinstance(value, np.generic):
        return to_json(value.item(), where)
    if isinstance(value, torch.dtype):
        return {"$dtype": dtype_name(value)}
    if isinstance(value, PurePath):
        return {"$path": str(value)}
    if type(value) is argparse.Namespace:
        return {"$namespace": _mapping(vars(value), where)}
    raise CheckpointError(
        f"{where or 'the value'} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be saved: a "
        "checkpoint holds plain data (numbers, text, lists, dictionaries, tensors). Save what describes the object."
    )


_SEQUENCES: dict[str, Callable[..., Any]] = {
    "$tuple": tuple,
    "$set": set,
    "$frozenset": frozenset,
    "$deque": deque,
}


def _builtin(value: Any) -> Any:
    return str(value) if isinstance(value, str) else int(value)


def _mapping(value: Mapping[Any, Any], where: str) -> Any:
    ordinary = all(type(key) is str and not key.startswith("$") for key in value)
    if ordinary and not isinstance(value, Counter):
        return {key: to_json(item, f"{where}.{key}" if where else key) for key, item in value.items()}
    pairs = [[to_json(key, f"{where}.<key>"), to_json(item, f"{where}[{key!r}]")] for key, item in value.items()]
    return {"$counter" if isinstance(value, Counter) else "$dict": pairs}


def _tensor(value: Tensor) -> dict[str, Any]:
    flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return {
        "dtype": dtype_name(value.dtype),
        "shape": list(value.shape),
        "data": base64.b64encode(flat.numpy().tobytes()).decode(),
    }


def from_json(value: Any) -> Any:
    """The inverse of `to_json`; tensors come back on the CPU. Raises CheckpointError for a mark it does not know."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((mark, inner),) = value.items()
        if mark in _SEQUENCES:
            return _SEQUENCES[mark](from_json(item) for item in inner)
        if mark.startswith("$"):
            if mark not in _READERS:
                raise CheckpointError(
                    f"state.json holds a value of unknown kind {mark!r}; read it with a newer release."
                )
            return _READERS[mark](inner)
    return {key: from_json(item) for key, item in value.items()}


def _read_tensor(inner: Mapping[str, Any]) -> Tensor:
    raw = bytearray(base64.b64decode(inner["data"]))
    dtype = DTYPES[inner["dtype"]]
    flat = torch.frombuffer(raw, dtype=torch.uint8).view(dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.reshape(inner["shape"])


_READERS: dict[str, Callable[[Any], Any]] = {
    "$float": float,
    "$bytes": base64.b64decode,
    "$tensor": _read_tensor,
    "$array": lambda inner: _read_tensor(inner).numpy(),
    "$dtype": lambda inner: DTYPES[inner],
    "$path": PurePath,
    "$namespace": lambda inner: argparse.Namespace(**from_json(inner)),
    "$dict": lambda inner: {from_json(key): from_json(item) for key, item in inner},
    "$counter": lambda inner: Counter({from_json(key): from_json(item) for key, item in inner}),
}

__all__ = ["from_json", "to_json"]
