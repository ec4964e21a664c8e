"""The configuration described: a JSON schema for editors, and the tables of the reference in docs/."""

from __future__ import annotations

import re
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from trilithon.config.base import Section
from trilithon.config.deepspeed_keys import TABLE
from trilithon.config.deepspeed_rules import Block, Code, Entry, Feature, Idle, Only, To
from trilithon.config.naming import kind_name, sections_of
from trilithon.config.root import Config

READ_BY_CODE = {
    "zero_optimization.offload_param.nvme_path": "becomes `offload.path`; offload_optimizer may not name another",
    "activation_checkpointing.cpu_checkpointing": 'true: sets `recompute.tier` to "host", for repeated blocks',
    "activation_checkpointing.partition_activations": "true: sets `recompute.partition`, for repeated blocks",
    "activation_checkpointing.contiguous_memory_optimization": "true: sets `recompute.contiguous`, for repeated blocks",
    "activation_checkpointing.contiguous_checkpointing": "true: sets `recompute.contiguous`, for repeated blocks",
    "activation_checkpointing.number_checkpoints": "becomes `recompute.number` beside one of these",
    "activation_checkpointing.synchronize_checkpoint_boundary": "sets `recompute.synchronize` beside one of these",
    "activation_checkpointing.profile": "sets `recompute.profile` beside one of these",
    "fp16.enabled": 'sets precision to "fp16"',
    "bf16.enabled": 'sets precision to "bf16"',
    "bfloat16.enabled": 'sets precision to "bf16"',
    "data_types.param_dtype": "must agree with the number format that is enabled",
    "optimizer": "see the table of optimizers",
    "scheduler": "see the table of schedulers",
    "steps_per_print": "sets `monitor.every`; null or infinity sets `monitor.quiet`",
    "tensorboard.enabled": "sets `monitor.tensorboard`",
    "csv_monitor.enabled": "sets `monitor.csv`",
    "tensorboard.output_path": "with job_name, sets `monitor.folder`",
    "tensorboard.job_name": "with output_path, sets `monitor.folder`",
    "csv_monitor.output_path": "with job_name, sets `monitor.folder`",
    "csv_monitor.job_name": "with output_path, sets `monitor.folder`",
    "flops_profiler.enabled": "its `profile_step` counts only while this is true",
}


def json_schema() -> dict[str, Any]:
    """A JSON schema of the native format, with the short forms that loading accepts."""
    schema = Config.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["patternProperties"] = {r"^(_|\$schema$)": {"description": "A key of your own: carried along, never read."}}
    for name, field in Config.model_fields.items():
        kinds = [kind for kind in map(kind_name, sections_of(field.annotation)) if kind]
        if kinds:
            entry = schema["properties"][name]
            kept = {key: entry.pop(key) for key in ("anyOf", "oneOf", "discriminator") if key in entry}
            entry["anyOf"] = [{"type": "string", "enum": kinds}, *kept.get("anyOf", [kept])]
    return schema


def reference() -> str:
    """The reference of the native format as Markdown tables, made from the classes."""
    lines = ["## Top level", "", *_table(Config)]
    seen: set[type[Section]] = set()
    for name, field in Config.model_fields.items():
        lines += _below(name, field, "##", seen)
    return "\n".join(lines) + "\n"


def _below(place: str, field: FieldInfo, heading: str, seen: set[type[Section]]) -> list[str]:
    """What stands below one key that holds a block: its tables, and those of blocks inside. Each class once."""
    sections = [section for section in sections_of(field.annotation) if section not in seen]
    seen.update(sections)
    lines: list[str] = []
    if len(sections) == 1:
        lines += ["", f"{heading} `{place}`", "", _prose(sections[0]), "", *_table(sections[0])]
    elif sections:
        lines += ["", f"{heading} `{place}`", "", str(field.description).replace("\n", " ")]
    for section in sections:
        if len(sections) > 1:
            lines += ["", f"{heading}# `{place}.kind` = `{kind_name(section)}`", "", _prose(section)]
            lines += ["", *table] if (table := _table(section)) else []
        for name, inner in section.model_fields.items():
            lines += _below(f"{place}.{name}", inner, f"{heading}#", seen)
    return lines


