"""Do compressed rules learn as much as the rules they compress? Same model, same text, same steps, several seeds.

    python benchmarks/convergence_compressed.py                    (about forty minutes on two quiet cores)
    python benchmarks/convergence_compressed.py --seeds 1 --steps 60 --only adamw onebit_adam

A GPT of 3 million parameters reads the sources of Python's standard library byte by byte, on two ranks. Every rule sees
the same batches in the same order with the same schedule. Printed is the validation loss at the end, mean and spread
over seeds, and its ratio to that of the parent (AdamW, or LAMB for 1-bit LAMB), seed by seed; the curves go to
docs/compressed_convergence.png. The exit status is 1 if a rule ends more than 1 % above its parent.

Rows are appended to benchmarks/results/convergence_compressed.jsonl.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from side_by_side.about import RESULTS, about, append
from torch import Tensor

import trilithon
from trilithon.models import GPT, GPTConfig
from trilithon.testing.ranks import run_ranks

SHAPE = {"vocab_size": 256, "context": 64, "num_layers": 6, "width": 200, "num_heads": 4}
WARM_UP_SHARE = 0.25
ADAM = {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}
LAMB = {"lr": 1e-2, "betas": [0.9, 0.999], "weight_decay": 0.01}
TOLERANCE = 0.01
DOCS = Path(__file__).resolve().parents[1] / "docs"
NAMES = ("adamw", "onebit_adam", "zero_one_adam", "apmsqueeze-quant4", "apmsqueeze-topk10%", "lamb", "onebit_lamb")


def rule(name: str, steps: int) -> dict[str, Any]:
    """The optimizer section of one system in a run of this length."""
    freeze = max(round(WARM_UP_SHARE * steps), 1)
    kind, _, compressor = name.partition("-")
    match kind:
        case "adamw":
            return {"kind": kind, **ADAM}
        case "lamb":
            return {"kind": kind, **LAMB}
        case "onebit_lamb":
            return {"kind": kind, **LAMB, "freeze_step": freeze}
        case "zero_one_adam":  # a phase A this short has no steps of the variance to spare: all of it is full precision
            local = {"local_step_scaler": freeze, "local_step_clipper": 4}
            return {"kind": kind, **ADAM, "var_freeze_step": freeze, "full_precision_warmup": freeze, **local}
        case "apmsqueeze":
            by = {"quant4": {"kind": "quant", "bits": 4}, "topk10%": {"kind": "topk", "ratio": 0.1}}[compressor]
            return {"kind": kind, **ADAM, "freeze_step": freeze, "compressor": by}
    return {"kind": kind, **ADAM, "freeze_step": freeze}


def parent_of(name: str) -> str:
    return "lamb" if name in ("lamb", "onebit_lamb") else "adamw"


def text(megabytes: float) -> tuple[Tensor, Tensor]:
    """(training, validation) bytes of the standard library's sources; the last twentieth is held out."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in folder.glob("*.py") if path.is_file())
    data = b"\n".join(path.read_bytes() for path in files)[: int(megabytes * 1e6)]
    everything = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
    cut = everything.numel() * 19 // 20
    return everything[:cut], everything[cut:]


def batch(data: Tensor, rows: int, generator: torch.Generator) -> Tensor:
    length = SHAPE["context"] + 1
    starts = torch.randint(0, data.numel() - length, (rows,), generator=generator)
    return torch.stack([data[start : start + length] for start in starts.tolist()])


def train(name: str, seed: int, steps: int, rows: int, every: int) -> dict[str, Any]:
    """One run as this rank sees it: the validation loss at every `every`-th step."""
    torch.set_num_threads(1)
    data, held_out = text(4.0)
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**SHAPE))
    schedule = {"kind": "cosine", "total_steps": steps, "warmup_steps": max(steps // 20, 1), "min_ratio": 0.1}
    config = {"optimizer": rule(name, steps), "lr_schedule": schedule, "clip_norm": 1.0, "seed": seed}
    probe = [batch(held_out, rows, torch.Generator().manual_seed(7 + index)) for index in range(6)]
    losses, begin = [], time.perf_counter()
    with trilithon.initialize(model, config) as engine:
        generator = torch.Generator().manual_seed(1000 * seed + engine.rank)
        for step in range(1, steps + 1):
            tokens = batch(data, rows, generator)
            engine.train_step([(tokens[:, :-1], tokens[:, 1:])])
            if step % every == 0 or step == steps:
                found = [float(engine.eval_step((one[:, :-1], one[:, 1:]))) for one in probe]
                losses.append((step, statistics.fmean(found)))
        sent = engine.ledger.sent_bytes()
    return {"curve": losses, "sent_bytes": sent, "seconds": time.perf_counter() - begin}


def draw(curves: dict[str, list[list[tuple[int, float]]]], path: Path) -> None:
    """Mean curves over seeds, one panel per parent."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    for panel, parent in zip(panels, ("adamw", "lamb"), strict=True):
        for name, runs in curves.items():
            if parent_of(name) == parent and runs:
                steps = [step for step, _ in runs[0]]
                means = [statistics.fmean(run[at][1] for run in runs) for at in range(len(steps))]
                panel.plot(steps, means, label=name, linewidth=1.6 if name == parent else 1.0)
        panel.set_xlabel("step")
        panel.grid(alpha=0.3)
        if panel.lines:
            panel.legend(fontsize=7)
    panels[0].set_ylabel("validation loss (nats per byte)")
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=640)
    parser.add_argument("--rows", type=int, default=4, help="sequences of one rank and step")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--only",
        nargs="+",
        default=[*NAMES[:4], *NAMES[5:]],
        choices=NAMES,
        metavar="RULE",
        help=", ".join(NAMES).replace("%", "%%"),
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "convergence_compressed.jsonl")
    parser.add_argument("--png", type=Path, default=DOCS / "compressed_convergence.png")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 120)
    curves: dict[str, list[list[tuple[int, float]]]] = {name: [] for name in options.only}
    rows: list[dict[str, Any]] = []
    for seed in range(options.seeds):
        for name in options.only:
            every = max(options.steps // 12, 1)
            run = run_ranks(train, options.ranks, name, seed, options.steps, options.rows, every, timeout_s=600)[0]
            curves[name].append(run["curve"])
            rows.append({"rule": name, "seed": seed, "steps": options.steps, "ranks": options.ranks, **run})
            rows[-1] |= {"loss": run["curve"][-1][1], **about("convergence_compressed.py")}
            append(options.out, rows[-1:])
            console.print(f"seed {seed} {name}: {rows[-1]['loss']:.4f} after {run['seconds']:.0f} s", style="dim")
    draw(curves, options.png)
    table = Table(title=f"validation loss after {options.steps} steps, {options.seeds} seeds, {options.ranks} ranks")
    for column in ("rule", "mean", "spread", "over parent", "bytes / parent's"):
        table.add_column(column, justify="left" if column == "rule" else "right")
    worst = -math.inf
    for name in options.only:
        mine = [row for row in rows if row["rule"] == name]
        base = [row for row in rows if row["rule"] == parent_of(name)] or mine
        final, before = [[row["loss"] for row in of] for of in (mine, base)]
        over = statistics.fmean(final) / statistics.fmean(before) - 1
        worst = max(worst, over)
        spread, share = max(final) - min(final), mine[0]["sent_bytes"] / max(base[0]["sent_bytes"], 1)
        table.add_row(name, f"{statistics.fmean(final):.4f}", f"{spread:.4f}", f"{100 * over:+.2f} %", f"{share:.3f}")
    console.print(table)
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
