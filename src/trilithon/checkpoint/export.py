"""Plain weights out of a checkpoint: safetensors files that any program reads, in the layout of Hugging Face.

    export("runs/7b", "exported", dtype=torch.bfloat16)
    model.load_state_dict(read_weights("runs/7b"))     # without files, where the model fits into memory

One file `model.safetensors`, or several with `model.safetensors.index.json` beside them. Values go from the checkpoint
to the files a few MiB at a time, so a model needs no more memory than its largest portion; no process group, no device
and none of the code that trained it are needed. For programs that read nothing else, the same as `pytorch_model.bin`.
"""

from __future__ import annotations

import fnmatch
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from trilithon.checkpoint import durable
from trilithon.checkpoint.asked import folder_asked
from trilithon.checkpoint.manifest import Entry
from trilithon.checkpoint.opening import open_checkpoint
from trilithon.checkpoint.payload import bytes_of, tensor_header
from trilithon.checkpoint.reader import CheckpointReader
from trilithon.errors import CheckpointError

SHARD_BYTES = 5 * 10**9
"""The size of a file at which the next one begins, unless one tensor alone is larger."""

_STEMS = {"safetensors": "model", "bin": "pytorch_model"}  # names of files end in the form itself
_PORTION = 2**20  # elements read, converted and written at a time

Tied = Literal["copy", "once"]
Form = Literal["safetensors", "bin"]


