"""What a run shows while it runs: a live display on a terminal, plain lines elsewhere, nothing on other ranks."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text


@dataclass(frozen=True, slots=True)
class StepView:
    """The numbers of one step that are shown."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens_per_s: float
    memory: Mapping[str, int] = field(default_factory=dict)  # bytes by category, off the device by "tier/category"
    validation: float = math.nan  # the latest
    load: Mapping[str, float] = field(default_factory=dict)  # of experts, on this rank

    def text(self) -> str:
        parts = [f"loss {self.loss:.4f}"]
        if not math.isnan(self.validation):
            parts.append(f"val {self.validation:.4f}")
        parts += [f"lr {self.lr:.2e}", f"norm {self.grad_norm:.3f}", f"{human_count(self.tokens_per_s)} tokens/s"]
        if self.load:
            parts.append(f"balance {self.load['balance']:.3f}  drops {self.load['drops']:.1%}")
        return "  ".join(parts)

    def memory_text(self) -> str:
        """Category by category; what rests off the device stands behind the name of its tier."""
        shown: dict[str, list[str]] = {}
        for name, size in self.memory.items():
            tier, _, category = name.rpartition("/")
            if size:
                shown.setdefault(tier, []).append(f"{category} {human_bytes(size)}")
        return "  ".join(" ".join([tier or "mem", *held]) for tier, held in shown.items())


class Display(Protocol):
    """Where the run's progress is shown."""

    def step(self, view: StepView) -> None: ...

    def say(self, text: str) -> None:
        """A line that stays."""
        ...

    def close(self) -> None: ...


class NoDisplay:
    """Other ranks, and quiet runs."""

    def step(self, view: StepView) -> None:
        return None

    def say(self, text: str) -> None:
        return None

    def close(self) -> None:
        return None


class PlainDisplay:
    """A line every few steps, for logs and pipes."""

    def __init__(self, total: int, every: int, stream: TextIO) -> None:
        self._total, self._every, self._stream = total, every, stream
        self._started = time.monotonic()
        self._first: int | None = None

    def step(self, view: StepView) -> None:
        if self._first is None:
            self._first, self._started = view.step, time.monotonic()
        if view.step % self._every and view.step not in (1, self._total):
            return
        done = view.step - self._first
        left = ""
        if done:
            per_step_s = (time.monotonic() - self._started) / done
            left = f"  left {human_time((self._total - view.step) * per_step_s)}"
        self.say(f"step {view.step}/{self._total}  {view.text()}  {view.memory_text()}{left}")

    def say(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        return None


class TerminalDisplay:
    """A bar, the numbers of the step and the memory, redrawn in place."""

    def __init__(self, total: int, console: Console) -> None:
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=30),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._bar.add_task("train", total=total)
        self._live = Live(self._bar, console=console, refresh_per_second=4)
        self._live.start()

    def step(self, view: StepView) -> None:
        self._bar.update(self._task, completed=view.step)
        lines = (Text(line, overflow="ellipsis", no_wrap=True) for line in (view.text(), view.memory_text()))
        self._live.update(Group(self._bar, *lines))

    def say(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._live.stop()


def make_display(total: int, *, every: int, rank: int, quiet: bool, stream: TextIO | None = None) -> Display:
    """The display for this rank; `every` is the number of steps between plain lines."""
    if rank != 0 or quiet:
        return NoDisplay()
    out = stream if stream is not None else sys.stdout
    if out.isatty():
        return TerminalDisplay(total, Console(file=out))
    return PlainDisplay(total, every, out)


def flat_memory(tiers: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """{"device": {"parameters": 1}, "disk": {"parameters": 2}} -> {"parameters": 1, "disk/parameters": 2}."""
    return {
        (category if tier == "device" else f"{tier}/{category}"): size
        for tier, sizes in tiers.items()
        for category, size in sizes.items()
    }


def human_bytes(size: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def human_count(number: float) -> str:
    """12345 -> "12.3k"."""
    for unit in ("", "k", "M", "G"):
        if abs(number) < 1000:
            return f"{number:.0f}" if unit == "" else f"{number:.1f}{unit}"
        number /= 1000
    return f"{number:.1f}T"


def human_time(seconds: float) -> str:
    """75 -> "1:15"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
