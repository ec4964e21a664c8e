"""Run both sides on the same data, then find the first difference."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from trilithon.config import Config
from trilithon.errors import ConfigError
from trilithon.launch.local import run_module

if TYPE_CHECKING:
    from trilithon.compare.difference import Outcome

PLAIN = "plain"
SEED = 0
_UNIT_ROUNDOFF = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}
_PERTURBED_RUNS = 2


def compare(a: str, b: str, script: Path, *, steps: int = 3, nproc: int = 2, timeout_s: float = 600.0) -> Outcome:
    """Train `script`'s model for `steps` updates as `a` and as `b` (configuration files, or "plain"), and compare.

    A configuration runs on `nproc` ranks of this machine; plain is one process that takes the same batches. Whole
    gradients and parameters of every step are written to a temporary folder: 16 bytes a parameter, step and side, and
    again for each of two perturbed runs. Raises ConfigError for a wrong configuration or script, LaunchError with the
    traceback when a side fails or takes longer than `timeout_s`.
    """
    configs = [None if side == PLAIN else Config.load(side) for side in (a, b)]
    _check(a, b, configs, script, steps, nproc)
    like = next((side for side in (a, b) if side != PLAIN), None)
    dtype = max((config.precision.kind for config in configs if config is not None), key=_UNIT_ROUNDOFF.__getitem__)
    unit = _UNIT_ROUNDOFF[dtype]
    base = 0 if configs[0] is None or configs[1] is not None else 1  # plain where there is one: cheap to repeat
    variants = [0.0] + [2 * unit] * _PERTURBED_RUNS  # one unit in the last place: moves every weight
    with tempfile.TemporaryDirectory(prefix="trilithon-compare-") as name:
        folders = [Path(name, "a"), Path(name, "b")]
        order = sorted((0, 1), key=lambda side: configs[side] is None)  # plain last: it takes the other's rates
        rates: list[list[float]] | None = None
        for side in order:
            job = {
                "script": str(script.resolve()),
                "config": None if configs[side] is None else str(Path((a, b)[side]).resolve()),
                "like": None if like is None else str(Path(like).resolve()),
                "steps": steps,
                "nproc": nproc,
                "seed": SEED,
                "variants": variants if side == base else [0.0],
                "folder": str(folders[side]),
                "lr": rates if configs[side] is None else None,
            }
            folders[side].mkdir()
            (folders[side] / "job.json").write_text(json.dumps(job), encoding="utf-8")
            ranks = 1 if configs[side] is None else nproc
            run_module("trilithon.compare.side", [str(folders[side] / "job.json")], ranks, timeout_s=timeout_s)
            if rates is None and configs[side] is not None:
                rates = _rates(folders[side] / "variant-0", steps)
        return _outcome(a, b, folders, base, steps, nproc, dtype, unit)


def _check(a: str, b: str, configs: list[Config | None], script: Path, steps: int, nproc: int) -> None:
    if not script.is_file():
        raise ConfigError(f"script {script} does not exist. It defines build() and batches(rank, world_size).")
    if steps < 1 or nproc < 1:
        raise ConfigError(f"--steps {steps} and --nproc {nproc} must be at least 1.")
    given = [config for config in configs if config is not None]
    if not given:
        raise ConfigError("both sides are plain, so there is nothing to compare. Give a configuration file for one.")
    counts = [config.batch.resolve(nproc).accumulation for config in given]
    if len(set(counts)) > 1:
        raise ConfigError(
            f"{a} accumulates {counts[0]} micro-batches and {b} {counts[1]}, so their steps see different data. "
            "Set batch.accumulation alike."
        )


def _rates(folder: Path, steps: int) -> list[list[float]]:
    from trilithon.compare.record import StepRecord

    return [StepRecord.read(folder, step).lr for step in range(1, steps + 1)]


def _outcome(
    a: str, b: str, folders: list[Path], base: int, steps: int, nproc: int, dtype: str, unit: float
) -> Outcome:
    from trilithon.compare.difference import Outcome, differences

    origin = folders[base] / "variant-0"
    perturbed = [folders[base] / f"variant-{index}" for index in range(1, _PERTURBED_RUNS + 1)]
    found = differences(folders[0] / "variant-0", folders[1] / "variant-0", origin, perturbed, steps, unit)
    return Outcome(a, b, steps, nproc, dtype, tuple(found))
