"""What is left of a run: a table, the loss curve as a picture, and the numbers behind both."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from trilithon.pretrain.progress import human_bytes, human_count, human_time
from trilithon.pretrain.start import CURVE


@dataclass(slots=True)
class History:
    """The curve of a run."""

    train: list[tuple[int, float]] = field(default_factory=list)  # (step, loss in nats per token)
    validation: list[tuple[int, float]] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        """About 20 bytes a step in a checkpoint."""
        return {"train": [list(pair) for pair in self.train], "validation": [list(pair) for pair in self.validation]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.train = [(int(step), float(loss)) for step, loss in state["train"]]
        self.validation = [(int(step), float(loss)) for step, loss in state["validation"]]


@dataclass(frozen=True, slots=True)
class Report:
    """How a run ended; the same numbers on every rank, files written by rank 0."""

    out: Path
    steps: int
    tokens: int
    seconds: float  # of training, evaluations excluded
    num_parameters: int
    flops_per_token: int
    train_loss: float
    validation_loss: float  # NaN when the run was stopped before it could be measured
    unigram_entropy: float  # nats per token
    bytes_per_token: float
    memory: Mapping[str, int]  # bytes by category on rank 0, at the end of a step
    world_size: int
    sample: str = ""
    exit_status: int = 0  # 128 + signal when the run was asked to stop

    @property
    def bits_per_byte(self) -> float:
        """Validation loss in bits for each byte of text, comparable between tokenizers."""
        return self.validation_loss / math.log(2) / self.bytes_per_token


def print_report(report: Report, console: Console) -> None:
    """The table and the sample."""
    table = Table(title=f"{report.steps} steps on {report.world_size} rank{'s' * (report.world_size > 1)}")
    table.add_column("what")
    table.add_column("value", justify="right")
    for name, value in _rows(report):
        table.add_row(name, value)
    console.print(table)
    if report.sample:
        console.print("sample:", style="bold")
        console.print(report.sample, markup=False, highlight=False)
    if not (report.out / CURVE).exists():
        console.print(f"no {CURVE}: matplotlib is not installed (pip install 'trilithon[train]')", highlight=False)
    console.print(f"in {report.out}: {', '.join(sorted(path.name for path in report.out.iterdir()))}", highlight=False)


def _rows(report: Report) -> list[tuple[str, str]]:
    rate = report.tokens / report.seconds if report.seconds else math.nan
    rows = [
        ("parameters", f"{report.num_parameters:,}"),
        ("tokens trained on", f"{report.tokens:,}"),
        ("time", human_time(report.seconds)),
        ("speed", f"{human_count(rate)} tokens/s, {rate * report.flops_per_token / 1e9:,.1f} GFLOP/s"),
        ("training loss", f"{report.train_loss:.4f} nats/token"),
    ]
    if not math.isnan(report.validation_loss):
        below = report.unigram_entropy - report.validation_loss
        side = "below" if below >= 0 else "ABOVE"
        rows += [
            ("validation loss", f"{report.validation_loss:.4f} nats/token, {report.bits_per_byte:.3f} bits/byte"),
            ("unigram entropy", f"{report.unigram_entropy:.4f} nats/token: validation is {abs(below):.4f} {side} it"),
        ]
    rows += [(f"memory, {name}", human_bytes(size)) for name, size in report.memory.items()]
    return rows


def draw_curve(history: History, unigram_entropy: float, path: Path) -> bool:
    """Write the loss curve as a PNG; False when matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    # The figure is made by hand: pyplot would choose a backend for the whole process and keep the figure alive.
    figure: Any = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if history.train:
        axes.plot(*zip(*history.train), color="#9bb8d3", linewidth=1, label="training")
    if history.validation:
        axes.plot(*zip(*history.validation), color="#1f4e79", marker="o", markersize=3, label="validation")
    axes.axhline(unigram_entropy, color="#c0504d", linestyle="--", linewidth=1, label="unigram entropy")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    temporary = path.with_name(f"{path.name}.partial")
    figure.savefig(temporary, dpi=120, format="png")
    temporary.replace(path)
    return True
