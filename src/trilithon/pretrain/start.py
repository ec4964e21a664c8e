"""Where a run begins: anew, or where an earlier one stopped. No torch in here.

A run keeps its checkpoints in the folder "checkpoints" beside its results. It continues in its own folder, where the
records of steps behind the checkpoint are taken back, or from another run's checkpoints in a folder of its own.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trilithon.config import BatchConfig
from trilithon.errors import CheckpointError, ConfigError
from trilithon.pretrain.settings import RunConfig

AUTO = "auto"
CHECKPOINTS, CONFIG, SAMPLE = "checkpoints", "config.json", "sample.txt"
WEIGHTS, SHAPE, TOKENIZER, CURVE = "model.pt", "model.json", "tokenizer.json", "loss.png"
RESULTS = (CHECKPOINTS, WEIGHTS, SHAPE, TOKENIZER, CONFIG, CURVE, SAMPLE, "metrics.jsonl", "csv", "tensorboard")
_POINTER = "latest"


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
        out = Path("runs") / time.strftime("%Y-%m-%d-%H%M%S")
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


def _refuse_taken(run: RunConfig, out: Path) -> None:
    """A folder with a run is left alone. One that stopped before its first checkpoint may be begun again with "auto"."""
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
    """Whether a checkpoint was ever finished there."""
    return (folder / _POINTER).is_file()


def _checkpoints_of(given: Path) -> Path:
    """The folder of checkpoints that --resume DIR means: DIR itself, or the one of the run in DIR."""
    for folder in (given / CHECKPOINTS, given):
        if holds_checkpoints(folder):
            return folder
    what = "holds no finished checkpoint" if given.is_dir() else "does not exist"
    raise CheckpointError(
        f"--resume {given}: the folder {what}. Give the folder of a run that saved one (--save-every N, or Ctrl-C), or "
        f'"{AUTO}" to begin anew where there is none.'
    )


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


def kept_batch(written: BatchConfig, saved: Mapping[str, int], ranks: int) -> BatchConfig:
    """The batch of a resumed run: the global size of before, whatever the number of ranks; accumulation makes it up.

    saved: "global_size" and "micro_size" of the run that saved. A global size that is asked for by name wins. The
    micro-batch stays as it was, or becomes the largest smaller one that fits.
    Raises ConfigError when the global size does not split over the ranks.
    """
    if written.global_size is not None and written.global_size != saved["global_size"]:
        return written
    size = saved["global_size"]
    if size % ranks:
        fitting = [str(n) for n in range(1, size + 1) if size % n == 0]
        shown = ", ".join(fitting if len(fitting) <= 8 else [*fitting[:7], "...", fitting[-1]])
        raise ConfigError(
            f"the checkpoint was trained with {size} sequences a step, which do not split over {ranks} ranks. Resume "
            f"on another number of ranks ({shown}), or give another --batch-size."
        )
    most = min(written.micro_size or saved["micro_size"], size // ranks)
    micro = next(micro for micro in range(most, 0, -1) if size // ranks % micro == 0)
    return BatchConfig(global_size=size, micro_size=micro)
