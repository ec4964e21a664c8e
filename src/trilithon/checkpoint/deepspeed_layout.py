"""Which files a folder of DeepSpeed holds, and whether they can be read: names and counts, no tensors.

    latest                                              the tag, text
    TAG/mp_rank_00_model_states.pt                      stages 0 to 2
    TAG/zero_pp_rank_D_mp_rank_00_model_states.pt       stage 3, one for each rank
    TAG/[bf16_]zero_pp_rank_D_mp_rank_00_optim_states.pt
    TAG/layer_L_expert_E_mp_rank_00_model_states.pt     experts
    TAG/layer_LL-model_states.pt, mp_rank_SS_*          layers and stages of a pipeline
    TAG/zero/PARAMETER/{fp32,exp_avg,...}.pt            universal layout

The layout is that of DeepSpeed 0.7 to 0.19, as observed in the files that release 0.19.8 writes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trilithon.checkpoint.deepspeed_pipeline import LAYER
from trilithon.checkpoint.manifest import MANIFEST
from trilithon.errors import CheckpointError

_MODEL = re.compile(r"^(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt$")
_OPTIMIZER = re.compile(r"^(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt$")
_EXPERT = re.compile(r"^layer_\d+_expert_\d+_mp_rank_\d+_model_states\.pt$")
_POINTERS = ("latest", "latest_universal")


@dataclass(frozen=True)
class Inventory:
    """The files of one tag. model: in order of rank (one at stages 0 to 2); optimizer: likewise."""

    path: Path
    model: tuple[Path, ...]
    optimizer: tuple[Path, ...]
    atoms: Path | None  # the folder of the universal layout
    other_models: tuple[Path, ...] = ()  # of further stages, or of further model-parallel ranks of a universal layout
    other_optimizers: tuple[tuple[Path, ...], ...] = ()  # of further stages, each by data-parallel rank
    layers: tuple[Path, ...] = ()  # of a pipeline
    experts: tuple[Path, ...] = ()

    @property
    def files(self) -> list[Path]:
        atoms = sorted(self.atoms.rglob("*.pt")) if self.atoms is not None else []
        optimizer = [*self.optimizer, *(path for stage in self.other_optimizers for path in stage)]
        return [*self.model, *self.other_models, *optimizer, *self.layers, *self.experts, *atoms]


def locate(folder: Path, tag: str | None) -> Path | None:
    """The folder with DeepSpeed's files that this names; None when there are none.

    folder: what was given to `save_checkpoint`, or the folder of one tag. tag: None or "latest" for the one that the
    file `latest` (or `latest_universal`) names.
    """
    if tag not in (None, "latest"):
        return folder / str(tag) if _holds_files(folder / str(tag)) else None
    if _holds_files(folder):
        return folder
    for pointer in _POINTERS:
        named = _text(folder / pointer)
        if named and _holds_files(folder / named):
            return folder / named
        if named and (folder / named / MANIFEST).exists():
            return None  # the newest one here is of this library
    return None


def _holds_files(path: Path) -> bool:
    if not path.is_dir() or (path / MANIFEST).exists():
        return False
    return any(path.glob("*mp_rank_*_model_states.pt")) or any(path.glob("zero/*/fp32.pt"))


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def take_inventory(path: Path) -> Inventory:
    """Sort the files of one tag. Raises CheckpointError for what is missing and for layouts that are not read."""
    names = sorted(entry.name for entry in path.iterdir())
    atoms = path / "zero" if (path / "zero").is_dir() else None
    if atoms is None:
        _refuse_parallel(path, names)
    model = _ranked(path, names, _MODEL)
    optimizer = () if atoms is not None else _ranked(path, names, _OPTIMIZER)
    if atoms is None and not model:
        raise CheckpointError(f"{path} holds no model_states file. Copy the whole folder that DeepSpeed wrote.")
    others = [path / name for name in names if _MODEL.match(name) and path / name not in model]
    if atoms is not None:
        return Inventory(path, tuple(model), (), atoms, tuple(others))
    layers = tuple(path / name for name in names if LAYER.match(name))
    stages = len(others) if layers else 0
    return Inventory(
        path,
        tuple(model),
        tuple(optimizer),
        None,
        tuple(others),
        tuple(tuple(_ranked(path, names, _OPTIMIZER, stage)) for stage in range(1, stages + 1)),
        layers,
        tuple(path / name for name in names if _EXPERT.match(name)),
    )


def _ranked(path: Path, names: Sequence[str], pattern: re.Pattern[str], part: int = 0) -> list[Path]:
    """The files of one model-parallel rank (or stage) that match, by data-parallel rank.

    Raises CheckpointError if a rank in between has none.
    """
    found: dict[int, Path] = {}
    for name in names:
        match = pattern.match(name)
        if match is not None and int(match[2]) == part:
            found[int(match[1] or 0)] = path / name
    missing = sorted(set(range(max(found, default=-1) + 1)) - set(found))
    if missing:
        example = next(iter(found.values())).name
        raise CheckpointError(
            f"{path} holds files such as {example} up to rank {max(found)}, but none of rank {missing[0]}. Copy the "
            "files of all ranks: each holds a part of every parameter."
        )
    return [found[rank] for rank in sorted(found)]


_UNIVERSAL = "Convert it with DeepSpeed's own ds_to_universal first: that layout holds whole parameters and is read."
_TENSOR_PARALLEL = (r"mp_rank_(?!00_)\d+_model_states\.pt$", "of several model-parallel ranks (mp_rank_01)", _UNIVERSAL)
_UNREAD = {
    r"^layer_\d+-model_(?!00-)\d+-model_states\.pt$": ("of a pipeline with tensor-parallel ranks", _UNIVERSAL),
    r"^expert_\d+_mp_rank_\d+_model_states\.pt$": (
        "with experts in the old form (expert_E_mp_rank_*), which does not name their layer",
        "Load it in DeepSpeed and save it again.",
    ),
    r"^offloaded_tensors$": (
        "with optimizer state in swap files (offloaded_tensors)",
        "Save once more in DeepSpeed with the state on the host (offload_optimizer.device: cpu).",
    ),
}


def _refuse_parallel(path: Path, names: Sequence[str]) -> None:
    """Parameters cut over tensor-parallel ranks need rules that are not in the files."""
    unread = dict(_UNREAD)
    if not any(LAYER.match(name) for name in names):  # else the numbers are those of stages
        pattern, *told = _TENSOR_PARALLEL
        unread[pattern] = (told[0], told[1])
    elif any(_EXPERT.match(name) for name in names):
        raise CheckpointError(f"{path} is a checkpoint of a pipeline with experts, which is not read. {_UNIVERSAL}")
    for pattern, (kind, way_out) in unread.items():
        if any(re.search(pattern, name) for name in names):
            raise CheckpointError(f"{path} is a checkpoint {kind}, which is not read directly. {way_out}")
