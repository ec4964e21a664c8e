"""How much processor time does one AdamW step on the CPU take, ours against torch's fused one?

    python benchmarks/optimizer.py --millions 50 --threads 1

Three jobs, each done by both: fp32 gradient; the same and a bf16 copy of the weights; and what mixed-precision training
needs: a bf16 gradient times a clip factor, fp32 masters, a bf16 copy. Torch needs a pass of its own for each extra.
Implementations take turns, so that a busy machine disturbs both alike. Times are processor seconds of all threads.
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
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor

from trilithon.kernels import adam_step

RESULTS = Path(__file__).parent / "results" / "optimizer.jsonl"
LR, DECAY, SCALE = 1e-3, 0.01, 0.7
Job = Callable[[], None]


def ours(numel: int, grad: torch.dtype, low: torch.dtype | None, scale: float) -> Job:
    """One pass over everything."""
    p, m, v = torch.randn(numel), torch.zeros(numel), torch.zeros(numel)
    g, copy = torch.randn(numel).to(grad), None if low is None else torch.empty(numel, dtype=low)

    def step() -> None:
        adam_step(p, g, m, v, copy, lr=LR, weight_decay=DECAY, step=10, grad_scale=scale)

    return step


def torch_fused(numel: int, grad: torch.dtype, low: torch.dtype | None, scale: float) -> Job:
    """torch.optim.AdamW(fused=True), with the passes around it that the job needs."""
    p = torch.nn.Parameter(torch.randn(numel))
    optimizer = torch.optim.AdamW([p], lr=LR, weight_decay=DECAY, fused=True)
    g, copy = torch.randn(numel).to(grad), None if low is None else torch.empty(numel, dtype=low)
    wide: Tensor = g if grad is torch.float32 else torch.empty(numel)
    p.grad = wide

    def step() -> None:
        if wide is not g:
            wide.copy_(g)
        if scale != 1.0:
            wide.mul_(scale)
        optimizer.step()
        if copy is not None:
            copy.copy_(p.detach())

    return step


JOBS: dict[str, tuple[torch.dtype, torch.dtype | None, float]] = {
    "fp32": (torch.float32, None, 1.0),
    "fp32, bf16 copy": (torch.float32, torch.bfloat16, 1.0),
    "bf16 gradient, scale, bf16 copy": (torch.bfloat16, torch.bfloat16, SCALE),
}


def measure(jobs: dict[str, Job], repeats: int) -> dict[str, list[float]]:
    """Processor seconds of each job, `repeats` times, taking turns, after one unmeasured round."""
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(repeats + 1):
        for name, job in jobs.items():
            started = time.process_time()
            job()
            if turn:
                seconds[name].append(time.process_time() - started)
    return seconds


def hardware() -> str:
    names = [line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, default=50.0, help="parameters, in millions")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    numel = int(arguments.millions * 1e6)
    for name, (grad, low, scale) in JOBS.items():
        jobs = {make.__name__: make(numel, grad, low, scale) for make in (ours, torch_fused)}
        seconds = measure(jobs, arguments.repeats)
        medians = {key: statistics.median(values) for key, values in seconds.items()}
        row = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "question": "AdamW step on the CPU",
            "job": name,
            "numel": numel,
            "threads": arguments.threads,
            "repeats": arguments.repeats,
            "unit": "processor milliseconds per step",
            **{f"{key}_median": round(1e3 * value, 2) for key, value in medians.items()},
            **{f"{key}_min": round(1e3 * min(values), 2) for key, values in seconds.items()},
            **{f"{key}_max": round(1e3 * max(values), 2) for key, values in seconds.items()},
            "torch_over_ours": round(medians["torch_fused"] / medians["ours"], 3),
            "load_before": round(os.getloadavg()[0], 2),
            "hardware": hardware(),
            "torch": torch.__version__,
            "command": shlex.join(["python", "benchmarks/optimizer.py", *sys.argv[1:]]),
        }
        print(json.dumps(row))
        RESULTS.parent.mkdir(exist_ok=True)
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
