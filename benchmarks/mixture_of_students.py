"""Does a student with fewer layers end better with a teacher for the first part of training than without one?

    python benchmarks/mixture_of_students.py --data docs/ --steps 600 --seeds 3
    python benchmarks/mixture_of_students.py --data docs/ --steps 4 --seeds 1 --width 16 --out /tmp/rows.jsonl

A PR-MoE teacher is trained on the bytes of the files. For each seed, students of the same family with fewer layers are
trained on the same batches: alone, with the teacher until `--fraction` of the steps, and with it to the end. A row has
each one's loss on held-out text after the last step (cross entropy only, in nats per byte), its mean and spread over
seeds. (Rajbhandari et al. 2022, arXiv:2201.05596, section 4.2, figure 6.)
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import trilithon
from trilithon.compress import StagedDistillation, stop_after
from trilithon.models.pr_moe import PrMoE, PrMoEConfig

RESULTS = Path(__file__).parent / "results" / "mixture_of_students.jsonl"


def read_bytes(paths: list[Path]) -> Tensor:
    """All files, and all files inside folders, in order of name: [n] i64."""
    files = [file for path in paths for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    content = b"\n".join(file.read_bytes() for file in files if file.is_file())
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).long()


def batch(data: Tensor, rows: int, length: int, generator: torch.Generator) -> Tensor:
    starts = torch.randint(len(data) - length - 1, (rows,), generator=generator)
    return torch.stack([data[start : start + length + 1] for start in starts.tolist()])


@torch.no_grad()
def held_out_loss(model: PrMoE, data: Tensor, length: int) -> float:
    model.eval()
    rows = data[: len(data) // (length + 1) * (length + 1)].view(-1, length + 1)[:64]
    return float(model(rows[:, :-1], rows[:, 1:]))


def train(
    config: PrMoEConfig, data: Tensor, *, steps: int, rows: int, seed: int, lr: float,
    distill: StagedDistillation | None = None,
) -> PrMoE:  # fmt: skip
    torch.manual_seed(seed)
    model, generator = PrMoE(config), torch.Generator().manual_seed(seed)
    schedule = {"kind": "cosine", "total_steps": steps, "warmup_steps": max(steps // 20, 1), "min_ratio": 0.1}
    engine = trilithon.initialize(
        model,
        {"optimizer": {"kind": "adamw", "lr": lr, "betas": [0.9, 0.95]}, "lr_schedule": schedule, "clip_norm": 1.0},
    )
    if distill is not None:
        engine.hooks.append(distill)
    for _ in range(steps):
        tokens = batch(data, rows, config.context, generator)
        logits = engine(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        engine.backward(loss if distill is None else loss + distill.loss(logits, tokens[:, :-1]))
        engine.step()
    engine.close()
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--fraction", type=float, default=0.7, help="of the steps, with a teacher")
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    everything = read_bytes(arguments.data)
    cut = len(everything) * 9 // 10
    training, held_out = everything[:cut], everything[cut:]
    big = PrMoEConfig(
        num_layers=8, width=arguments.width, num_heads=4, experts=(4, 4, 8, 8), residual=True, vocab_size=256,
        context=arguments.context,
    )  # fmt: skip
    small = big.student(num_layers=6)
    common = {"steps": arguments.steps, "rows": arguments.rows, "lr": arguments.lr}
    started = time.perf_counter()
    teacher = train(big, training, seed=1000, **common)
    losses: dict[str, list[float]] = {"alone": [], "teacher, then alone": [], "teacher to the end": []}
    stops = {"alone": 0, "teacher, then alone": stop_after(arguments.steps, arguments.fraction)}
    for seed in range(arguments.seeds):
        for name, found in losses.items():
            stop = stops.get(name, arguments.steps)
            distill = StagedDistillation(teacher, stop_step=stop) if stop else None
            student = train(small, training, seed=seed, distill=distill, **common)
            found.append(held_out_loss(student, held_out, arguments.context))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    row = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "question": "a student with a teacher for part of training, beside one without",
        "teacher_parameters": big.num_parameters(),
        "student_parameters": small.num_parameters(),
        "teacher_loss": round(held_out_loss(teacher, held_out, arguments.context), 4),
        "unit": "nats per byte, held out",
        **{name: [round(loss, 4) for loss in found] for name, found in losses.items()},
        **{f"{name}, mean": round(statistics.mean(found), 4) for name, found in losses.items()},
        **{f"{name}, spread": round(max(found) - min(found), 4) for name, found in losses.items()},
        "seconds": round(time.perf_counter() - started, 1),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "command": shlex.join(["python", "benchmarks/mixture_of_students.py", *sys.argv[1:]]),
    }
    print(json.dumps(row))
    with arguments.out.open("a") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
