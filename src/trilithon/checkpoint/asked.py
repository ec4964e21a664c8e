"""What a save or a load was asked for: refused when it cannot be meant, and the same on every rank."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trilithon.checkpoint.agreement import Coordinator, together
from trilithon.errors import CheckpointError

_SHOWN = 8  # ranks in a message
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", re.IGNORECASE)


def folder_asked(folder: Any, what: str = "folder") -> Path:
    """The folder as an absolute path. Raises CheckpointError for what names none; "." is the current one."""
    if not isinstance(folder, str | os.PathLike):
        raise CheckpointError(f"{what}={folder!r} is of type {type(folder).__name__}. Pass the path of a folder.")
    path = os.fspath(folder)
    if not isinstance(path, str) or not path.strip() or "\0" in path:
        raise CheckpointError(f'{what}={path!r} names no folder. Pass its path ("." for the current folder).')
    return Path(path).absolute()


def tag_asked(tag: Any) -> str | None:
    """The tag as it is. Raises CheckpointError unless it is text or None."""
    if tag is None or (isinstance(tag, str) and tag):
        return tag
    raise CheckpointError(
        f"tag={tag!r} ({type(tag).__name__}) cannot name a checkpoint. Pass text, such as 'step-00000100', or None."
    )


def bytes_asked(size: str | int) -> int:
    """ "500MB" -> 500_000_000; "2GiB", "5G" and plain numbers too. Raises CheckpointError for what is no size."""
    match = _SIZE.fullmatch(str(size))
    if match is None or float(match[1]) == 0:
        raise CheckpointError(f"{size!r} is no size such as 5GB, 500MB or 2GiB.")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2].upper() or " "))


def agreed(ranks: Coordinator, call: str, asked: Callable[[], Mapping[str, Any]], *, what: str) -> None:
    """Collective: raise CheckpointError on every rank, with what each asked for, unless all asked for the same.

    call: "engine.load", for messages. asked: may raise for what cannot be meant, and all ranks do then. what: names the
    exchange, for messages of the watchdog.
    """
    told = together(ranks, what, lambda: {key: _shown(value) for key, value in asked().items()})
    for key in told[0]:
        values = [each[key] for each in told]
        if len(set(values)) > 1:
            said = "; ".join(f"rank {rank}: {value}" for rank, value in enumerate(values[:_SHOWN]))
            more = f"; and {len(values) - _SHOWN} more ranks" if len(values) > _SHOWN else ""
            raise CheckpointError(
                f"ranks called {call} with different {key} ({said}{more}), and nothing was changed. Pass the same "
                f"{key} on every rank."
            )


def _shown(value: Any) -> str:
    return str(value) if isinstance(value, Path) else repr(value)
