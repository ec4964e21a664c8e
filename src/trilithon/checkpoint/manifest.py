"""The manifest: what a checkpoint holds, in which bytes of which files, and how to tell that they are intact.

It is one JSON document, written last. Its last key is the SHA-256 of the text before it, so that a change of any byte
of the manifest itself shows as well. Tensors are named by part and name and cut into ranges of their flattened
elements; nothing in it depends on which rank wrote what. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from trilithon.checkpoint.digest import BLOCK_BYTES
from trilithon.errors import CheckpointError

FORMAT, VERSION = "trilithon-checkpoint", 1
MANIFEST, STATE, POINTER = "MANIFEST.json", "state.json", "latest"

DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "complex64": torch.complex64,
    "complex128": torch.complex128,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint64": torch.uint64,
    "uint32": torch.uint32,
    "uint16": torch.uint16,
    "uint8": torch.uint8,
    "bool": torch.bool,
}


def dtype_name(dtype: torch.dtype) -> str:
    """As in torch and numpy: "float32". Raises CheckpointError for a type that has no place in a file."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise CheckpointError(f"tensors of type {dtype} cannot be saved; there are {', '.join(DTYPES)}.")
    return name


@dataclass(frozen=True, slots=True)
class Chunk:
    """Elements [start, start + numel) of a flattened tensor, contiguous at byte `offset` of `file`."""

    file: str
    offset: int
    start: int
    numel: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor. dtype: as torch names it; shape: of the whole.

    of: for a tensor that is not stored, the part whose values, rounded to `dtype`, are its own.
    """

    part: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...] = ()
    of: str | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size of a file and the digests of its blocks, in order."""

    bytes: int
    blocks: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """Plain data. zero_stage, world_size, precision and config describe the run that saved; loading does not need them.

    aliases: second names of tied parameters and shared buffers -> the name under which they are stored.
    """

    tag: str
    step: int
    saved_at: float  # seconds since 1970, by the clock of rank 0
    world_size: int
    zero_stage: int
    precision: str
    config: Mapping[str, Any]
    library: str
    entries: tuple[Entry, ...]
    files: Mapping[str, FileRecord]
    aliases: Mapping[str, str] = field(default_factory=dict)
    block_bytes: int = BLOCK_BYTES
    version: int = VERSION

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """By part: tensors, elements and stored bytes."""
        found: dict[str, dict[str, int]] = {}
        for entry in self.entries:
            one = found.setdefault(entry.part, {"tensors": 0, "elements": 0, "bytes": 0})
            one["tensors"] += 1
            one["elements"] += entry.numel
            one["bytes"] += sum(chunk.numel for chunk in entry.chunks) * entry.torch_dtype.itemsize
        return found

    @property
    def bytes(self) -> int:
        """Of all files but the manifest."""
        return sum(record.bytes for record in self.files.values())


def encode(manifest: Manifest) -> bytes:
    """The document, ending in the digest of everything before it."""
    content: dict[str, Any] = {"format": FORMAT, "version": manifest.version}
    content |= {key: value for key, value in asdict(manifest).items() if key not in content}
    content["counts"] = manifest.counts
    content["files"] = {name: {"bytes": f.bytes, "blocks": list(f.blocks)} for name, f in manifest.files.items()}
    content["entries"] = [
        {key: value for key, value in asdict(entry).items() if key != "chunks" and value is not None}
        | {"chunks": [[chunk.file, chunk.offset, chunk.start, chunk.numel] for chunk in entry.chunks]}
        for entry in manifest.entries
    ]
    entries = content.pop("entries")  # a line each, so that people can read the document and compare two
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()]
    listed = ",\n".join(f"  {json.dumps(entry)}" for entry in entries)
    lines.append(f' "entries": [\n{listed}\n ]' if entries else ' "entries": []')
    head = "{\n" + ",\n".join(lines)
    return f'{head},\n "sha256": "{hashlib.sha256(head.encode()).hexdigest()}"\n}}\n'.encode()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint in `folder`.

    Raises CheckpointError when it is missing, damaged, or of a version that this release does not know.
    """
    path = folder / MANIFEST
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} holds no {MANIFEST}: it is not a checkpoint, or the save that wrote it never ended. "
            f"{_foreign(folder)}"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    return decode(raw, path)


def _foreign(folder: Path) -> str:
    """What else the folder may be."""
    if (folder / ".metadata").exists():
        return "It looks like a checkpoint of torch.distributed.checkpoint, which this library does not read."
    return "Name another tag."


def decode(raw: bytes, path: Path) -> Manifest:
    """Parse and check; path: for messages."""
    damaged = f"{path} is damaged: %s. Use another checkpoint; `trilithon checkpoint verify` names every damage."
    head, mark, tail = raw.rpartition(b',\n "sha256": "')
    expected = hashlib.sha256(head).hexdigest().encode() + b'"\n}\n'
    try:
        content = json.loads(raw)
    except ValueError:
        raise CheckpointError(damaged % "it is not a JSON document") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{path} is a JSON document, but not the manifest of a checkpoint of this library.")
    version = content.get("version")
    if isinstance(version, int) and version > VERSION:
        raise CheckpointError(
            f"{path} has format version {version}, written by trilithon {content.get('library')}; this release reads "
            f"up to version {VERSION}. Install a newer trilithon."
        )
    if not mark or tail != expected:
        raise CheckpointError(damaged % "its own digest does not match")
    try:
        return _manifest(content)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(damaged % f"{type(error).__name__}: {error}") from error


def _manifest(content: Mapping[str, Any]) -> Manifest:
    entries = tuple(
        Entry(
            part=entry["part"],
            name=entry["name"],
            dtype=entry["dtype"],
            shape=tuple(entry["shape"]),
            chunks=tuple(Chunk(*chunk) for chunk in entry["chunks"]),
            of=entry.get("of"),
        )
        for entry in content["entries"]
    )
    for entry in entries:
        DTYPES[entry.dtype]
    files = {name: FileRecord(file["bytes"], tuple(file["blocks"])) for name, file in content["files"].items()}
    plain = ("tag", "step", "saved_at", "world_size", "zero_stage", "precision", "config", "library", "aliases")
    return Manifest(**{key: content[key] for key in (*plain, "block_bytes", "version")}, entries=entries, files=files)


def check_coverage(entries: Sequence[Entry]) -> None:
    """Raise CheckpointError unless the chunks of every stored tensor are its elements, each exactly once."""
    for entry in entries:
        if entry.of is not None:
            continue
        at = 0
        for chunk in sorted(entry.chunks, key=lambda chunk: chunk.start):
            if chunk.start != at:
                what = "held by no rank" if chunk.start > at else "held twice"
                low, high = sorted((at, chunk.start))
                raise CheckpointError(f"{entry.part} of '{entry.name}': elements {low} to {high - 1} are {what}.")
            at += chunk.numel
        if at != entry.numel:
            raise CheckpointError(
                f"{entry.part} of '{entry.name}': elements {at} to {entry.numel - 1} are held by no rank."
            )
