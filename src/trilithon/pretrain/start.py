"""Where a run begins: anew, or where an earlier one stopped. No torch in here.

A run keeps its checkpoints in the folder "checkpoints" beside its results. It continues in its own folder, where the
records of steps behind the checkpoint are taken back, or from another run's checkpoints in a folder of its own.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trilithon.config import BatchConfig
from trilithon.errors import CheckpointError, ConfigError
from trilithon.pretrain.settings import RunConfig

AUTO = "auto"
CHECKPOINTS, CONFIG, SAMPLE = "checkpoints", "config.json", "sample.txt"
WEIGHTS, SHAPE, TOKENIZER, CURVE = "model.pt", "model.json", "tokenizer.json", "loss.png"
RESULTS = (CHECKPOINTS, WEIGHTS, SHAPE, TOKENIZER, CONFIG, CURVE, SAMPLE, "metrics.jsonl", "csv", "tensorboard")
_POINTER, _MANIFEST = "latest", "MANIFEST.json"


@dataclass(frozen=True, slots=True)
class Start:
    """How a run begins. `checkpoints` is the folder that the newest checkpoint is loaded from, None for new weights."""

    out: Path
    checkpoints: Path | None = None
    continues: bool = False  # what `out` holds is this run's own past


def find_start(run: RunConfig, *, restarted: bool) -> Start:
    """Choose the run's folder and what it begins with; makes the folder, and changes nothing else in it.

    restarted: the launcher has started these ranks before, so what `run.out` holds is their own.
    Raises ConfigError when the folder cannot be used or holds another run, CheckpointError when there is nothing to
    continue from.
    """
    source = None if run.resume in (None, AUTO) else _checkpoints_of(Path(str(run.resume)))
    out = run.out or (source.parent if source is not None and source.name == CHECKPOINTS else None)
    if out is None:
        if run.resume == AUTO or restarted:
            raise ConfigError(
                "which run is to be continued is not known: give its folder, as --resume DIR or with --out DIR."
            )
        out = default_folder()
    own = out / CHECKPOINTS
    if (restarted or run.resume == AUTO) and holds_checkpoints(own):
        start = Start(out, own, continues=True)
    elif source is not None and source.resolve() == own.resolve():
        start = Start(out, source, continues=True)
    else:
        if not restarted:
            _refuse_taken(run, out)
        start = Start(out, source)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be used ({error.strerror}). Give another folder.") from error
    return start


def default_folder() -> Path:
    """runs/ and the time of the start."""
    return Path("runs") / time.strftime("%Y-%m-%d-%H%M%S")


def _refuse_taken(run: RunConfig, out: Path) -> None:
    """A folder with a run is left alone; "auto" begins one again that stopped before its first checkpoint."""
    old = results_in(out)
    if not old or run.overwrite:
        return
    if run.resume == AUTO and not (out / WEIGHTS).exists():
        return
    further = f", or --resume {out} to continue it" if holds_checkpoints(out / CHECKPOINTS) else ""
    raise ConfigError(
        f"{out} already holds a run ({old[0].name}). Give another --out, or --overwrite to replace it{further}."
    )


def results_in(out: Path) -> list[Path]:
    """What a run has left in its folder."""
    return [out / name for name in RESULTS if (out / name).exists()]


def holds_checkpoints(folder: Path) -> bool:
    """Whether a checkpoint was ever finished there; also one whose process was killed before it moved the pointer."""
    return (folder / _POINTER).is_file() or any(folder.glob(f"*/{_MANIFEST}"))


def _checkpoints_of(given: Path) -> Path:
    """What --resume DIR means: the checkpoints of the run in DIR, those in DIR itself, or DIR as a single one."""
    for folder in (given / CHECKPOINTS, given):
        if holds_checkpoints(folder) or (folder / _MANIFEST).is_file():
            return folder
    what = "holds no finished checkpoint" if given.is_dir() else "does not exist"
    raise CheckpointError(
        f"--resume {given}: the folder {what}. Give the folder of a run that saved one (--save-every N, or Ctrl-C), or "
        f'"{AUTO}" to begin anew where there is none.'
    )


def run_folder(resume: str, out: Path | None) -> Path:
    """The folder of the run that --resume DIR names, or --out without DIR. Raises ConfigError when neither is given."""
    if resume == AUTO:
        if out is None:
            raise ConfigError("--resume needs to know which run: give its folder, as --resume DIR or with --out DIR.")
        return out
    given = Path(resume)
    return given.parent if given.name == CHECKPOINTS else given


def settings_of_run(folder: Path) -> dict[str, Any]:
    """The settings that a run has left in its folder, as `load_pretrain` takes them.

    Where it was to begin, and whether it might replace another run, is left out. Raises ConfigError if there are none.
    """
    path = folder / CONFIG
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
        blocks = {name: dict(written[name]) for name in ("data", "model", "run")}
        engine = dict(written["engine"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} does not hold the settings of a run ({error}). Give --data and the options of that run."
        ) from error
    for name in ("resume", "overwrite", "out"):
        blocks["run"].pop(name, None)
    return {**engine, **blocks}


class SavedBatch(Protocol):
    """Sizes of the run that saved."""

    @property
    def global_size(self) -> int: ...

    @property
    def micro_size(self) -> int: ...


def kept_batch(written: BatchConfig, saved: SavedBatch, ranks: int) -> BatchConfig:
    """The batch of a resumed run: the global size of before, whatever the number of ranks; accumulation makes it up.

    A global size that is asked for by name wins. The micro-batch stays as it is written, or as it was, or becomes the
    largest smaller one that fits.
    Raises ConfigError when the global size does not split over the ranks.
    """
    if written.global_size is not None and written.global_size != saved.global_size:
        return written
    size = saved.global_size
    if size % ranks:
        fitting = [str(n) for n in range(1, size + 1) if size % n == 0]
        shown = ", ".join(fitting if len(fitting) <= 8 else [*fitting[:7], "...", fitting[-1]])
        raise ConfigError(
            f"the checkpoint was trained with {size} sequences a step, which do not split over {ranks} ranks. Resume "
            f"on another number of ranks ({shown}), or give another --batch-size."
        )
    most = min(written.micro_size or saved.micro_size, size // ranks)
    micro = next(micro for micro in range(most, 0, -1) if size // ranks % micro == 0)
    return BatchConfig(global_size=size, micro_size=micro)
