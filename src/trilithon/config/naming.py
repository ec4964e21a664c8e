"""The tree of configuration keys: finds unknown ones and says what was meant, or where the key belongs.

The walk follows the classes, so a key added to a section is known here at once.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Union, get_args, get_origin

from trilithon.config.base import Section, kind_of, show


def sections_of(annotation: Any) -> tuple[type[Section], ...]:
    """The section classes an annotation allows: none for a plain value, several for a choice by kind."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return sections_of(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return tuple(cls for part in get_args(annotation) for cls in sections_of(part))
    return (annotation,) if isinstance(annotation, type) and issubclass(annotation, Section) else ()


def kind_name(cls: type[Section]) -> str | None:
    """The value of `kind` that selects this class, or None for a section that is not part of a choice."""
    field = cls.model_fields.get("kind")
    return None if field is None else str(field.default)


def every_key(cls: type[Section], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(name, dotted place) of every key below a class; a key of several kinds is yielded once."""
    seen = set()
    for name, field in cls.model_fields.items():
        place = prefix + name
        yield name, place
        for section in sections_of(field.annotation):
            for below in every_key(section, place + "."):
                if below not in seen:
                    seen.add(below)
                    yield below


def nearest(name: str, names: Iterable[str], cutoff: float = 0.7) -> str | None:
    """The known name that a misspelt one most likely means."""
    known = {candidate.lower(): candidate for candidate in names}
    found = difflib.get_close_matches(name.lower(), known, n=1, cutoff=cutoff)
    return known[found[0]] if found else None


def advice(name: str, prefix: str, here: Iterable[str], everywhere: Iterable[tuple[str, str]]) -> str:
    """What to write instead of an unknown key `name` found under `prefix` ("" or "zero.")."""
    here = [key for key in here if key != "kind"]
    places = [place for key, place in everywhere if key == name and place != prefix + name]
    if places:
        return f"belongs at {_either(places)}"
    close = nearest(name, here)
    if close:
        return f"did you mean {prefix}{close}?"
    far = nearest(name, [key for key, _ in everywhere], cutoff=0.8)
    if far:
        return f"did you mean {_either([place for key, place in everywhere if key == far])}?"
    return f"known here: {', '.join(sorted(here))}"


def _either(places: list[str]) -> str:
    shown = places[:3]
    return " or ".join(shown) + (" or others" if len(places) > 3 else "")


def choose(classes: tuple[type[Section], ...], value: Mapping[str, Any]) -> type[Section] | None:
    """The class a block selects by its kind; None when the kind is missing or unknown."""
    if len(classes) == 1:
        return classes[0]
    return next((cls for cls in classes if kind_name(cls) == value.get("kind")), None)


def unknown_keys(raw: Mapping[str, Any], root: type[Section]) -> Iterator[tuple[str, str]]:
    """(dotted key, what to do about it) for each unknown key of a nested block, and for each kind that is wrong."""
    everywhere = list(every_key(root))
    yield from _unknown(raw, root, (root,), "", everywhere)


def _unknown(
    raw: Mapping[str, Any],
    cls: type[Section],
    siblings: tuple[type[Section], ...],
    prefix: str,
    everywhere: list[tuple[str, str]],
) -> Iterator[tuple[str, str]]:
    """As `unknown_keys`, for a block read as `cls`; siblings are the other kinds it might have been."""
    for name, given in raw.items():
        value: Any = given
        if not isinstance(name, str):
            yield f"{prefix}{show(name)}", f"a key must be text, not {kind_of(name)}"
            continue
        field = cls.model_fields.get(name)
        if field is None:
            owners = [str(kind_name(other)) for other in siblings if name in other.model_fields]
            text = f"unknown key; {advice(name, prefix, cls.model_fields, everywhere)}"
            yield f"{prefix}{name}", f"not a key of {kind_name(cls)}; {_either(owners)} has it" if owners else text
            continue
        classes = sections_of(field.annotation)
        if len(classes) > 1 and isinstance(value, str):
            value = {"kind": value}
        if not classes or not isinstance(value, Mapping):
            continue
        chosen = choose(classes, value)
        if chosen is not None:
            yield from _unknown(value, chosen, classes, f"{prefix}{name}.", everywhere)
            continue
        kinds = [known for known in map(kind_name, classes) if known]
        kind = value.get("kind")
        close = nearest(kind, kinds) if isinstance(kind, str) else None
        what = f"{show(kind)} is not a kind" if "kind" in value else "missing"
        meant = f"did you mean {close}? " if close else ""
        yield f"{prefix}{name}.kind", f"{what}; {meant}one of {', '.join(kinds)}"
        known = {key for section in classes for key in section.model_fields}
        for key in [show(key) if not isinstance(key, str) else key for key in value if key not in known]:
            yield f"{prefix}{name}.{key}", f"unknown key; {advice(key, f'{prefix}{name}.', known, everywhere)}"


def field_path(root: type[Section], location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Pydantic's error location without the tags it inserts for choices by kind and for plain unions."""
    path: list[int | str] = []
    classes: tuple[type[Section], ...] = (root,)
    rest = list(location)
    while rest:
        step = rest.pop(0)
        if len(classes) > 1:  # the tag of the kind chosen
            classes = tuple(cls for cls in classes if kind_name(cls) == step)
            continue
        if not classes:  # inside a value: keep list indices and block keys, drop the names of union members
            if isinstance(step, int):
                path.append(step)
            continue
        path.append(step)
        field = classes[0].model_fields.get(str(step))
        classes = sections_of(field.annotation) if field is not None else ()
    return tuple(path)
