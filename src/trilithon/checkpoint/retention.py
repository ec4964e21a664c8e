"""Which checkpoints stay. The newest always does, and so does the one that the run was loaded from."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trilithon.checkpoint import durable
from trilithon.checkpoint.manifest import POINTER, read_manifest
from trilithon.checkpoint.reader import tags

_OLD_S = 24 * 3600.0  # after which a hidden folder of another host is taken for abandoned


@dataclass(frozen=True, slots=True)
class Retention:
    """keep: how many of the newest stay, None for all. keep_every: those at multiples of this step stay as well.

    spared: tags that stay in any case. latest: the pointer names the new checkpoint.
    """

    keep: int | None = None
    keep_every: int | None = None
    spared: frozenset[str] = frozenset()
    latest: bool = True


def to_remove(steps: Sequence[tuple[str, int]], retention: Retention, newest: str) -> list[str]:
    """Of (tag, step), the newest last, the tags that go. Pure; `newest` never does."""
    if retention.keep is None:
        return []
    kept = {tag for tag, _ in steps[-max(retention.keep, 1) :]} | {newest} | retention.spared
    if retention.keep_every is not None:
        kept |= {tag for tag, step in steps if step % retention.keep_every == 0}
    return [tag for tag, _ in steps if tag not in kept]


def prune(root: Path, retention: Retention, newest: str) -> list[str]:
    """Remove what the rule does not keep, and return the tags. Damaged or foreign folders are left alone."""
    if retention.keep is None:
        return []
    found = [(tag, read_manifest(root / tag).step) for tag in tags(root)]
    gone = to_remove(found, retention, newest)
    for tag in gone:
        hidden = root / f".{tag}.{os.getpid()}.removing"  # first its name goes: half a checkpoint is never seen
        durable.rename(root / tag, hidden)
        durable.remove_folder(hidden)
    return gone


def clear_leftovers(root: Path) -> None:
    """Remove what saves that were killed left behind; what a living process may be writing is not touched."""
    for path in root.glob(f".{POINTER}.*"):
        if _abandoned(path):
            path.unlink(missing_ok=True)
    for path in durable.leftovers(root, (".partial", ".removing", ".replaced")):
        if path.name.endswith(".removing") or (path.name.endswith(".partial") and _abandoned(path)):
            durable.remove_folder(path)
        elif path.name.endswith(".replaced"):
            tag = re.sub(r"\.[^.]*\.replaced$", "", path.name[1:])
            if tag in tags(root):
                durable.remove_folder(path)


def _abandoned(path: Path) -> bool:
    found = re.search(r"\.([A-Za-z0-9-]+)-(\d+)-[0-9a-f]{8}(\.partial)?$", path.name)
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())
    if found is not None and found[1] == host:
        try:
            os.kill(int(found[2]), 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return int(found[2]) == os.getpid()  # a save of this process that failed; a process saves one at a time
    try:
        return time.time() - path.stat().st_mtime > _OLD_S
    except FileNotFoundError:
        return False
