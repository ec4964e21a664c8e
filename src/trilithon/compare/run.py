"""Run both sides on the same data, then find the first difference."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from trilithon.compare.difference import Outcome, Yardstick, differences
from trilithon.compare.record import StepRecord
from trilithon.config import Config
from trilithon.errors import ConfigError
from trilithon.launch.local import run_module

PLAIN = "plain"
SEED = 0
_UNIT_ROUNDOFF = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}
_PERTURBED_RUNS = 2


class Runner(Protocol):
    """Runs a module on some ranks and raises LaunchError when one fails: `launch.local.run_module`, or a test's own."""

    def __call__(self, module: str, arguments: Sequence[str], nproc: int, *, timeout_s: float) -> None: ...


def compare(
    a: str,
    b: str,
    script: Path,
    *,
    steps: int = 3,
    nproc: int = 2,
    timeout_s: float = 600.0,
    runner: Runner = run_module,
) -> Outcome:
    """Train `script`'s model for `steps` updates as `a` and as `b` (configuration files, or "plain"), and compare.

    A configuration runs on `nproc` ranks of this machine; plain is one process that takes the same batches. Whole
    gradients and parameters of every step are written to a temporary folder: 8 bytes a parameter, step and side, and
    again for each of two perturbed runs. Raises ConfigError for a wrong configuration or script, LaunchError with the
    traceback when a side fails or takes longer than `timeout_s`.
    """
    configs = [None if side == PLAIN else Config.load(side) for side in (a, b)]
    _check((a, b), configs, script, steps, nproc)
    dtype = max((config.precision.kind for config in configs if config is not None), key=_UNIT_ROUNDOFF.__getitem__)
    unit = _UNIT_ROUNDOFF[dtype]
    like = next(side for side in (a, b) if side != PLAIN)
    base = 0 if configs[0] is None or configs[1] is not None else 1  # plain where there is one: cheap to repeat
    variants = [0.0] + [2 * unit] * _PERTURBED_RUNS  # one unit in the last place: moves every weight
    with tempfile.TemporaryDirectory(prefix="trilithon-compare-") as name:
        folders = [Path(name, "a"), Path(name, "b")]
        order = sorted((0, 1), key=lambda side: configs[side] is None)  # plain last: it takes the other's rates
        rates: list[list[float]] | None = None
        for side in order:
            plain = configs[side] is None
            job = {
                "script": str(script.resolve()),
                "config": None if plain else str(Path((a, b)[side]).resolve()),
                "like": str(Path(like).resolve()),
                "steps": steps,
                "nproc": nproc,
                "seed": SEED,
                "variants": variants if side == base else [0.0],
                "folder": str(folders[side]),
                "lr": rates if plain else None,
            }
            path = folders[side] / "job.json"
            folders[side].mkdir()
            path.write_text(json.dumps(job), encoding="utf-8")
            runner("trilithon.compare.side", [str(path)], 1 if plain else nproc, timeout_s=timeout_s)
            if rates is None and not plain:
                rates = _rates(folders[side] / "variant-0", steps)
        perturbed = [folders[base] / f"variant-{index}" for index in range(1, _PERTURBED_RUNS + 1)]
        rounding = Yardstick(folders[base] / "variant-0", perturbed, unit)
        found = differences(folders[0] / "variant-0", folders[1] / "variant-0", steps, rounding)
        return Outcome(a, b, steps, nproc, dtype, tuple(found))


def _check(sides: tuple[str, str], configs: list[Config | None], script: Path, steps: int, nproc: int) -> None:
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
            f"{sides[0]} accumulates {counts[0]} micro-batches and {sides[1]} {counts[1]}, so their steps see "
            "different data. Set batch.accumulation alike."
        )


def _rates(folder: Path, steps: int) -> list[list[float]]:
    return [StepRecord.read(folder, step).lr for step in range(1, steps + 1)]
