"""What can be said about one key of a DeepSpeed file, and the small checks and conversions the tables use.

Every key of the tables is one of: mapped (`To`), accepted without effect (`Idle`), accepted at certain values only
(`Only`), a block of keys (`Block`), a feature that is refused unless it is off (`Feature`), or read by code (`Code`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from trilithon.config.base import kind_of

ValueKind = Literal["any", "flag", "count", "real", "text", "list", "block"]


@dataclass(frozen=True, slots=True)
class To:
    """Becomes the native key; `convert` translates the value and leaves alone what it does not know."""

    key: str
    convert: Callable[[Any], Any] | None = None


@dataclass(frozen=True, slots=True)
class Idle:
    """Accepted, but nothing here depends on it, because `why`."""

    why: str
    kind: ValueKind = "any"


@dataclass(frozen=True, slots=True)
class Only:
    """These values describe what happens here anyway; another one is refused, because `why`."""

    values: tuple[Any, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Code:
    """Read by a function of the reader, together with other keys."""


@dataclass(frozen=True, slots=True)
class Block:
    """A block of keys. With `switch`, its other keys count only while that one is true."""

    keys: Mapping[str, Entry] = field(default_factory=dict)
    switch: str | None = None


@dataclass(frozen=True, slots=True)
class Feature:
    """Something this version does not have. `on` tells from the value whether it is asked for."""

    what: str
    on: Callable[[Any], bool]
    off: str  # how to turn it off
    keys: Mapping[str, Any] | None = None  # known keys below, for spelling; None: anything goes


Entry = To | Idle | Only | Code | Block | Feature


def enabled(value: Any) -> bool:
    """For blocks that are on when `enabled` is true (or anything but false)."""
    return value.get("enabled", False) is not False if isinstance(value, Mapping) else value not in (None, False)


def present(value: Any) -> bool:
    """For keys that are on when they hold anything but null, false, 0 or an empty block."""
    return value not in (None, False, 0, {}, [])


def any_enabled(value: Any) -> bool:
    """For blocks of techniques: on when any block inside says `enabled`."""
    if not isinstance(value, Mapping):
        return present(value)
    return enabled(value) or any(any_enabled(below) for below in value.values() if isinstance(below, Mapping))


def same(value: Any, allowed: Any) -> bool:
    """Equality that does not take 1 for true or 0 for false."""
    if isinstance(value, bool) or isinstance(allowed, bool):
        return value is allowed
    return bool(value == allowed)


def misfit(value: Any, kind: ValueKind) -> str | None:
    """Why a value cannot be of the kind a key without effect takes, or None. null always fits."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    fits = {
        "any": True,
        "flag": isinstance(value, bool),
        "count": number and (isinstance(value, int) or (math.isfinite(value) and value == int(value))),
        "real": number,
        "text": isinstance(value, str),
        "list": isinstance(value, (list, tuple, str)),
        "block": isinstance(value, Mapping),
    }
    words = {"flag": "true or false", "count": "a whole number", "real": "a number", "text": "text"}
    if value is None or fits[kind]:
        return None
    return f"must be {words.get(kind, f'a {kind}')}, not {kind_of(value)}"


_DTYPES = {
    "fp32": ("fp32", "float32", "float"),
    "fp16": ("fp16", "float16", "half"),
    "bf16": ("bf16", "bfloat16"),
}


def dtype(value: Any) -> Any:
    """DeepSpeed's names of number formats -> ours."""
    if not isinstance(value, str):
        return value
    name = value.removeprefix("torch.").lower()
    return next((ours for ours, names in _DTYPES.items() if name in names), value)


def as_list(value: Any) -> Any:
    """A single name -> a list of it."""
    return [value] if isinstance(value, str) else value


def table_keys(table: Mapping[str, Entry], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(name, dotted place) of every key of a table."""
    for name, entry in table.items():
        yield name, prefix + name
        if isinstance(entry, (Block, Feature)) and entry.keys:
            yield from table_keys(entry.keys, f"{prefix}{name}.")
