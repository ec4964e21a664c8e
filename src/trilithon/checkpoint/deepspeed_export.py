"""A checkpoint in DeepSpeed's own layout, for DeepSpeed to load and go on from.

    export_deepspeed("runs/7b", "for_deepspeed", ranks=8, zero_stage=3)

Any checkpoint that this library opens, saved at whatever stage and on however many ranks, is written for the stage and
number of ranks that are asked for. DeepSpeed is not needed for it. The model and the parameter groups over there must
be the same, in the same order; names of parameters are kept.
"""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from trilithon.checkpoint import durable
from trilithon.checkpoint.asked import folder_asked, tag_asked
from trilithon.checkpoint.deepspeed_contents import Shapes, model_states, optimizer_states, sub_groups
from trilithon.checkpoint.deepspeed_source import Source
from trilithon.checkpoint.deepspeed_state import RESERVED
from trilithon.checkpoint.deepspeed_write import write_file
from trilithon.checkpoint.opening import open_checkpoint
from trilithon.errors import CheckpointError

SUB_GROUP_NUMEL = 10**9
"""DeepSpeed's default of zero_optimization.sub_group_size."""

Stage = Literal[0, 1, 2, 3]


@dataclass(frozen=True, slots=True)
class ExportedFiles:
    """What was written: the folder of the tag, its files in order, and for how many ranks."""

    folder: Path
    files: tuple[str, ...]
    ranks: int
    zero_stage: int
    bytes: int


def export_deepspeed(
    folder: Path | str,
    out: Path | str,
    *,
    tag: str | None = "latest",
    out_tag: str | None = None,
    ranks: int | None = None,
    zero_stage: Stage | None = None,
    universal: bool = False,
    sub_group_numel: int = SUB_GROUP_NUMEL,
) -> ExportedFiles:
    """Write a checkpoint for DeepSpeed under `out`, and `out/latest` with its tag.

    ranks: data-parallel ranks that will load it; None for as many as saved. zero_stage: theirs; None for the one that
    saved, and 0 for weights alone, without optimizer state. out_tag: None for DeepSpeed's own form, global_stepN.
    universal: one file per parameter and state (`latest_universal`), which any number of ranks load with
    checkpoint.load_universal. sub_group_numel: what the loading run has as sub_group_size; counts at stage 3.

    Memory: one rank's part. The folder gets its name when all files are complete. Raises CheckpointError for optimizer
    state that DeepSpeed's files have no place for, a tag that is there already, and whatever reading finds.
    """
    target, tag = folder_asked(out, "out"), tag_asked(tag)
    with open_checkpoint(folder, tag) as reader:
        stage = reader.manifest.zero_stage if zero_stage is None else zero_stage
        count = reader.manifest.world_size if ranks is None else ranks
        _check(stage, count, universal=universal)
        source = Source(reader, weights_only=stage == 0)
        _check_client_state(source)
        steps = int(source.counters["steps"]) + int(source.counters["skipped_steps"])
        name = out_tag or f"global_step{steps}{'_universal' if universal else ''}"
        if (target / name).exists():
            raise CheckpointError(f"{target / name} is there already. Choose another folder, or another out_tag.")
        cut = sub_groups(source, stage, count, sub_group_numel)
        planned = _universal_files(source, stage, count, cut) if universal else _files(source, stage, count, cut)
        written = _write(target, name, planned)
    pointer = "latest_universal" if universal else "latest"
    durable.replace_file(target / pointer, name.encode(), str(os.getpid()))
    total = sum((target / name / file).stat().st_size for file in written)
    return ExportedFiles(target / name, tuple(written), count, stage, total)


def _check(stage: int, ranks: int, *, universal: bool) -> None:
    if stage not in (0, 1, 2, 3):
        raise CheckpointError(f"zero_stage={stage!r}: it is 0 (weights alone), 1, 2 or 3.")
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise CheckpointError(f"ranks={ranks!r}: give the number of data-parallel ranks, a whole number of at least 1.")
    if universal and stage == 0:
        raise CheckpointError("universal=True holds optimizer state, so that zero_stage is 1, 2 or 3 with it.")


def _check_client_state(source: Source) -> None:
    taken = [key for key in source.own.get("client_state") or {} if key in RESERVED]
    if taken:
        raise CheckpointError(
            f"the client_state holds {', '.join(taken)}, which DeepSpeed keeps beside it under the same name. Save it "
            "under another name."
        )


Content = tuple[str, Any]  # path below the tag's folder, what stands in the file


def _files(source: Source, stage: int, ranks: int, cut: list[tuple[int, Shapes]]) -> Iterator[Content]:
    prefix = "bf16_" if source.reader.manifest.precision == "bf16" else ""
    for rank in range(ranks):
        if stage == 3 or rank == 0:
            name = f"zero_pp_rank_{rank}_mp_rank_00" if stage == 3 else "mp_rank_00"
            yield f"{name}_model_states.pt", model_states(source, stage, rank, ranks, cut)
        if stage:
            states = optimizer_states(source, stage, rank, ranks, cut)
            yield f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", states


def _universal_files(source: Source, stage: int, ranks: int, cut: list[tuple[int, Shapes]]) -> Iterator[Content]:
    for rank in range(ranks if stage == 3 else 1):
        name = f"zero_pp_rank_{rank}_mp_rank_00" if stage == 3 else "mp_rank_00"
        yield f"{name}_model_states.pt", model_states(source, stage, rank, ranks, cut)
    states = optimizer_states(source, stage, 0, ranks, cut)["optimizer_state_dict"]
    held = ("base_optimizer_state", "single_partition_of_fp32_groups", "param_slice_mappings")
    groups = (states.get("base_optimizer_state") or states.get("optimizer_state_dict"))["param_groups"]
    yield "zero/optimizer_state.pt", {**{k: v for k, v in states.items() if k not in held}, "param_groups": groups}
    for group in source.groups:
        for name, shape in group.shapes.items():
            one = OrderedDict({name: shape})
            for part in ("master", *source.fields):
                values = source.values(part, one, 0, math.prod(shape))
                content = values if stage == 3 else {"cat_dim": 0, "param": values.view(shape)}
                yield f"zero/{name}/{'fp32' if part == 'master' else part}.pt", content
            if stage < 3:  # there it stands in optimizer_state.pt
                yield f"zero/{name}/step.pt", torch.tensor(float(source.updates))
    for entry in source.reader.entries("frozen") if stage < 3 else ():
        yield f"zero/{entry.name}/fp32.pt", {"param": source.read(entry).float()}


def _write(target: Path, name: str, files: Iterator[Content]) -> list[str]:
    """All files in a hidden folder, which then gets its name; nothing is left behind by a failure."""
    made = durable.made_for(target)
    hidden = target / f".{name}.{os.getpid()}.partial"
    written = []
    try:
        durable.make_folder(hidden)
        for path, content in files:
            durable.make_folder((hidden / path).parent)
            write_file(content, hidden / path)
            written.append(path)
        for folder in sorted({(hidden / path).parent for path in written}):
            durable.sync_folder(folder)
        durable.rename(hidden, target / name)
    except BaseException:
        durable.remove_folder(hidden)
        durable.unmake(made)
        raise
    return written
