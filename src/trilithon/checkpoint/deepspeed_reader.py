"""A folder of DeepSpeed as a checkpoint of this library: the same entries, the same reads.

    with open_deepspeed("runs/old", tag="global_step1000") as saved:
        weight = saved.read("master", "layers.0.attention.weight")

Whatever works on our own checkpoints (loading into an engine, export, comparison, conversion) works on it. Only
the bytes that are asked for are read: DeepSpeed's files are mapped into memory, not loaded. There are no checksums in
them to hold the bytes against.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trilithon.checkpoint.deepspeed_layout import locate, take_inventory
from trilithon.checkpoint.deepspeed_pieces import Assembly
from trilithon.checkpoint.deepspeed_state import extra_of, precision_of
from trilithon.checkpoint.deepspeed_tensors import Found, Name, find_tensors
from trilithon.checkpoint.manifest import Entry, FileRecord, Manifest, dtype_name
from trilithon.checkpoint.reader import CheckpointReader, Range
from trilithon.errors import CheckpointError

logger = logging.getLogger(__name__)


class DeepSpeedValues:
    """`reader.Values` of the files of DeepSpeed."""

    def __init__(self, folder: Path, found: Found) -> None:
        self._folder, self._found, self._tensors = folder, found, found.tensors
        self.bytes_read = 0  # of tensors

    def fill(self, ranges: Sequence[Range]) -> None:
        for entry, start, into in ranges:
            assembly = self._tensors.get((entry.part, entry.name))
            if assembly is None:
                raise CheckpointError(
                    f"{self._folder}: {entry.part} of '{entry.name}' was read after the reader closed."
                )
            assembly.copy(start, into)
            self.bytes_read += into.numel() * assembly.dtype.itemsize

    def extra(self) -> Mapping[str, Any]:
        """Without random states, which DeepSpeed does not save."""
        return extra_of(self._found)

    def close(self) -> None:
        """The files are unmapped as soon as nothing refers to their tensors."""
        self._tensors = {}


def _manifest(folder: Path, found: Found, files: Iterable[Path]) -> Manifest:
    model = found.model
    steps = int(model.get("global_steps") or 0) - int(model.get("skipped_steps") or 0)
    newest = max((path.stat().st_mtime for path in files), default=0.0)
    return Manifest(
        tag=folder.name,
        step=max(steps, 0),
        saved_at=newest,
        world_size=found.ranks,
        zero_stage=found.stage,
        precision=precision_of(found),
        config=found.config,
        library=f"DeepSpeed {model.get('ds_version', '(of unknown version)')}",
        entries=tuple(_entries(found.tensors, model.get("module") or ())),
        files={str(path.relative_to(folder)): FileRecord(path.stat().st_size, ()) for path in files},
        aliases=found.aliases,
    )


_ORDER = ("param", "frozen", "buffer", "master")


def _entries(tensors: Mapping[Name, Assembly], module: Iterable[str]) -> list[Entry]:
    """By part, and in the order of the model where its file tells."""
    place = {name: index for index, name in enumerate(module)}

    def rank(key: Name) -> tuple[int, str, int]:
        part, name = key
        known = _ORDER.index(part) if part in _ORDER else len(_ORDER)
        return known, "" if part in _ORDER else part, place.get(name, 0)

    found = []
    for part, name in sorted(tensors, key=rank):
        assembly = tensors[part, name]
        derived = "master" if part == "param" else None
        found.append(Entry(part, name, dtype_name(assembly.dtype), assembly.shape, of=derived))
    return found


def open_deepspeed(folder: Path | str, tag: str | None = "latest") -> CheckpointReader:
    """Open a checkpoint that DeepSpeed wrote: ZeRO stages 0 to 3, or the universal layout.

    folder: what was given to `save_checkpoint`, or the folder of one tag. Nothing in the files is run. Raises
    CheckpointError when there is none, when files are missing or damaged, and for what is not read: checkpoints cut by
    tensor or pipeline parallelism or with experts (their universal form is read), state of optimizers without names.
    """
    path = locate(Path(folder), tag)
    if path is None:
        raise CheckpointError(
            f"{folder} holds no checkpoint of DeepSpeed{'' if tag in (None, 'latest') else f' called {tag!r}'}: there "
            "is no *mp_rank_*_model_states.pt and no folder zero/."
        )
    inventory = take_inventory(path)
    found = find_tensors(inventory)
    manifest = _manifest(path, found, inventory.files)
    reader = CheckpointReader(path, manifest, DeepSpeedValues(path, found))
    if found.stage == 0:
        logger.warning("%s holds weights and no optimizer state that has names: stage 0, or a partial copy", path)
    return reader


def is_deepspeed(folder: Path | str, tag: str | None = "latest") -> bool:
    """Whether `open_deepspeed` would find something."""
    return locate(Path(folder), tag) is not None
