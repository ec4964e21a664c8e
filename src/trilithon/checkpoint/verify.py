"""Is a checkpoint whole and unchanged? Every byte of every file is read and held against the manifest."""

from __future__ import annotations

import os
import zipfile
from dataclasses import dataclass
from pathlib import Path

from trilithon.checkpoint.deepspeed_layout import locate, take_inventory
from trilithon.checkpoint.deepspeed_reader import is_deepspeed
from trilithon.checkpoint.deepspeed_tensors import disagreements, find_tensors
from trilithon.checkpoint.digest import block_digest
from trilithon.checkpoint.manifest import MANIFEST, POINTER, Manifest, check_coverage, read_manifest
from trilithon.checkpoint.reader import pointed
from trilithon.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong, and in which file. tensors: those that lie in the damaged bytes, as "part/name"."""

    file: str
    text: str
    tensors: tuple[str, ...] = ()

    def __str__(self) -> str:
        held = f" ({', '.join(self.tensors[:3])}{', ...' if len(self.tensors) > 3 else ''})" if self.tensors else ""
        return f"{self.file}: {self.text}{held}"


def verify(folder: Path | str, tag: str | None = "latest") -> list[Problem]:
    """Everything that is wrong with one checkpoint; [] when it is whole.

    In a checkpoint of DeepSpeed the records of each file are held against the checksums that torch.save wrote, and the
    files must hold every element of every parameter. Raises CheckpointError when there is no checkpoint of this name.
    """
    if is_deepspeed(folder, tag):
        return _verify_deepspeed(Path(folder), tag)
    path = resolve(Path(folder), tag)
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return [Problem(MANIFEST, str(error))]
    problems = []
    for name in manifest.files:
        problems += _verify_file(path, manifest, name)
    try:
        check_coverage(manifest.entries)
    except CheckpointError as error:
        problems.append(Problem(MANIFEST, str(error)))
    known = {MANIFEST, *manifest.files}
    problems += [
        Problem(extra.name, "is not in the manifest: it does not belong to this checkpoint")
        for extra in sorted(path.iterdir())
        if extra.name not in known
    ]
    return problems


def resolve(root: Path, tag: str | None) -> Path:
    """The folder of one checkpoint of ours, whatever its state; raises CheckpointError when there is none."""
    if root.is_file():
        raise CheckpointError(f"{root} is a file. Pass the folder that holds checkpoints, or that of one of them.")
    if tag not in (None, POINTER):
        path = root / str(tag)
    elif (root / MANIFEST).exists():
        path = root
    else:
        named = pointed(root) if root.is_dir() else None
        if named is None:
            raise CheckpointError(f"{root} holds no checkpoint: there is neither a {POINTER} file nor a {MANIFEST}.")
        path = root / named
    if not path.is_dir():
        raise CheckpointError(f"{path} does not exist, so there is no checkpoint to look at.")
    return path


def _verify_file(folder: Path, manifest: Manifest, name: str) -> list[Problem]:
    record, path = manifest.files[name], folder / name
    try:
        size = path.stat().st_size
        if size != record.bytes:
            return [Problem(name, f"has {size} bytes, and the manifest says {record.bytes}: it was cut or replaced")]
        problems = []
        with path.open("rb", buffering=0) as file:
            for index, digest in enumerate(record.blocks):
                block = _read(file.fileno(), min(manifest.block_bytes, record.bytes - index * manifest.block_bytes))
                if block_digest(block) != digest:
                    start = index * manifest.block_bytes
                    text = f"bytes {start} to {start + len(block) - 1} do not match their digest"
                    problems.append(Problem(name, text, _tensors_in(manifest, name, start, start + len(block))))
        return problems
    except FileNotFoundError:
        return [Problem(name, "is missing", _tensors_in(manifest, name, 0, record.bytes))]
    except OSError as error:
        return [Problem(name, f"cannot be read: {error.strerror}")]


def _read(descriptor: int, count: int) -> bytearray:
    block = bytearray(count)
    view = memoryview(block)
    while view:
        got = os.readv(descriptor, [view])
        if got == 0:
            break
        view = view[got:]
    return block


def _tensors_in(manifest: Manifest, file: str, start: int, stop: int) -> tuple[str, ...]:
    found = []
    for entry in manifest.entries:
        for chunk in entry.chunks:
            end = chunk.offset + chunk.numel * entry.torch_dtype.itemsize
            if chunk.file == file and chunk.offset < stop and end > start:
                found.append(f"{entry.part}/{entry.name}")
                break
    return tuple(found)


def _verify_deepspeed(folder: Path, tag: str | None) -> list[Problem]:
    """Every record of every file against its CRC-32, which torch.save writes, and every parameter for being whole."""
    path = locate(folder, tag)
    assert path is not None
    try:
        files = take_inventory(path).files
    except CheckpointError as error:
        return [Problem(path.name, str(error))]
    problems = []
    for file in files:
        name = str(file.relative_to(path))
        try:
            with zipfile.ZipFile(file) as archive:
                damaged = archive.testzip()
        except (zipfile.BadZipFile, OSError, EOFError) as error:
            problems.append(Problem(name, f"cannot be read as a file of torch.save: {error}"))
            continue
        if damaged is not None:
            problems.append(Problem(name, f"record {damaged} does not match its checksum"))
    if not problems:
        try:
            wrong = disagreements(find_tensors(take_inventory(path)))
        except CheckpointError as error:
            return [Problem(path.name, str(error))]
        if wrong:
            text = "the weights in the model file are not those in the optimizer's files, rounded"
            problems.append(Problem(path.name, text, tuple(f"master/{name}" for name in wrong)))
    return problems
