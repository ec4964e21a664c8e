"""Where each value of a configuration came from, and what was found wrong or without effect while reading it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic import BaseModel

from trilithon.config.base import place
from trilithon.errors import BatchError, ConfigError

OriginKind = Literal["default", "file", "argument", "deepspeed", "derived", "override"]


@dataclass(frozen=True, slots=True)
class Source:
    """Where one value was written: the file (or what stands for it) and the key there; `why` for a derived one."""

    kind: OriginKind
    where: str = ""
    key: str = ""
    why: str = ""

    def __str__(self) -> str:
        match self.kind:
            case "default":
                return "default"
            case "derived":
                return f"derived: {self.why}" if self.why else "derived"
            case "override":
                return self.where
        return f"{self.where}:{self.key}"


DEFAULT = Source("default")
BATCH_MISSING = "train_batch_size or train_micro_batch_size_per_gpu"  # the place of that problem


@dataclass(frozen=True, slots=True)
class Origin:
    """One value in force (`key` is dotted, as in "zero.stage") and where it came from."""

    key: str
    value: Any
    source: Source

    @property
    def kind(self) -> OriginKind:
        """One word: default, file, argument, deepspeed, derived or override."""
        return self.source.kind


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: in which file (or argument), at which key, and what to write instead."""

    where: str
    key: str
    text: str

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"


@dataclass
class Draft:
    """A native configuration being read: nested values, the source of each leaf, and the findings so far."""

    where: str
    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, Source] = field(default_factory=dict)
    private: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)  # native key -> the key of the file that would set it
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unfinished: bool = False  # values are missing for a reason that was reported, so that their absence is not

    def problem(self, key: str, text: str, where: str | None = None) -> None:
        """Record that `key` is wrong; `text` begins with the key."""
        self.problems.append(Problem(where or self.where, key, text))

    def note(self, key: str, text: str) -> None:
        """Record that `key` is accepted but does less than it may seem."""
        self.notes.append(f"{key}: {text}")

    def put(self, key: str, value: Any, source: Source) -> None:
        """Set a dotted key, creating blocks on the way; what stands in the way of a block is replaced by one."""
        *blocks, name = key.split(".")
        here = self.values
        for depth, block in enumerate(blocks):
            below = here.get(block)
            if isinstance(below, str):  # a bare kind, as in "precision": "bf16"
                path = ".".join(blocks[: depth + 1])
                self.sources[f"{path}.kind"] = self.sources.pop(path, source)
                below = {"kind": below}
            here[block] = dict(below) if isinstance(below, Mapping) else {}
            here = here[block]
        here[name] = value
        for old in [old for old in self.sources if old == key or old.startswith(key + ".")]:
            del self.sources[old]
        self.sources[key] = source
        if isinstance(value, Mapping):
            for path, _ in leaves(value):
                below = f"{key}.{path}"
                self.sources[below] = replace(source, key=below) if source.kind == "override" else source

    def source_of(self, key: str) -> Source:
        """The source of a leaf of the finished configuration."""
        bare = key.removesuffix(".kind")
        return self.sources.get(key) or self.sources.get(bare if bare != key else "", DEFAULT)


def leaves(block: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything in a nested block that is not itself a block with keys."""
    for name, value in block.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, place(prefix, name) + ".")
        else:
            yield place(prefix, name), value


def values_of(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every setting of a finished configuration, in the order of the classes."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from values_of(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def plain(value: Any) -> Any:
    """Sections inside a value become blocks holding what was set on them; everything else stays."""
    if isinstance(value, BaseModel):
        given = [name for name in type(value).model_fields if name in value.model_fields_set or name == "kind"]
        return {name: plain(getattr(value, name)) for name in given}
    if isinstance(value, Mapping):
        return {name: plain(below) for name, below in value.items()}
    return value


def raise_if_any(problems: list[Problem]) -> None:
    """Raise one ConfigError that lists all problems with file and key; BatchError if only batch sizes are missing."""
    if not problems:
        return
    unique = list(dict.fromkeys(str(problem) for problem in problems))
    if len(unique) == 1:
        raise (BatchError if problems[0].key == BATCH_MISSING else ConfigError)(unique[0])
    raise ConfigError(f"{len(unique)} problems in the configuration:\n" + "\n".join(f"  - {line}" for line in unique))
