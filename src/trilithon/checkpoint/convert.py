"""A checkpoint as another one of this library: out of DeepSpeed's files, in another type, or with the weights alone.

Nothing is computed and nobody trains: values go from one to the other a tensor at a time. What comes out is complete
or not there, verified like any save, and loads at any stage and number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trilithon.checkpoint.agreement import Alone
from trilithon.checkpoint.asked import folder_asked
from trilithon.checkpoint.export import portions
from trilithon.checkpoint.manifest import Entry, dtype_name
from trilithon.checkpoint.opening import open_checkpoint
from trilithon.checkpoint.reader import CheckpointReader
from trilithon.checkpoint.save import FILE_BYTES, Contents, save
from trilithon.checkpoint.table import Holding, Span
from trilithon.errors import CheckpointError
from trilithon.version import __version__

_WEIGHTS = ("master", "frozen", "buffer")
_PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def convert(
    folder: Path | str,
    out: Path | str,
    *,
    tag: str | None = "latest",
    out_tag: str | None = None,
    dtype: torch.dtype | None = None,
    weights_only: bool = False,
    file_bytes: int = FILE_BYTES,
) -> Path:
    """Write the checkpoint anew under `out`, and return its folder.

    dtype: type of the weights, trained and frozen, which makes the result weights only; None leaves every tensor in its
    type. weights_only: leave the optimizer's state, the schedule and counters of the run out. Memory: the largest
    tensor. Raises CheckpointError as reading and saving do.
    """
    folder_asked(out, "out")
    with open_checkpoint(folder, tag) as reader:
        name = out_tag or reader.manifest.tag
        if (Path(out) / name).exists():
            raise CheckpointError(f"{Path(out) / name} is there already. Choose another folder, or another out_tag.")
        bare = weights_only or dtype is not None
        entries = [entry for entry in reader.entries() if entry.of is None]
        if bare:
            entries = [entry for entry in entries if entry.part in _WEIGHTS]
        contents = Contents(
            step=reader.manifest.step,
            holdings=[_holding(reader, entry, dtype) for entry in entries],
            views=[_view(entry, dtype) for entry in reader.entries() if entry.of is not None],
            aliases=reader.manifest.aliases,
            shared=_shared(reader, bare),
            everybody=_ranks(reader, bare),
            about=_about(reader, dtype),
        )
        return save(Path(out), name, contents, Alone(), file_bytes=file_bytes)


def _shared(reader: CheckpointReader, bare: bool) -> dict[str, Any]:
    own = reader.extra["ranks"][0]
    shared = {key: value for key, value in reader.extra.items() if key != "ranks" and key not in own}
    return {**shared, "groups": [], "schedule": None} if bare else shared


def _ranks(reader: CheckpointReader, bare: bool) -> list[Mapping[str, Any]]:
    ranks = list(reader.extra["ranks"])
    return [{"client_state": ranks[0]["client_state"], "stateful": {}}] if bare else ranks


def _about(reader: CheckpointReader, dtype: torch.dtype | None) -> dict[str, Any]:
    saved = reader.manifest
    return {
        "world_size": saved.world_size,
        "zero_stage": saved.zero_stage,
        "precision": _PRECISIONS.get(dtype, saved.precision) if dtype is not None else saved.precision,
        "config": saved.config,
        "library": f"{__version__} (converted from {saved.library})",
    }


def _holding(reader: CheckpointReader, entry: Entry, dtype: torch.dtype | None) -> Holding:
    kept = dtype if dtype is not None and _is_weight(entry) else entry.torch_dtype
    span = Span(entry.part, entry.name, kept, entry.shape, 0, entry.numel, 0)
    return Holding(f"{entry.part}/{entry.name}", (span,), _opener(reader, entry, kept))


def _opener(
    reader: CheckpointReader, entry: Entry, dtype: torch.dtype
) -> Callable[[], AbstractContextManager[Mapping[str, Tensor]]]:
    @contextmanager
    def open_() -> Iterator[Mapping[str, Tensor]]:
        flat = torch.empty(entry.numel, dtype=dtype)
        at = 0
        for values in portions(reader, entry):
            flat[at : at + values.numel()] = values
            at += values.numel()
        yield {entry.part: flat}

    return open_


def _is_weight(entry: Entry) -> bool:
    return entry.part in ("master", "frozen") and entry.torch_dtype.is_floating_point


def _view(entry: Entry, dtype: torch.dtype | None) -> Entry:
    return replace(entry, chunks=(), dtype=dtype_name(dtype) if dtype is not None else entry.dtype)
