"""Does a run continue exactly? Train k steps straight, and k steps across a save and a load; find the first difference.

    straight   one run of k steps
    resumed    a run of some of them, saved, and in new processes a second one that loads and goes on to k

Both end with a checkpoint. What every step recorded is compared first, then every tensor of the two checkpoints bit for
bit, then everything in them that is not a tensor.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trilithon.checkpoint import CheckpointReader, open_checkpoint
from trilithon.config import Config
from trilithon.errors import ConfigError
from trilithon.pretrain.settings import PretrainConfig, RunConfig
from trilithon.pretrain.start import CHECKPOINTS

# Values of a step that do not depend on how fast the machine was.
_COMPARED = ("loss", "lr", "grad_norm", "tokens", "skipped_steps")
_PIECE = 2**22  # elements that are read at once
_CLOCKS = ("seconds",)  # in the state of a run, and different in every run

Start = Callable[[PretrainConfig, int], int]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was compared, and the first difference; None when there is none."""

    steps: int
    saved_at: int
    nproc: int
    values: int  # recorded values of steps that were compared
    tensors: int
    difference: str | None

    def __str__(self) -> str:
        what = (
            f"{self.steps} steps on {self.nproc} rank{'s' * (self.nproc > 1)}, straight and with a save and a load "
            f"after step {self.saved_at}"
        )
        if self.difference is not None:
            return f"{what}: {self.difference}"
        return f"{what}: {self.values} recorded values and {self.tensors} tensors are equal bit for bit"


def verify_resume(
    config: PretrainConfig, *, steps: int = 6, save_at: int | None = None, nproc: int = 1, start: Start | None = None
) -> Verdict:
    """Train `config` twice for `steps` steps in new processes, once with a save and a load after `save_at`.

    The learning rate follows the schedule of the configuration, of which these are the first steps. save_at: half of
    the steps if None. start: (configuration, ranks) -> exit status; `start_ranks` if None. Everything is written to a
    temporary folder. Raises ConfigError for steps that leave nothing to resume, and LaunchError when a run fails.
    """
    at = steps // 2 if save_at is None else save_at
    if not 0 < at < steps:
        raise ConfigError(f"saving after step {at} of {steps} leaves nothing to compare: save between 1 and steps - 1.")
    if start is None:
        from trilithon.pretrain.ranks import start_ranks

        start = start_ranks
    with tempfile.TemporaryDirectory(prefix="trilithon-verify-resume-") as name:
        straight, resumed = Path(name, "straight"), Path(name, "resumed")
        _train(start, config, nproc, straight, steps)
        _train(start, config, nproc, resumed, at)
        _train(start, config, nproc, resumed, steps, resume=str(resumed))
        values, difference = _compare_records(straight, resumed, steps)
        tensors = 0
        if difference is None:
            with open_checkpoint(straight / CHECKPOINTS) as one, open_checkpoint(resumed / CHECKPOINTS) as other:
                tensors = len(one.entries())
                difference = next(differences(one, other), None)
    return Verdict(steps, at, nproc, values, tensors, difference)


def _train(
    start: Start, config: PretrainConfig, nproc: int, out: Path, steps: int, *, resume: str | None = None
) -> None:
    settings = config.run.model_dump() | {
        "steps": steps, "save_every": steps, "out": out, "resume": resume, "eval_every": 0, "eval_batches": 1,
        "sample_tokens": 0, "max_restarts": 0,
    }  # fmt: skip
    sinks = {"monitor.every": 1, "monitor.jsonl": True, "monitor.csv": False, "monitor.tensorboard": False}
    engine = Config.load(config.engine, overrides={**sinks, "monitor.quiet": True, "monitor.profile_step": None})
    status = start(config.model_copy(update={"run": RunConfig(**settings), "engine": engine}), nproc)
    if status:
        raise ConfigError(f"the run of {steps} steps was stopped with status {status}; nothing was compared.")


def _compare_records(straight: Path, resumed: Path, steps: int) -> tuple[int, str | None]:
    one, other = _records(straight), _records(resumed)
    count = 0
    for step in range(1, steps + 1):
        for name in _COMPARED:
            a, b = one[step].get(name), other.get(step, {}).get(name)
            if a != b:
                return count, f"the first difference is {name} of step {step}: {a!r} straight, {b!r} resumed"
            count += 1
    return count, None


def _records(out: Path) -> dict[int, dict[str, Any]]:
    """What each step recorded."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {line["step"]: line for line in lines if "loss" in line}


def differences(one: CheckpointReader, other: CheckpointReader) -> Iterator[str]:
    """What differs between the checkpoints of a straight and a resumed run: tensors in their order, then the rest."""
    for entry in one.entries():
        name = f"{entry.part} of {entry.name}"
        found = other.find(entry.part, entry.name)
        if found is None:
            yield f"{name} is not in the resumed run"
        elif (found.dtype, found.shape) != (entry.dtype, entry.shape):
            yield f"{name} is {entry.dtype}{list(entry.shape)} straight, {found.dtype}{list(found.shape)} resumed"
        else:
            text = _tensor_difference(one, other, entry.part, entry.name, math.prod(entry.shape))
            if text is not None:
                yield f"{name} differs: {text}"
    for path, a, b in _plain_differences("", one.extra, other.extra):
        yield f"{path} is {a} straight, {b} resumed"


def _tensor_difference(one: CheckpointReader, other: CheckpointReader, part: str, name: str, numel: int) -> str | None:
    """Read in pieces, so that no tensor has to fit into memory twice."""
    count, first, largest = 0, None, 0.0
    for begin in range(0, numel, _PIECE):
        size = min(_PIECE, numel - begin)
        a, b = one.read(part, name, begin, size), other.read(part, name, begin, size)
        different = _bits(a) != _bits(b)
        if bool(different.any()):
            where = different.nonzero()[:, 0]
            count += len(where)
            if first is None:
                at = int(where[0])
                first = f"element {begin + at} is {a[at].item()!r} straight, {b[at].item()!r} resumed"
            largest = max(largest, float((a[where].double() - b[where].double()).abs().max()))
    return None if first is None else f"{count} of {numel} elements, by at most {largest:.3g}; {first}"


def _bits(values: Tensor) -> Tensor:
    """The same memory as whole numbers: NaN equals itself, and 0 is not -0."""
    return values.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])


def _plain_differences(path: str, a: Any, b: Any) -> Iterator[tuple[str, str, str]]:
    """(where, straight, resumed), the values as text."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in dict.fromkeys([*a, *b]):
            if key not in _CLOCKS:
                yield from _plain_differences(f"{path}.{key}" if path else str(key), a.get(key), b.get(key))
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        for index, (left, right) in enumerate(zip(a, b)):
            yield from _plain_differences(f"{path}.{index}", left, right)
    elif isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.dtype != b.dtype or not torch.equal(a, b):
            yield path, "one tensor", "another"
    elif isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        if not np.array_equal(a, b):
            yield path, "one array", "another"
    elif a != b and not (isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b)):
        yield path, repr(a), repr(b)
