"""Saving: written beside, made durable, and only then given its name.

    agree on the name -> plan who writes what -> room enough? -> every rank writes and syncs its files in a hidden
    folder -> rank 0 adds state.json and, last, the manifest -> the folder gets its name -> `latest` names it -> old
    checkpoints go

A process that dies between any two of these leaves the checkpoints that were there, and `latest` naming one of them.
When one rank fails, all ranks raise the same CheckpointError and the hidden folder is removed.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trilithon.checkpoint import durable, planning
from trilithon.checkpoint.agreement import Coordinator, together
from trilithon.checkpoint.digest import BLOCK_BYTES, Digester
from trilithon.checkpoint.manifest import (
    MANIFEST,
    POINTER,
    STATE,
    Chunk,
    Entry,
    FileRecord,
    Manifest,
    check_coverage,
    encode,
)
from trilithon.checkpoint.payload import write_payload
from trilithon.checkpoint.plain import to_json
from trilithon.checkpoint.planning import Piece
from trilithon.checkpoint.retention import Retention, clear_leftovers, prune
from trilithon.checkpoint.table import Holding, values_of
from trilithon.errors import CheckpointError

FILE_BYTES = 4 * 2**30
"""Files grow no larger than this, unless one tensor's range on one rank is."""

_VISIBLE_WITHIN_S = 10.0  # for a folder made by rank 0 to be seen by the others, on a network file system


@dataclass(frozen=True)
class Contents:
    """What one rank hands over to be saved.

    views: entries that are not stored but follow from a stored part (`Entry.of`). shared: plain data, of which rank 0's
    is stored. own: plain data of this rank. everybody: of all ranks, when one process writes for them. about: the
    fields of `Manifest` that describe the run.
    """

    step: int
    holdings: Sequence[Holding]
    views: Sequence[Entry] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    shared: Mapping[str, Any] = field(default_factory=dict)
    own: Mapping[str, Any] = field(default_factory=dict)
    everybody: Sequence[Mapping[str, Any]] | None = None
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Prepared:
    """A save that all ranks have agreed on and that has room: what is left is to write it."""

    root: Path
    tag: str
    token: str
    contents: Contents
    files: list[list[Piece]]  # this rank's
    entries: list[Entry]
    state: bytes  # state.json
    total_bytes: int  # of all ranks
    own_bytes: int
    values: Callable[[Sequence[Piece]], Iterator[Tensor]]
    written: int = 0  # by this rank so far

    @property
    def partial(self) -> Path:
        return self.root / f".{self.tag}.{self.token}.partial"

    @property
    def path(self) -> Path:
        return self.root / self.tag

    def count(self, written: int) -> None:
        self.written += written


def save(
    folder: Path | str,
    tag: str,
    contents: Contents,
    ranks: Coordinator,
    *,
    file_bytes: int = FILE_BYTES,
    retention: Retention | None = None,
) -> Path:
    """Save now, and return the folder of the checkpoint once it is durable. Collective."""
    prepared = prepare(Path(folder), tag, contents, ranks, file_bytes=file_bytes)
    return complete(prepared, ranks, retention or Retention())


def prepare(
    folder: Path, tag: str, contents: Contents, ranks: Coordinator, *, file_bytes: int = FILE_BYTES
) -> Prepared:
    """Everything that can be refused before the first byte is written. Collective.

    Raises CheckpointError, on every rank: names that differ between ranks, data that is not plain, tensors that no rank
    holds whole, a folder that cannot be written or has too little room.
    """
    token = _agree(folder, tag, contents.step, ranks)
    pieces = planning.pieces_of(contents.holdings, file_bytes)

    def offer() -> tuple[planning.Offer, Any]:
        to_json(dict(contents.shared), "")  # refused by every rank, not only by the one that stores it
        return planning.offer_of(pieces), to_json(dict(contents.own), "")

    answers = together(ranks, "what each rank saves", offer)
    offers = [answer[0] for answer in answers]
    entries = planning.entries_of(offers)
    planning.check_offers(offers, entries)
    files = planning.files_of(
        planning.chosen(pieces, planning.assign(offers, ranks.rank)), contents.holdings, file_bytes
    )
    everybody = contents.everybody
    each = [to_json(dict(one), "") for one in everybody] if everybody is not None else [answer[1] for answer in answers]
    state = {"shared": to_json(dict(contents.shared)), **_own_states(each)}
    own_bytes = planning.bytes_of_files(files)
    prepared = Prepared(
        folder, tag, token, contents, files, entries, json.dumps(state).encode(), 0, own_bytes, _from(contents.holdings)
    )
    sizes = together(ranks, "room for the checkpoint", lambda: own_bytes)
    prepared.total_bytes = sum(sizes) + len(prepared.state)
    together(ranks, "the folder of the checkpoint", lambda: _make_room(prepared) if ranks.rank == 0 else None)
    together(ranks, "the folder of the checkpoint", lambda: _see(prepared, ranks.rank))
    return prepared


