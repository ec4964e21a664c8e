"""What a run tells about itself: values of each step to files and to the terminal, and one step measured in detail.

    monitor = Monitor(config.monitor, rank=rank)
    engine.hooks.append(monitor)                       # tells it where steps begin
    with monitor.timer("forward"): ...
    monitor.record(step, {"loss": loss, "lr": lr})     # written every `config.every` steps

Rank 0 writes; the same calls on other ranks do nothing. Profiling one step prints for that step and changes nothing
about the others, and a quiet monitor prints nothing at all: what it has to say goes to its files.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

import torch
from torch.profiler import ProfilerActivity, profile

from trilithon.config import MonitorConfig
from trilithon.errors import ConfigError

if TYPE_CHECKING:
    from trilithon.engine.training import Training

logger = logging.getLogger(__name__)

_PROFILE_ROWS = 20
_TENSORBOARD_ROOM = 2**18  # bytes: more than it buffers


class Meter:
    """The mean of what was added since it was last read, by weight."""

    def __init__(self) -> None:
        self._sum = self._weight = 0.0

    def add(self, value: float, weight: float = 1.0) -> None:
        self._sum += value * weight
        self._weight += weight

    def read(self) -> float:
        """The mean, NaN when nothing was added; starts anew."""
        mean = self._sum / self._weight if self._weight else math.nan
        self._sum = self._weight = 0.0
        return mean


class Sink(Protocol):
    """Where records go."""

    def write(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        """seconds: since the epoch of the system clock."""
        ...

    def close(self) -> None: ...


class WholeLines:
    """A file that grows line by line: what a full disk cut short is taken back, so that it never holds half a line."""

    def __init__(self, path: Path) -> None:
        self._stream = path.open("ab", buffering=0)  # a run that is killed keeps what it recorded

    @property
    def empty(self) -> bool:
        return self._stream.tell() == 0

    def write(self, line: str) -> None:
        """Raises OSError when the line could not be written whole."""
        start, data = self._stream.tell(), f"{line}\n".encode()
        if self._stream.write(data) != len(data):
            self._stream.truncate(start)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        self._stream.close()


class JsonLines:
    """One object a record: {"step": 10, "time": 1.7e9, "loss": 3.2}; what is not finite becomes null."""

    def __init__(self, path: Path) -> None:
        self._lines = WholeLines(path)

    def write(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._lines.write(json.dumps({"step": step, "time": round(seconds, 3), **finite}))

    def close(self) -> None:
        self._lines.close()


class Csv:
    """One file for each value, `loss.csv` with the columns step, time and value: values may appear at any step.

    times: False leaves the seconds out, for readers of two columns.
    """

    def __init__(self, folder: Path, *, times: bool = True) -> None:
        self._folder, self._times = folder, times
        self._files: dict[str, WholeLines] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            if name not in self._files:
                self._files[name] = WholeLines(self._folder / f"{name.replace('/', '_')}.csv")
            if self._files[name].empty:
                self._files[name].write("step,time,value" if self._times else "step,value")
            self._files[name].write(f"{step},{seconds:.3f},{value!r}" if self._times else f"{step},{value!r}")

    def close(self) -> None:
        for lines in self._files.values():
            lines.close()


class TensorBoard:
    """Scalars by name. Raises ConfigError when the package tensorboard is missing."""

    def __init__(self, folder: Path, first_step: int = 1) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "monitor.tensorboard=true needs the package tensorboard, which is not installed: "
                "pip install 'trilithon[train]', or set it to false."
            ) from error
        # What an earlier process wrote about these steps is hidden: it is written anew.
        self._writer = SummaryWriter(str(folder), purge_step=first_step if first_step > 1 else None)
        self._folder = folder

    def write(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        # Its thread would end by an exception of its own, with a traceback on the terminal.
        if shutil.disk_usage(self._folder).free < _TENSORBOARD_ROOM:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=seconds)

    def close(self) -> None:
        self._writer.close()


class Monitor:
    """The sinks, timers and the profile of one run on one rank; a `StepHook`."""

    def __init__(
        self,
        config: MonitorConfig,
        *,
        rank: int = 0,
        stream: TextIO | None = None,
        details: Callable[[], Mapping[str, float]] | None = None,
        first_step: int = 1,
    ) -> None:
        """stream: for lines, the standard output if None. details: further numbers for the profile of a step, such as
        bytes of memory and bytes sent by category. first_step: of a run that continues in the folder it has."""
        self._active = rank == 0
        self._every, self._quiet, self._folder = config.every, config.quiet, config.folder
        self._stream, self.details = stream, details
        self._profile_step = config.profile_step if self._active else None
        self._profiler: Any = None
        self._seconds: dict[str, Meter] = {}
        self._profiled_seconds: dict[str, float] = {}
        self._sinks: list[Sink] = _make_sinks(config, first_step) if self._active else []

    def on_step(self, step: int) -> None:
        """A step begins, counted from 1; whatever began before it has ended."""
        self._finish_profile()
        if step == self._profile_step:
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
            self._profiler = profile(activities=activities)
            self._profiler.__enter__()

    @contextmanager
    def timer(self, name: str) -> Iterator[None]:
        """Measure a part of the step on the host's clock; its mean goes into the next record as `seconds/NAME`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - started
            self._seconds.setdefault(name, Meter()).add(elapsed)
            if self._profiler is not None:
                self._profiled_seconds[name] = self._profiled_seconds.get(name, 0.0) + elapsed

    def record(self, step: int, values: Mapping[str, float], *, always: bool = False) -> None:
        """Write the values of a step that has ended, if it is one to be recorded or `always` says so."""
        if not self._active or not (always or step % self._every == 0):
            return
        timed = {f"seconds/{name}": meter.read() for name, meter in self._seconds.items()}
        self._seconds.clear()
        now = time.time()
        numbers = {name: float(value) for name, value in {**values, **timed}.items()}
        for sink in list(self._sinks):
            try:
                sink.write(step, now, numbers)
            except OSError as error:  # a record is not worth a run
                self._sinks.remove(sink)
                self._give_up(sink, step, error)
        shown = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
        self._print(f"step {step}  {shown}")

    def _give_up(self, sink: Sink, step: int, error: OSError) -> None:
        with suppress(OSError):
            sink.close()
        logger.warning(
            "From step %d on nothing is written to %s in %s (%s); the run goes on. Free some space before it ends.",
            step, type(sink).__name__, self._folder, error.strerror,
        )  # fmt: skip

    def record_step(self, engine: Training) -> None:
        """What an engine writes about the step that was just applied, at the rate it used."""
        values = {"loss": engine.loss, "grad_norm": engine.grad_norm, "clip_factor": engine.clip_factor}
        rates = {f"lr/{index}" if index else "lr": rate for index, rate in enumerate(engine.lr)}
        counts = {
            "loss_scale": engine.loss_scale,
            "skipped_steps": engine.skipped_steps,
            "samples": engine.global_samples,
        }
        self.record(engine.steps, {k: v for k, v in {**values, **rates, **counts}.items() if v is not None})

    def close(self) -> None:
        """Finish a profile that is running and close every file. Idempotent."""
        self._finish_profile()
        for sink in self._sinks:
            with suppress(OSError):  # what was recorded is in the files already
                sink.close()
        self._sinks = []

    def _finish_profile(self) -> None:
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        profiler.__exit__(None, None, None)
        lines = [f"profile of step {self._profile_step}"]
        lines += [f"  seconds/{name}: {seconds:.6f}" for name, seconds in self._profiled_seconds.items()]
        lines += [f"  {name}: {value:,.6g}" for name, value in (self.details() if self.details else {}).items()]
        lines.append(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=_PROFILE_ROWS))
        text = "\n".join(lines)
        if self._folder is not None:
            (self._folder / f"profile-step{self._profile_step}.txt").write_text(text + "\n", encoding="utf-8")
        self._print(text)

    def _print(self, text: str) -> None:
        if not self._quiet:
            print(text, file=self._stream or sys.stdout, flush=True)


def _make_sinks(config: MonitorConfig, first_step: int) -> list[Sink]:
    if config.folder is None:
        return []
    try:
        config.folder.mkdir(parents=True, exist_ok=True)
        sinks: list[Sink] = [JsonLines(config.folder / "metrics.jsonl")] if config.jsonl else []
        if config.csv:
            sinks.append(Csv(config.folder / "csv"))
        if config.tensorboard:
            sinks.append(TensorBoard(config.folder / "tensorboard", first_step))
    except OSError as error:
        raise ConfigError(
            f"monitor.folder={config.folder} cannot be written to ({error.strerror}). Give another folder."
        ) from error
    return sinks
