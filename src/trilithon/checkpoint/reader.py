"""Reading a checkpoint: no engine, no process group, and never more of it in memory than what was asked for.

    with open_checkpoint("runs/7b") as saved:
        weight = saved.read("param", "blocks.0.mlp.up.weight")

`entries` says what there is; `read` returns whole tensors or ranges of their flattened elements, checked.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from trilithon.checkpoint.manifest import MANIFEST, POINTER, STATE, Entry, Manifest, read_manifest
from trilithon.checkpoint.payload import VerifiedFiles
from trilithon.checkpoint.plain import from_json
from trilithon.errors import CheckpointError

logger = logging.getLogger(__name__)
_OTHER = ". Load another checkpoint."


@dataclass(frozen=True, slots=True)
class Wanted:
    """Where elements [start, start + numel) of one tensor are to go: flat, of any floating type if that is one."""

    entry: Entry
    start: int
    into: Tensor  # [numel]


@dataclass(frozen=True, slots=True)
class _Read:
    """Values at `offset` of a file, stored as `dtype`, that go to `into`."""

    file: str
    offset: int
    into: Tensor  # flat
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return self.into.numel() * self.dtype.itemsize

    @property
    def direct(self) -> bool:
        """The bytes of the file are those of the destination."""
        return self.into.dtype == self.dtype and self.into.device.type == "cpu" and self.into.is_contiguous()


def _joined(reads: Sequence[_Read]) -> list[_Read]:
    """Neighbours in the file that are neighbours in memory become one, so that more whole blocks go straight there."""
    found: list[_Read] = []
    for read in reads:
        last = found[-1] if found else None
        if (
            last is not None
            and last.direct
            and read.direct
            and (last.file, last.dtype) == (read.file, read.dtype)
            and last.offset + last.bytes == read.offset
            and last.into.data_ptr() + last.bytes == read.into.data_ptr()
            and last.into.untyped_storage().data_ptr() == read.into.untyped_storage().data_ptr()
        ):
            numel = last.into.numel() + read.into.numel()
            found[-1] = _Read(last.file, last.offset, last.into.as_strided((numel,), (1,)), last.dtype)
        else:
            found.append(read)
    return found


Range = tuple[Entry, int, Tensor]  # a stored entry, the first element, and where the values go: flat


class Values(Protocol):
    """Where the values of a checkpoint come from: our own files, or those of another program."""

    @property
    def bytes_read(self) -> int: ...

    def fill(self, ranges: Sequence[Range]) -> None:
        """Read each range to where it goes, in the type that is there."""
        ...

    def extra(self) -> Mapping[str, Any]: ...

    def close(self) -> None: ...


class CheckpointReader:
    """One checkpoint on disk. A context manager that closes its files.

    values: where they come from; the files that the manifest names when it is not given.
    """

    def __init__(self, folder: Path, manifest: Manifest, values: Values | None = None) -> None:
        self.folder, self.manifest = folder, manifest
        self._entries = {(entry.part, entry.name): entry for entry in manifest.entries}
        self._values = values if values is not None else StoredValues(folder, manifest)
        self._extra: Mapping[str, Any] | None = None

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._values.close()

    @property
    def bytes_read(self) -> int:
        """From payload files, so far."""
        return self._values.bytes_read

    @property
    def parts(self) -> list[str]:
        return list(dict.fromkeys(entry.part for entry in self.manifest.entries))

    def entries(self, part: str | None = None) -> list[Entry]:
        """What there is, in the order of the model. Parts: "param" (trained weights in the type that forward read),
        "frozen", "buffer", "master" (fp32 weights), the optimizer's fields ("exp_avg", ...), "rank_state", "window"."""
        return [entry for entry in self.manifest.entries if part is None or entry.part == part]

    def find(self, part: str, name: str) -> Entry | None:
        """An entry by its name or by that of a parameter tied to it."""
        return self._entries.get((part, name)) or self._entries.get((part, self.manifest.aliases.get(name, name)))

    def entry(self, part: str, name: str) -> Entry:
        """As `find`. Raises CheckpointError when there is none."""
        found = self.find(part, name)
        if found is None:
            raise CheckpointError(
                f"{self.folder} holds no {part} of '{name}'. It holds {', '.join(self.parts)}; "
                f"{len(self.entries(part))} tensors are in part '{part}'."
            )
        return found

    def read(self, part: str, name: str, start: int = 0, numel: int | None = None) -> Tensor:
        """Elements [start, start + numel) of a flattened tensor, flat; the whole tensor in its shape when not given.

        Raises CheckpointError when there is no such tensor or range, and when a file is missing or damaged.
        """
        entry = self.entry(part, name)
        count = entry.numel - start if numel is None else numel
        if start < 0 or count < 0 or start + count > entry.numel:
            raise CheckpointError(
                f"{part} of '{name}' has {entry.numel} elements; {start} to {start + count} was asked."
            )
        flat = torch.empty(count, dtype=entry.torch_dtype)
        self.fill([Wanted(entry, start, flat)])
        return flat.view(entry.shape) if numel is None and start == 0 else flat

    def fill(self, wanted: Iterable[Wanted]) -> None:
        """Read every range to where it goes. Files are read in order of their bytes, each block once."""
        self._values.fill([(self._stored(one.entry), one.start, one.into) for one in wanted])

    def _stored(self, entry: Entry) -> Entry:
        return entry if entry.of is None else self.entry(entry.of, entry.name)

    @property
    def extra(self) -> Mapping[str, Any]:
        """Everything that is not a tensor: counters, groups, schedule, scaler, loader, hooks, client_state; and under
        "ranks", for each rank that saved, what was its own, such as its random states (at the top those of rank 0)."""
        if self._extra is None:
            self._extra = self._values.extra()
        return self._extra