@dataclass(frozen=True, slots=True)
class Planned:
    """One tensor of the export: its name there, what it is read from, and its type there."""

    name: str
    entry: Entry
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return self.entry.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written: files in order, the index among them if there is one. bytes: of the tensors."""

    folder: Path
    files: tuple[str, ...]
    tensors: int
    bytes: int
    aliases: dict[str, str]  # tied name -> the name it repeats


def export(
    folder: Path | str,
    out: Path | str,
    *,
    tag: str | None = "latest",
    dtype: torch.dtype | None = torch.float32,
    shard_bytes: int = SHARD_BYTES,
    tied: Tied = "copy",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    frozen: bool = True,
    overwrite: bool = False,
    form: Form = "safetensors",
) -> Exported:
    """Write the weights of a checkpoint (ours or DeepSpeed's) as safetensors under `out`.

    dtype: of all floating weights, trained and frozen; trained ones come from their fp32 masters. None: as the forward
    pass read them. Buffers keep their type. tied: "copy" writes a tied parameter under each of its names, so that a
    strict load finds all; "once" writes it under the first and notes the others in the files' metadata. include,
    exclude: patterns such as "blocks.*.weight" over names. frozen: False leaves out what was not trained. form: "bin"
    for PyTorch's own files, in the memory of one of them. Files appear under their names when all of them are complete.
    Raises CheckpointError for a folder that holds an export, values that do not fit `dtype`, or no room.
    """
    if form == "bin" and tied == "once":
        raise CheckpointError('tied="once" has no place in pytorch_model.bin. Export tied="copy", or safetensors.')
    folder_asked(out, "out")
    target = Path(out)
    with open_checkpoint(folder, tag) as reader:
        planned, aliases = plan_export(reader, dtype, tied=tied, include=include, exclude=exclude, frozen=frozen)
        if not planned:
            raise CheckpointError(f"{folder} holds no weights that the patterns select; there is nothing to export.")
        shards = _shards(planned, shard_bytes)
        names = _file_names(form, len(shards))
        write = _write if form == "safetensors" else _pickle
        metadata = {"format": "pt", **(aliases if tied == "once" else {})}
        written: list[Path] = []
        made = durable.made_for(target)
        try:
            _make_room(target, form, sum(one.bytes for one in planned), overwrite=overwrite)
            for name, shard in zip(names, shards):
                written.append(_temporary(target / name))
                write(reader, shard, written[-1], metadata)
            _publish(target, form, names, shards, written)
        except BaseException:
            for path in written:
                path.unlink(missing_ok=True)
            durable.unmake(made)
            raise
    total = sum(one.bytes for one in planned)
    files = (*names, _index(form)) if len(names) > 1 else tuple(names)
    return Exported(target, files, len(planned), total, aliases)


def read_weights(
    folder: Path | str, *, tag: str | None = "latest", dtype: torch.dtype | None = torch.float32,
    include: Sequence[str] = (), exclude: Sequence[str] = (), frozen: bool = True,
) -> dict[str, Tensor]:  # fmt: skip
    """Name -> whole tensor on the CPU, which `export` would write; tied names have the same tensor.

    The arguments are those of `export`. Raises CheckpointError as it does.
    """
    with open_checkpoint(folder, tag) as reader:
        planned, aliases = plan_export(reader, dtype, include=include, exclude=exclude, frozen=frozen)
        found: dict[str, Tensor] = {}
        for one in planned:
            shared = found.get(aliases.get(one.name, ""))
            found[one.name] = _whole(reader, one) if shared is None else shared
        return found


def plan_export(
    reader: CheckpointReader,
    dtype: torch.dtype | None = torch.float32,
    *,
    tied: Tied = "copy",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    frozen: bool = True,
) -> tuple[list[Planned], dict[str, str]]:
    """What an export would write, in order, and the tied names: alias -> stored name."""
    found: dict[str, Planned] = {}
    for entry in reader.entries("param"):
        found[entry.name] = Planned(entry.name, _trained(reader, entry, dtype), dtype or entry.torch_dtype)
    for part in ("master", "frozen") if frozen else ("master",):
        for entry in reader.entries(part):
            found.setdefault(entry.name, Planned(entry.name, entry, _converted(entry.torch_dtype, dtype)))
    for entry in reader.entries("buffer"):
        found.setdefault(entry.name, Planned(entry.name, entry, entry.torch_dtype))
    known = {alias: name for alias, name in reader.manifest.aliases.items() if name in found}
    if tied == "copy":
        for alias, name in known.items():
            found[alias] = Planned(alias, found[name].entry, found[name].dtype)
    chosen = [one for one in found.values() if _selected(one.name, include, exclude)]
    return chosen, {alias: name for alias, name in known.items() if _selected(alias, include, exclude)}


def _trained(reader: CheckpointReader, entry: Entry, dtype: torch.dtype | None) -> Entry:
    """The masters, which are exact; what forward read when that is what was asked for."""
    return (reader.find("master", entry.name) or entry) if dtype is not None else entry


def _converted(stored: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and stored.is_floating_point else stored


def _selected(name: str, include: Sequence[str], exclude: Sequence[str]) -> bool:
    wanted = not include or any(fnmatch.fnmatchcase(name, pattern) for pattern in include)
    return wanted and not any(fnmatch.fnmatchcase(name, pattern) for pattern in exclude)


def _make_room(target: Path, form: Form, needed: int, *, overwrite: bool) -> None:
    durable.make_folder(target)
    there = sorted(path.name for path in target.glob(f"{_STEMS[form]}*.{form}*"))
    if there and not overwrite:
        raise CheckpointError(f"{target} holds {there[0]} already. Export to another folder, or allow overwriting it.")
    free = durable.free_bytes(target)
    if needed > free:
        raise CheckpointError(
            f"the export needs {needed} bytes and {target} has {free} left. Make room, or choose another."
        )


def _shards(planned: Sequence[Planned], limit: int) -> list[list[Planned]]:
    """Cut where the next tensor would make a file larger than `limit`; wide types first, so that all are aligned."""
    shards: list[list[Planned]] = []
    size = 0
    for one in planned:
        if not shards or (size and size + one.bytes > limit):
            shards.append([])
            size = 0
        shards[-1].append(one)
        size += one.bytes
    return [sorted(shard, key=lambda one: -one.dtype.itemsize) for shard in shards]


def _file_names(form: Form, count: int) -> list[str]:
    parts = [""] if count == 1 else [f"-{n:05d}-of-{count:05d}" for n in range(1, count + 1)]
    return [f"{_STEMS[form]}{part}.{form}" for part in parts]


def _index(form: Form) -> str:
    return f"{_STEMS[form]}.{form}.index.json"


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


def _write(reader: CheckpointReader, shard: Sequence[Planned], path: Path, metadata: dict[str, str]) -> None:
    path.unlink(missing_ok=True)
    descriptor = durable.create(path)
    try:
        header = tensor_header([(one.name, one.dtype, one.entry.shape) for one in shard], metadata)
        durable.write(descriptor, memoryview(header), path)
        for one in shard:
            for values in portions(reader, one.entry):
                durable.write(descriptor, bytes_of(_cast(values, one)), path)
        durable.sync(descriptor, path)
    finally:
        os.close(descriptor)


def _pickle(reader: CheckpointReader, shard: Sequence[Planned], path: Path, _: dict[str, str]) -> None:
    torch.save({one.name: _whole(reader, one) for one in shard}, path)
    descriptor = os.open(path, os.O_RDWR)
    try:
        durable.sync(descriptor, path)
    finally:
        os.close(descriptor)


def _whole(reader: CheckpointReader, one: Planned) -> Tensor:
    return _cast(reader.read(one.entry.part, one.entry.name), one)


def portions(reader: CheckpointReader, entry: Entry, portion: int = _PORTION) -> Iterator[Tensor]:
    """The elements of one tensor, flat, a few at a time, in order."""
    for start in range(0, entry.numel, portion):
        yield reader.read(entry.part, entry.name, start, min(portion, entry.numel - start))


def _cast(values: Tensor, one: Planned) -> Tensor:
    """Rounded to nearest. Raises CheckpointError where a finite weight would become infinite."""
    cast = values.to(one.dtype)
    if one.dtype == torch.float16 and values.dtype != torch.float16:
        lost = values.isfinite() & ~cast.isfinite()
        if lost.any():
            raise CheckpointError(
                f"'{one.name}' holds {float(values[lost].abs().max()):g}, and float16 ends at 65504: it would become "
                "infinite. Export in bfloat16 or float32."
            )
    return cast


def _publish(
    target: Path, form: Form, names: Sequence[str], shards: Sequence[Sequence[Planned]], written: Sequence[Path]
) -> None:
    """Old files go, new ones get their names, the index comes last."""
    for old in target.glob(f"{_STEMS[form]}*.{form}*"):
        old.unlink()
    for path, name in zip(written, names):
        durable.rename(path, target / name)
    if len(names) > 1:
        weight_map = {one.name: name for name, shard in zip(names, shards) for one in shard}
        total = sum(one.bytes for shard in shards for one in shard)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        durable.replace_file(target / _index(form), (json.dumps(index, indent=2) + "\n").encode(), str(os.getpid()))
