"""Removing old checkpoints by hand, by the rule that a running job applies after each save."""

from __future__ import annotations

from pathlib import Path

from trilithon.checkpoint.manifest import read_manifest
from trilithon.checkpoint.reader import pointed, tags
from trilithon.checkpoint.retention import Retention, prune, to_remove
from trilithon.errors import CheckpointError


def prune_now(folder: Path | str, keep: int, keep_every: int | None = None, *, dry_run: bool = False) -> list[str]:
    """Remove all but the `keep` newest and those at multiples of `keep_every` steps; returns the tags that went.

    The newest complete checkpoint and the one that `latest` names always stay. dry_run: only say which would go.
    Raises CheckpointError for a folder without checkpoints.
    """
    root = Path(folder)
    complete = tags(root) if root.is_dir() else []
    if not complete:
        raise CheckpointError(f"{root} holds no complete checkpoint; there is nothing to remove.")
    named = pointed(root)
    retention = Retention(keep, keep_every, frozenset({named} if named is not None else ()))
    if dry_run:
        return to_remove([(tag, read_manifest(root / tag).step) for tag in complete], retention, complete[-1])
    return prune(root, retention, newest=complete[-1])