def deepspeed_reference() -> str:
    """What becomes of each key of a DeepSpeed file, as one Markdown table."""
    rows = [f"| `{key}` | {text} |" for key, text in _entries(TABLE, "")]
    return "\n".join(["| key | what becomes of it |", "| --- | --- |", *rows]) + "\n"


def deepspeed_names() -> str:
    """The keys of a DeepSpeed file that have a native name, as one Markdown table; optimizers and schedulers apart."""
    rows = [f"| `{key}` | `{entry.key}` |" for key, entry in _mapped(TABLE, "")]
    return "\n".join(["| DeepSpeed | here |", "| --- | --- |", *rows]) + "\n"


def _mapped(table: Mapping[str, Entry], prefix: str) -> Iterator[tuple[str, To]]:
    for name, entry in table.items():
        if isinstance(entry, To):
            yield prefix + name, entry
        elif isinstance(entry, Block):
            yield from _mapped(entry.keys, f"{prefix}{name}.")


def _prose(section: type[Section]) -> str:
    paragraphs = (section.__doc__ or "").strip().split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _table(section: type[Section]) -> list[str]:
    rows = [
        f"| `{name}` | {_type_words(field)} | {_default_words(field)} | {' '.join(str(field.description).split())} |"
        for name, field in section.model_fields.items()
        if name != "kind"
    ]
    return ["| key | value | default | meaning |", "| --- | --- | --- | --- |", *rows] if rows else []


def _default_words(field: FieldInfo) -> str:
    value = field.default
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, Section):
        kind = kind_name(type(value))
        return f"`{kind}`" if kind else "see below"
    if isinstance(value, tuple):
        return f"`{list(value)}`"
    words = {None: "null", True: "true", False: "false"}
    if isinstance(value, (bool, type(None))):
        return f"`{words[value]}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _type_words(field: FieldInfo) -> str:
    annotation = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
    return " or ".join(dict.fromkeys(_words(annotation)))


def _limits(metadata: Iterable[Any]) -> str:
    """The bounds among the metadata of a type, as text to follow its name."""
    rules = [rule for item in metadata for rule in (item.metadata if isinstance(item, FieldInfo) else [item])]
    bounds = {type(rule).__name__: rule for rule in rules}
    limits = [
        f"{sign} {getattr(bounds[name], attribute):g}"
        for name, attribute, sign in (("Gt", "gt", ">"), ("Ge", "ge", ">="), ("Lt", "lt", "<"), ("Le", "le", "<="))
        if name in bounds and abs(getattr(bounds[name], attribute)) < 2**62
    ]
    return f" {' and '.join(limits)}" if limits else ""


def _words(annotation: Any) -> Iterator[str]:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        limits = _limits(parts[1:])
        yield from (f"{word}{limits}" for word in _words(parts[0]))
    elif origin in (Union, types.UnionType):
        for part in parts:
            yield from _words(part)
    elif origin is Literal:
        yield from (f"`{part}`" for part in parts)
    elif origin is dict:
        yield "block of " + " or ".join(dict.fromkeys(_words(parts[1])))
    elif origin is tuple:
        inside = " or ".join(dict.fromkeys(_words(parts[0])))
        yield f"list of {inside}" if parts[-1] is Ellipsis else f"list of {len(parts)}: {inside}"
    elif isinstance(annotation, type) and issubclass(annotation, Section):
        yield "name or block" if kind_name(annotation) else "block"
    else:
        simple = {int: "whole number", float: "number", bool: "true/false", str: "text", Path: "path"}
        yield "null" if annotation is type(None) else simple[annotation]


def _entries(table: Mapping[str, Entry], prefix: str) -> Iterator[tuple[str, str]]:
    for name, entry in table.items():
        key = prefix + name
        match entry:
            case To():
                yield key, f"becomes `{entry.key}`"
            case Idle():
                yield key, f"no effect: {entry.why}"
            case Only():
                shown = ", ".join(f"`{_json_words(value)}`" for value in entry.values)
                yield key, f"no effect at {shown}; otherwise refused: {entry.why}"
            case Feature():
                yield key, f"refused while it is on: {entry.what} is not in this version; {entry.off}"
            case Code():
                yield key, READ_BY_CODE[key]
            case Block():
                yield from _entries(entry.keys, f"{key}.")


def _json_words(value: Any) -> str:
    return re.sub(r"\bNone\b", "null", str(value)) if not isinstance(value, bool) else str(value).lower()