class StoredValues:
    """`Values` of our own files, checked block by block as they are read."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self._manifest = folder, manifest
        self._files = VerifiedFiles(folder, dict(manifest.files), manifest.block_bytes)

    @property
    def bytes_read(self) -> int:
        return self._files.bytes_read

    def close(self) -> None:
        self._files.close()

    def fill(self, ranges: Sequence[Range]) -> None:
        reads = [read for stored, start, into in ranges for read in self._reads(stored, start, into)]
        for read in _joined(sorted(reads, key=lambda read: (read.file, read.offset))):
            self._copy(read)

    def _reads(self, stored: Entry, start: int, into: Tensor) -> list[_Read]:
        """One for each chunk that overlaps: the resharding of torch.distributed.checkpoint, in one dimension."""
        dtype = stored.torch_dtype
        saved = TensorStorageMetadata(
            TensorProperties(dtype),
            torch.Size([stored.numel]),
            [_box(chunk.start, chunk.numel) for chunk in stored.chunks],
        )
        found, covered = [], 0
        for item in create_read_items_for_chunk_list(stored.name, saved, [_box(start, into.numel())]):
            assert item.storage_index.index is not None
            chunk = stored.chunks[item.storage_index.index]
            skip, at, count = item.storage_offsets[0], item.dest_offsets[0], item.lengths[0]
            offset = chunk.offset + skip * dtype.itemsize
            found.append(_Read(chunk.file, offset, into[at : at + count], dtype))
            covered += count
        if covered != into.numel():
            raise CheckpointError(
                f"{self._folder}: {stored.part} of '{stored.name}' is incomplete in the manifest: {covered} of "
                f"{into.numel()} elements from {start} on. Load another checkpoint."
            )
        return found

    def _copy(self, read: _Read) -> None:
        if read.direct:
            raw: Any = read.into.view(torch.uint8).numpy()
            self._files.read_into(read.file, read.offset, memoryview(raw))
            return
        at = 0
        for portion in self._files.read(read.file, read.offset, read.bytes):
            values = torch.frombuffer(portion, dtype=read.dtype)
            read.into[at : at + values.numel()].copy_(values)
            at += values.numel()

    def extra(self) -> Mapping[str, Any]:
        record = self._manifest.files.get(STATE)
        if record is None:
            raise CheckpointError(f"{self._folder / MANIFEST} names no {STATE}. Load another checkpoint.")
        raw = b"".join(bytes(portion) for portion in self._files.read(STATE, 0, record.bytes))
        content = from_json(json.loads(raw))
        ranks = [{**content["common"], **own} for own in content["ranks"]]
        return {**ranks[0], **content["shared"], "ranks": ranks}


def _box(start: int, numel: int) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size([start]), torch.Size([numel]))


def open_checkpoint(folder: Path | str, tag: str | None = "latest") -> CheckpointReader:
    """Open one checkpoint under `folder`. tag: its name; "latest" or None for the one that was saved last.

    folder may also be the folder of a single checkpoint. When the latest one is incomplete, the newest complete one is
    opened and a warning says so. Raises CheckpointError, different for nothing found and for found but broken.
    """
    root = Path(folder)
    if (root / MANIFEST).exists() and tag in (None, POINTER):
        return _opened(root)
    if root.is_file():
        raise CheckpointError(f"{root} is a file. Pass the folder that holds checkpoints, or that of one of them.")
    if not root.is_dir():
        raise CheckpointError(f"{root} does not exist, so there is no checkpoint to load.")
    if tag is None or tag == POINTER:
        return _newest(root)
    if not (root / tag).is_dir():
        replaced = _complete(root, [path for path in root.glob(f".{tag}.*.replaced") if path.is_dir()])
        if replaced:
            logger.warning("%s was being replaced when a save was killed; the one before is loaded", root / tag)
            return _opened(replaced[0])
        names = ", ".join(tags(root)) or "none"
        raise CheckpointError(f"{root} holds no checkpoint '{tag}'. There are: {names}.")
    return _opened(root / tag)


def tags(folder: Path | str) -> list[str]:
    """The names of the complete checkpoints under `folder`, the newest last."""
    root = Path(folder)
    candidates = [path for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")]
    return [path.name for path in _complete(root, candidates)[::-1]]


def pointed(folder: Path) -> str | None:
    """The tag that the pointer names; None without a pointer."""
    try:
        return (folder / POINTER).read_text().strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def problems_at_a_glance(folder: Path, manifest: Manifest) -> list[str]:
    """Files that are missing or have another size; contents are not read."""
    found = []
    for name, record in manifest.files.items():
        path = folder / name
        if not path.is_file():
            found.append(f"{path} is missing")
        elif path.stat().st_size != record.bytes:
            found.append(f"{path} has {path.stat().st_size} bytes instead of {record.bytes}")
    return found


def _opened(folder: Path) -> CheckpointReader:
    manifest = read_manifest(folder)
    problems = problems_at_a_glance(folder, manifest)
    if problems:
        raise CheckpointError(f"{folder} is incomplete: {'; '.join(problems[:3])}{_OTHER}")
    return CheckpointReader(folder, manifest)


def _newest(root: Path) -> CheckpointReader:
    named = pointed(root)
    complaint = f"{root / POINTER} is missing or empty"
    if named is not None:
        try:
            return open_checkpoint(root, named)
        except CheckpointError as error:
            complaint = str(error)
    candidates = [path for path in root.iterdir() if path.is_dir()]
    visible = [p for p in candidates if not p.name.startswith(".") or p.name.endswith(".replaced")]
    complete = _complete(root, visible)
    if complete:
        logger.warning("%s; the newest complete checkpoint, %s, is loaded instead", complaint, complete[0].name)
        return _opened(complete[0])
    if named is None and not any((path / MANIFEST).exists() for path in visible):
        raise CheckpointError(f"{root} holds no checkpoint. Nothing has been saved there, or no save has ended.")
    told = [complaint, *(_damage(path) for path in visible if path.name != named and (path / MANIFEST).exists())]
    more = [f"and {len(told) - 4} more"] if len(told) > 4 else []
    raise CheckpointError(f"{root} holds checkpoints, but none that is complete. {'; '.join(told[:4] + more)}")


def _damage(folder: Path) -> str:
    """What is wrong with a checkpoint that is not complete."""
    try:
        _opened(folder).close()
    except CheckpointError as error:
        return str(error).removesuffix(_OTHER)
    return f"{folder} has changed just now"


def _complete(root: Path, folders: Sequence[Path]) -> list[Path]:
    """Those that are complete, the newest first."""
    found = []
    for path in folders:
        try:
            manifest = read_manifest(path)
        except CheckpointError:
            continue
        if not problems_at_a_glance(path, manifest):
            found.append((manifest.saved_at, manifest.step, path))
    return [path for _, _, path in sorted(found, key=lambda item: item[:2], reverse=True)]