def _own_states(owns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What is equal on all ranks once, and of each rank the rest."""
    common = {key: value for key, value in owns[0].items() if all(own.get(key) == value for own in owns[1:])}
    return {"common": common, "ranks": [{k: v for k, v in own.items() if k not in common} for own in owns]}


def _agree(folder: Path, tag: str, step: int, ranks: Coordinator) -> str:
    """The same folder, name and step on all ranks; returns a token of rank 0 that makes temporary names unique."""
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())
    mine = (str(folder.absolute()), tag, step, f"{host}-{os.getpid()}-{secrets.token_hex(4)}")
    answers = ranks.exchange(mine, "engine.save, which every rank has to call")
    for index, what in enumerate(("folder", "tag", "step")):
        values = [answer[index] for answer in answers]
        if len(set(values)) > 1:
            told = "; ".join(f"rank {rank}: {value}" for rank, value in enumerate(values[:8]))
            raise CheckpointError(
                f"ranks save to different names ({what}: {told}). Pass the same {what} on every rank."
            )
    if not tag or tag.startswith(".") or "/" in tag or "\\" in tag or "\0" in tag or tag in (POINTER, MANIFEST):
        raise CheckpointError(
            f"tag={tag!r} cannot name a checkpoint: it becomes the name of a folder, does not begin with a dot and is "
            f"not '{POINTER}'. Leave it out for step-<number>."
        )
    return str(answers[0][3])


def _make_room(prepared: Prepared) -> None:
    durable.make_folder(prepared.root)
    clear_leftovers(prepared.root)
    needed, free = prepared.total_bytes + _manifest_bytes(prepared), durable.free_bytes(prepared.root)
    if needed > free:
        raise CheckpointError(
            f"the checkpoint '{prepared.tag}' needs {_readable(needed)} and {prepared.root} has {_readable(free)}; "
            "nothing was written and older checkpoints are as they were. Make room, or save elsewhere."
        )
    durable.make_folder(prepared.partial)


def _manifest_bytes(prepared: Prepared) -> int:
    """An upper estimate."""
    config = len(json.dumps(to_json(dict(prepared.contents.about.get("config", {})))))
    return 65536 + config + 400 * len(prepared.entries) + prepared.total_bytes // 50_000


def _see(prepared: Prepared, rank: int) -> None:
    deadline = time.monotonic() + _VISIBLE_WITHIN_S
    while not prepared.partial.is_dir():
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"rank {rank} does not see {prepared.root}, which rank 0 writes to. All ranks save to one folder: give "
                "a path on a file system that all hosts share."
            )
        time.sleep(0.05)


def _from(holdings: Sequence[Holding]) -> Callable[[Sequence[Piece]], Iterator[Tensor]]:
    """Values as they are when they are written; each holding is open while its pieces are."""

    def values(pieces: Sequence[Piece]) -> Iterator[Tensor]:
        index, stack = -1, ExitStack()
        opened: Mapping[str, Tensor] = {}
        try:
            for piece in pieces:
                if piece.holding != index:
                    stack.close()
                    index, opened = piece.holding, stack.enter_context(holdings[piece.holding].open())
                yield values_of(piece.span, opened)
        finally:
            stack.close()

    return values


Copies = dict[tuple[str, str, int], Tensor]  # by part, name and start


def take_copies(prepared: Prepared, before: Copies) -> Copies:
    """Copy what this rank will write to memory of its own, so that training may go on while it is written.

    before: the copies of the last save, whose memory is used again: fresh memory costs more than the copying.
    """
    copies: Copies = {}
    on_device = False
    for file in prepared.files:
        for piece, values in zip(file, prepared.values(file)):
            key = (piece.span.part, piece.span.name, piece.span.start)
            own = before.pop(key, None)
            if own is None or own.numel() != values.numel() or own.dtype != values.dtype:
                own = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
            copies[key] = own.copy_(values.detach(), non_blocking=values.is_cuda)
            on_device |= values.is_cuda
    before.clear()
    if on_device:
        torch.cuda.synchronize()

    def values_copied(pieces: Sequence[Piece]) -> Iterator[Tensor]:
        for piece in pieces:
            yield copies[piece.span.part, piece.span.name, piece.span.start]

    prepared.values = values_copied
    prepared.contents = replace(prepared.contents, holdings=())
    return copies


Written = tuple[dict[str, FileRecord], list[tuple[str, str, Chunk]]]


def complete(prepared: Prepared, ranks: Coordinator, retention: Retention) -> Path:
    """Write, make durable, give it its name. Collective; may run in a thread with a coordinator of its own."""
    try:
        written = together(ranks, "files of the checkpoint", lambda: _write(prepared, ranks.rank))
        together(
            ranks, "end of the checkpoint", lambda: _commit(prepared, written, retention) if ranks.rank == 0 else None
        )
    except CheckpointError:
        if ranks.rank == 0:
            durable.remove_folder(prepared.partial)
        raise
    return prepared.path


def _write(prepared: Prepared, rank: int) -> Written:
    records: dict[str, FileRecord] = {}
    chunks: list[tuple[str, str, Chunk]] = []
    for number, pieces in enumerate(prepared.files):
        path = prepared.partial / f"data-{rank:05d}-{number:03d}.safetensors"
        spans = [piece.span for piece in pieces]
        records[path.name], placed = write_payload(path, spans, prepared.values(pieces), prepared.count)
        chunks += [(span.part, span.name, chunk) for span, chunk in zip(spans, placed, strict=True)]
    if prepared.files:
        durable.sync_folder(prepared.partial)
    return records, chunks


def _commit(prepared: Prepared, written: Sequence[Written], retention: Retention) -> None:
    """By rank 0, once all ranks' files are on the disk."""
    root, partial, path = prepared.root, prepared.partial, prepared.path
    durable.write_file(partial / STATE, prepared.state)
    manifest = _manifest(prepared, written)
    durable.write_file(partial / MANIFEST, encode(manifest))
    durable.sync_folder(partial)
    replaced = root / f".{prepared.tag}.{prepared.token}.replaced"
    if path.exists():
        durable.rename(path, replaced)
    durable.rename(partial, path)
    if retention.latest:
        durable.replace_file(root / POINTER, f"{prepared.tag}\n".encode(), prepared.token)
    with suppress(OSError, CheckpointError):  # the checkpoint is there; what is left to do is to tidy up
        durable.remove_folder(replaced)
        prune(root, retention, newest=prepared.tag)


def _manifest(prepared: Prepared, written: Sequence[Written]) -> Manifest:
    state = Digester()
    state.update(memoryview(prepared.state))
    files = {STATE: FileRecord(len(prepared.state), tuple(state.finish()))}
    places: dict[tuple[str, str], list[Chunk]] = {}
    for records, chunks in written:
        files |= records
        for part, name, chunk in chunks:
            places.setdefault((part, name), []).append(chunk)
    entries = [
        replace(entry, chunks=tuple(sorted(places.get((entry.part, entry.name), ()), key=lambda chunk: chunk.start)))
        for entry in prepared.entries
    ]
    check_coverage(entries)
    contents = prepared.contents
    return Manifest(
        tag=prepared.tag,
        step=contents.step,
        saved_at=time.time(),
        entries=(*contents.views, *entries),
        files=files,
        aliases=dict(contents.aliases),
        block_bytes=BLOCK_BYTES,
        **contents.about,
    )


def _readable(size: int) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size = size / 1024  # type: ignore[assignment]
    return f"{size:.4g} TiB"
