"""How much arithmetic and time do experts save at equal quality, on translation and repair in many languages?

    python benchmarks/moe_quality.py --catalogues DJANGO_FOLDER --steps 1500 --experts 8
    python benchmarks/moe_quality.py --catalogues FOLDER --steps 4 --every 2 --width 16 --out /tmp/rows.jsonl

The task and its text are those of `examples/multilingual_moe.py`. A model with experts and a dense one whose tokens see
the same arithmetic (but for the router) are trained on the same examples, and their loss on held-out sentences is taken
every so many steps. The first row of each is its loss after equal arithmetic, with tokens per processor second. Then
the dense one goes on, up to `--patience` times as long, until it is as good as the one with experts was: the last row
says how many times the tokens, arithmetic and processor time that took. The rate is constant after a warm-up, so that
no run is cut short of a schedule. (Rajbhandari et al. 2022, arXiv:2201.05596, section 3.3, report five times less.)
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shlex
import sys
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import trilithon
from trilithon.models import GPT, GPTConfig

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "moe_quality.jsonl"


def example() -> ModuleType:
    """The script with the task, as a module."""
    path = HERE.parent / "examples" / "multilingual_moe.py"
    spec = importlib.util.spec_from_file_location("multilingual_moe", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["multilingual_moe"] = module
    spec.loader.exec_module(module)
    return module


@dataclass
class Run:
    """One model under way. curve: (steps, processor seconds of training, held-out nats per byte)."""

    name: str
    config: GPTConfig
    rows: int
    seconds: float = 0.0
    curve: list[tuple[int, float, float]] = field(default_factory=list)

    @property
    def loss(self) -> float:
        return self.curve[-1][2]

    def tokens(self, steps: int) -> int:
        return steps * self.rows * self.config.context

    def operations(self, steps: int) -> int:
        return self.tokens(steps) * self.config.training_flops_per_token()


def train(run: Run, task: Any, mixtures: tuple[Any, Any], arguments: argparse.Namespace, until: float | None) -> None:
    """As many steps as asked; with `until`, on to that held-out loss or the end of patience."""
    torch.manual_seed(arguments.seed)
    model, (training, held_out) = GPT(run.config), mixtures
    schedule = {"kind": "constant", "warmup_steps": max(arguments.steps // 20, 1)}
    limit = arguments.steps if until is None else int(arguments.steps * arguments.patience)
    config = {"optimizer": {"kind": "adamw", "lr": arguments.lr}, "lr_schedule": schedule, "clip_norm": 1.0}
    generator = torch.Generator().manual_seed(arguments.seed)
    with trilithon.initialize(model, config) as engine:
        while engine.steps < limit:
            tokens, targets = training.batch(run.rows, run.config.context, None, generator)
            started = time.process_time()
            total, number = task.loss_sum(engine(tokens), targets)
            engine.backward(total, weight=number)
            engine.step()
            run.seconds += time.process_time() - started
            if engine.steps % arguments.every == 0 or engine.steps in (arguments.steps, limit):
                losses = task.held_out_losses(model, held_out, run.config.context, arguments.held_out_rows)
                run.curve.append((engine.steps, run.seconds, sum(losses.values()) / len(losses)))
                if until is not None and engine.steps >= arguments.steps and run.loss <= until:
                    return


def rows_of(sparse: Run, dense: Run, steps: int) -> list[dict[str, Any]]:
    """One row for each after equal arithmetic, and one for equal quality."""
    found = []
    for run in (sparse, dense):
        _, seconds, loss = next(point for point in run.curve if point[0] == steps)
        found.append(
            {
                "question": "loss after equal arithmetic per token and equal tokens",
                "model": run.name,
                "parameters": run.config.num_parameters(),
                "operations_per_token": run.config.training_flops_per_token(),
                "tokens": run.tokens(steps),
                "held_out_nats_per_byte": round(loss, 4),
                "tokens_per_processor_second": round(run.tokens(steps) / seconds, 1),
                "curve": [[at, round(value, 4)] for at, _, value in run.curve],
            }
        )
    target = sparse.loss
    reached = next((point for point in dense.curve if point[2] <= target), None)
    at, seconds, loss = reached if reached is not None else dense.curve[-1]
    found.append(
        {
            "question": "what the dense model needs to be as good as the one with experts",
            "reached": reached is not None,
            "target_nats_per_byte": round(target, 4),
            "dense_nats_per_byte": round(loss, 4),
            "times_the_tokens": round(at / steps, 3),
            "times_the_operations": round(dense.operations(at) / sparse.operations(steps), 3),
            "times_the_processor_seconds": round(seconds / sparse.curve[-1][1], 3),
        }
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--catalogues", type=Path, help="a folder with LC_MESSAGES/*.mo below it; default: Django's")
    parser.add_argument("--languages", type=int, default=20)
    parser.add_argument("--temperature", type=float, default=5.0)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--every", type=int, default=50, help="steps between looks at held-out sentences")
    parser.add_argument("--patience", type=float, default=3.0, help="times the steps that the dense model may take")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--held-out-rows", type=int, default=32)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    task = example()
    pairs, apart = task.read_pairs(arguments.catalogues or task.installed_catalogues(), arguments.languages)
    mixtures = task.Mixture(pairs, arguments.temperature), task.Mixture(apart, arguments.temperature)
    sizes = arguments.width, arguments.layers
    sparse = Run(f"{arguments.experts} experts", task.shape(mixtures[0], *sizes, arguments.experts), arguments.rows)
    dense = Run("dense", task.shape(mixtures[0], *sizes, 0), arguments.rows)
    train(sparse, task, mixtures, arguments, None)
    train(dense, task, mixtures, arguments, sparse.loss)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    for found in rows_of(sparse, dense, arguments.steps):
        row = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            **found,
            "languages": len(pairs),
            "sentences": sum(map(len, pairs.values())),
            "load": round(os.getloadavg()[0], 2),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "torch": torch.__version__,
            "command": shlex.join(["python", "benchmarks/moe_quality.py", *sys.argv[1:]]),
        }
        print(json.dumps(row))
        with arguments.out.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
