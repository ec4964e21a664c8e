"""A DeepSpeed file as a native configuration, and what became of each of its keys.

    found = migrate("ds_config.json")
    Path("config.toml").write_text(as_toml(found))

The native text says the same as the file: reading either gives equal settings.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trilithon.config import sources
from trilithon.config.deepspeed_release import Release
from trilithon.config.origin import Source, leaves
from trilithon.config.root import Config, Examined, examine
from trilithon.config.schema import READ_BY_CODE
from trilithon.errors import ConfigError

Fate = Literal["mapped", "same", "ignored", "refused"]
_SAME = "is how it is here in any case"
_HEADINGS: dict[Fate, str] = {
    "mapped": "Mapped",
    "same": "Says what is so here in any case",
    "ignored": "Without effect here",
    "refused": "Refused",
}


@dataclass(frozen=True, slots=True)
class Note:
    """What became of one key (or block) of the file."""

    key: str
    fate: Fate
    text: str


@dataclass(frozen=True, slots=True)
class Migration:
    """values: native key, dotted -> value and where it comes from. config: None when something was refused."""

    where: str
    release: Release
    values: Mapping[str, tuple[Any, Source]]
    notes: tuple[Note, ...]
    config: Config | None

    def of(self, fate: Fate) -> list[Note]:
        """The notes of one kind, in the order of the file."""
        return [note for note in self.notes if note.fate == fate]


def migrate(
    source: Path | str | Mapping[str, Any],
    *,
    auto: Mapping[str, Any] | None = None,
    deepspeed_release: str | None = None,
    refusals: Iterable[tuple[str, str]] = (),
) -> Migration:
    """Read a DeepSpeed file; the arguments are those of `examine`.

    refusals: further native keys that are refused, with the reason. Raises ConfigError when it cannot be read at all,
    and when it is a configuration of this library already.
    """
    raw, where = (dict(source), "config") if isinstance(source, Mapping) else sources.read(source)
    found = examine(raw, auto=auto, deepspeed_release=deepspeed_release, name=where)
    if found.deepspeed_release is None:
        raise ConfigError(f"{where} is a configuration of trilithon already: there is nothing to migrate.")
    return Migration(where, found.deepspeed_release, found.values, tuple(_notes(raw, found, refusals)), found.config)


def _notes(raw: Mapping[str, Any], found: Examined, refusals: Iterable[tuple[str, str]]) -> list[Note]:
    """One note for each key, in the order of the file; a block that is treated as one has one."""
    told: dict[str, Note] = {}
    for native, (value, source) in found.values.items():
        if source.key and native != "optimizer":
            text = f"{native} = {json.dumps(value, default=str)}"
            told[source.key] = Note(source.key, "mapped", _joined(told.get(source.key), text))
    for text in found.notes:
        key, _, why = text.partition(": ")
        if key not in told:
            told[key] = Note(key, "same" if _SAME in why else "ignored", why.removeprefix("no effect: "))
    for problem in found.problems:
        text = problem.text.removeprefix(f"{problem.key}: ").removeprefix(f"{problem.key}=")
        told[problem.key] = Note(problem.key, "refused", text)
    ordered: dict[str, Note] = {}
    for key, value in leaves(raw):
        note = _nearest(told, key) or Note(key, "ignored", _silent(key, value))
        ordered.setdefault(note.key, note)
    ordered |= {key: note for key, note in told.items() if key not in ordered}  # keys that are missing
    for key, text in refusals:
        written = found.values[key][1].key if key in found.values else ""
        ordered[f"{written or key} "] = Note(written or key, "refused", text)
    return list(ordered.values())


def _joined(before: Note | None, text: str) -> str:
    return f"{before.text}; {text}" if before is not None else text


def _nearest(told: Mapping[str, Note], key: str) -> Note | None:
    """The note on a key, or on the innermost block around it that has one."""
    while key:
        if key in told:
            return told[key]
        key = key.rpartition(".")[0]
    return None


def _silent(key: str, value: Any) -> str:
    if key.startswith("_"):
        return "a key of your own"
    if value == {}:
        return "an empty block"
    if value is False:
        return "it is off"
    return READ_BY_CODE.get(key, "read together with the keys beside it")


def as_toml(found: Migration) -> str:
    """The native configuration as TOML, with a comment for each key of the file."""
    lines = [f"# From {found.where}, read by the rules of DeepSpeed {found.release}."]
    tables: dict[str, list[str]] = {"": []}
    for key, (value, source) in found.values.items():
        if value is None:
            continue
        block, _, name = key.rpartition(".")
        why = source.why if source.kind == "derived" else source.key
        tables.setdefault(block, []).append(f"{name} = {_toml(value)}{f'  # {why}' if why else ''}")
    for block, rows in tables.items():
        rows.sort(key=lambda row: not row.startswith("kind = "))
        lines += [*(["", f"[{block}]"] if block else [""] if rows else []), *rows]
    for fate in ("same", "ignored", "refused"):
        notes = found.of(fate)
        lines += (
            ["", f"# {_HEADINGS[fate]}:", *(f"#   {note.key}: {_line(note.text)}" for note in notes)] if notes else []
        )
    return "\n".join(lines) + "\n"


def as_json(found: Migration) -> str:
    """The native configuration as JSON, without comments."""
    root: dict[str, Any] = {}
    for key, (value, _) in found.values.items():
        *blocks, name = key.split(".")
        here = root
        for block in blocks:
            here = here.setdefault(block, {})
        here[name] = value
    return json.dumps(root, indent=2, default=str) + "\n"


def as_text(found: Migration) -> str:
    """The notes alone, under a heading for each kind."""
    lines: list[str] = []
    for fate, heading in _HEADINGS.items():
        notes = found.of(fate)
        lines += [f"{heading}:", *(f"  {note.key}: {_line(note.text)}" for note in notes)] if notes else []
    return "\n".join(lines) + "\n"


def _line(text: str) -> str:
    return " ".join(text.split())


def _toml(value: Any) -> str:
    """A scalar or a list of them. JSON's text is TOML's, apart from numbers such as 1e-05, which both know."""
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(_toml(item) for item in value)}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(str(key))} = {_toml(item)}" for key, item in value.items()) + "}"
    return json.dumps(value, default=str, ensure_ascii=False)


__all__ = ["Migration", "Note", "as_json", "as_text", "as_toml", "migrate"]
