"""What does an update cost whose state rests in host memory or on disk, in time and in resident memory?

    python benchmarks/offload_step.py adam --millions 50 --threads 1
    python benchmarks/offload_step.py overlap --millions 50 --path /some/disk
    python benchmarks/offload_step.py memory --millions 8 16 32 --path /some/disk

adam: processor time of the host update against a loop over the same memory streams without arithmetic (the limit) and
    torch's fused AdamW with the passes it needs besides: fp32 in and out; bf16 gradient in and bf16 weights out.
    With --deepspeed-python, an interpreter that has DeepSpeed, its CPU Adam takes turns too, in a process of its own.
overlap: wall time of an update streamed from disk against the same update in memory (compute) and the same streams
    without an update (IO): the share of max(compute, IO) says how much of the smaller one is hidden.
memory: peak resident memory of a process that trains bf16 parameters, by model size and tier, and its slope in bytes
    per parameter; with everything on disk, parameters and gradients rest there as well, at stage 3.
    Each point is a process of its own; the peak is that of the steps, after construction.

Implementations take turns. Times are medians of `--repeats`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import trilithon
from trilithon.contracts import Slice
from trilithon.kernels import adam_step
from trilithon.kernels.bits import load, store
from trilithon.kernels.compiled import Array, arrays, compiled
from trilithon.kernels.threads import spread
from trilithon.optim.adam import AdamRule
from trilithon.optim.elementwise import Elementwise
from trilithon.tiers import DiskStore, FileIO, ResidentStore, Staging, page_up

RESULTS = Path(__file__).parent / "results" / "offload_step.jsonl"
SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
Job = Callable[[], float | None]


# ------------------------------------------------------------------------------------------------------------- adam
def streams_loop(  # noqa: PLR0917 - compiled loops take their arguments by position
    p: Array, g: Array, m: Array, v: Array, low: Array | None, scale: float
) -> None:
    """The memory traffic of one Adam step, and one multiplication for the compiler not to drop it."""
    for i in range(p.shape[0]):
        weight = p[i] * scale
        m[i] = m[i] * scale
        v[i] = v[i] * scale
        weight = weight + load(g, i)
        p[i] = weight
        if low is not None:
            store(low, i, weight)


def adam_jobs(numel: int, sixteen: bool) -> dict[str, Job]:
    """fp32 throughout, or a bf16 gradient with a factor in and bf16 weights out."""
    kind = torch.bfloat16 if sixteen else torch.float32
    p, m, v = (torch.zeros(numel) for _ in range(3))
    g = torch.full((numel,), 1e-3, dtype=kind)
    low = torch.empty(numel, dtype=kind) if sixteen else None
    loop = compiled(streams_loop, (p, g, m, v, low), (1.0,))
    if loop is None:
        raise SystemExit("this part needs numba: pip install 'trilithon[fast]'")
    weights = nn.Parameter(p)
    optimizer = torch.optim.AdamW([weights], lr=1e-3, weight_decay=0.01, fused=True)
    wide = torch.empty(numel) if sixteen else g
    weights.grad = wide

    def ours() -> None:
        adam_step(p, g, m, v, low, lr=1e-3, weight_decay=0.01, step=10, grad_scale=0.7 if sixteen else 1.0)

    def fused() -> None:
        if low is not None:
            wide.copy_(g).mul_(0.7)
        optimizer.step()
        if low is not None:
            low.copy_(p)

    return {"ours": ours, "streams": lambda: spread(loop, arrays((p, g, m, v, low)), (1.0,)), "torch_fused": fused}


def measure(jobs: dict[str, Job], repeats: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Seconds of each job, taking turns, after one unmeasured round. A job that measures itself returns seconds."""
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(repeats + 1):
        for name, job in jobs.items():
            started = clock()
            own = job()
            if turn:
                seconds[name].append(clock() - started if own is None else own)
    return seconds


@contextmanager
def deepspeed_adam(python: str | None, numel: int, sixteen: bool, threads: int) -> Iterator[tuple[dict[str, Job], str]]:
    """Its CPU Adam as a job, if its extension can be built there, and its version or why there is no job."""
    if python is None:
        yield {}, "not asked for"
        return
    order = json.dumps({"numel": numel, "sixteen": sixteen, "threads": threads})
    command = [python, str(Path(__file__).parent / "host_adam" / "deepspeed_step.py"), order]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "DS_ACCELERATOR": "cpu"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        inbox, outbox = process.stdout, process.stdin

        def step() -> float:
            outbox.write("step\n")
            outbox.flush()
            return float(json.loads(inbox.readline())["seconds"])

        first = json.loads(inbox.readline() or '{"error": "it ended without a word"}')
        if "ready" in first:
            yield {"deepspeed": step}, first["ready"]
        else:
            yield {}, f"not measured: {first['error']}"
        process.kill()


def adam(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    torch.set_num_threads(arguments.threads)
    for millions in arguments.millions:
        for sixteen in (False, True):
            numel = int(millions * 1e6)
            jobs = adam_jobs(numel, sixteen)
            with deepspeed_adam(arguments.deepspeed_python, numel, sixteen, arguments.threads) as (peer, version):
                seconds = measure(jobs | peer, arguments.repeats, time.process_time)
            medians = {name: statistics.median(values) for name, values in seconds.items()}
            yield {
                "question": "host Adam against its memory streams and torch",
                "job": "bf16 gradient, factor, bf16 weights" if sixteen else "fp32",
                "millions": millions,
                "threads": arguments.threads,
                "unit": "processor milliseconds",
                **spread_of(seconds, 1e3),
                "ours_over_streams": round(medians["ours"] / medians["streams"], 3),
                "torch_over_ours": round(medians["torch_fused"] / medians["ours"], 3),
                "deepspeed_over_ours": round(medians["deepspeed"] / medians["ours"], 3) if peer else None,
                "deepspeed": version,
            }


# ---------------------------------------------------------------------------------------------------------- overlap
class Idle(AdamRule):
    """Adam's state without Adam."""

    def step(self, *arguments: Any) -> None:
        """The streams alone."""


def slices(numel: int, longest: int) -> list[Slice]:
    found = []
    for key, start in enumerate(range(0, numel, longest)):
        size = min(longest, numel - start)
        gradient, low = torch.full((size,), 1e-3).bfloat16(), torch.empty(size, dtype=torch.bfloat16)
        found.append(Slice(str(key), 0, torch.empty(size, device="meta"), gradient, low))
    return found


def overlap(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    torch.set_num_threads(arguments.threads)
    for millions in arguments.millions:
        parts = slices(int(millions * 1e6), arguments.sub_group_numel)
        with tempfile.TemporaryDirectory(dir=arguments.path) as folder:
            budget = arguments.buffers * 3 * page_up(4 * arguments.sub_group_numel)
            disk = DiskStore(Path(folder), Staging(budget), FileIO(), expected_bytes=int(12.1e6 * millions))
            host = ResidentStore("host")
            for kept in (disk, host):
                for part in parts:
                    with kept.borrow(part.key, lambda part=part: {"master": torch.zeros(part.master.numel())}):
                        pass
            rule = AdamRule(decoupled=True)
            rules = {
                "disk": Elementwise(rule, [SETTINGS], store=disk),
                "compute": Elementwise(rule, [SETTINGS], store=host),
                "io": Elementwise(Idle(decoupled=True), [SETTINGS], store=disk),
            }
            jobs = {name: job(update, parts, disk) for name, update in rules.items()}
            seconds = measure(jobs, arguments.repeats, time.perf_counter)
            direct = disk.probe.direct
            disk.close()
        ratios = [d / max(c, i) for d, c, i in zip(seconds["disk"], seconds["compute"], seconds["io"], strict=True)]
        yield {
            "question": "update streamed from disk against max(compute, IO)",
            "millions": millions,
            "threads": arguments.threads,
            "sub_group_numel": arguments.sub_group_numel,
            "buffers": arguments.buffers,
            "direct": direct,
            "unit": "milliseconds",
            **spread_of(seconds, 1e3),
            "disk_over_max": round(statistics.median(ratios), 3),
        }


def job(update: Elementwise, parts: list[Slice], disk: DiskStore) -> Job:
    def run() -> None:
        update.apply(1, parts, 0.7, lambda _: None, lambda local, _: local)
        disk.finish_writes()

    return run


# ----------------------------------------------------------------------------------------------------------- memory
class Deep(nn.Module):
    """Layers of a quarter of a million weights, their number following from the size asked for."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(max(numel // 512**2, 1)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.float().square().mean()


def one_process(numel: int, state: str, path: str) -> None:
    """Train two steps and print the peak of resident memory in them, in bytes."""
    torch.set_num_threads(1)
    everything = state == "everything on disk"
    state = "disk" if everything else state
    offload = {"state": state, "sub_group_numel": 2**20} | ({"path": path} if state == "disk" else {})
    zero: dict[str, Any] = {"stage": 2}
    if everything:
        offload["parameters"], zero = "disk", {"stage": 3, "unit_classes": ["Linear"]}
    config = {"zero": zero, "precision": "bf16", "optimizer": {"kind": "adamw"}, "offload": offload}
    with trilithon.initialize(Deep(numel), config) as engine:
        engine.train_step([torch.ones(1, 512)])
        Path("/proc/self/clear_refs").write_text("5")
        for _ in range(2):
            engine.train_step([torch.ones(1, 512)])
        lines = Path("/proc/self/status").read_text().splitlines()
        peak = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
        print(json.dumps({"peak": peak, "numel": sum(p.numel() for p in engine.module.parameters())}))


def memory(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for state in ("device", "host", "disk", "everything on disk"):
        points = []
        for millions in arguments.millions:
            with tempfile.TemporaryDirectory(dir=arguments.path) as folder:
                command = [sys.executable, __file__, "one-process", str(int(millions * 1e6)), state, folder]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
            points.append(json.loads(done.stdout.splitlines()[-1]))
        yield {
            "question": "peak resident memory by model size",
            "state": state,
            "numel": [point["numel"] for point in points],
            "peak_mib": [round(point["peak"] / 2**20, 1) for point in points],
            "slope_bytes_per_parameter": round(slope(points), 2),
        }


def slope(points: list[dict[str, int]]) -> float:
    """Least squares."""
    x, y = [point["numel"] for point in points], [point["peak"] for point in points]
    mean_x, mean_y = statistics.mean(x), statistics.mean(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)


# --------------------------------------------------------------------------------------------------------------- rows
def spread_of(seconds: dict[str, list[float]], unit: float) -> dict[str, float]:
    found = {}
    for name, values in seconds.items():
        for kind, of in (("median", statistics.median), ("min", min), ("max", max)):
            found[f"{name}_{kind}"] = round(unit * of(values), 2)
    return found


def hardware() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


@contextmanager
def appended(path: Path) -> Iterator[Callable[[dict[str, Any]], None]]:
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:

        def add(row: dict[str, Any]) -> None:
            about = {
                "load_before": round(os.getloadavg()[0], 2),
                "hardware": hardware(),
                "torch": torch.__version__,
                "command": shlex.join(["python", "benchmarks/offload_step.py", *sys.argv[1:]]),
            }
            line = json.dumps({"date": datetime.now(UTC).isoformat(timespec="seconds"), **row, **about})
            print(line, flush=True)
            file.write(line + "\n")

        yield add


def main() -> None:
    if sys.argv[1:2] == ["one-process"]:
        one_process(int(sys.argv[2]), sys.argv[3], sys.argv[4])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"adam": adam, "overlap": overlap, "memory": memory}
    parser.add_argument("parts", nargs="*", default=list(parts), help="adam, overlap, memory; all of them if none")
    parser.add_argument("--millions", type=float, nargs="+", default=[16.0, 32.0], help="parameters, in millions")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--path", type=Path, default=Path("."), help="a folder on the disk in question")
    parser.add_argument("--sub-group-numel", type=int, default=4 * 2**20)
    parser.add_argument("--buffers", type=int, default=4)
    parser.add_argument("--deepspeed-python", help="an interpreter that has DeepSpeed, for the adam part")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    with appended(arguments.out) as add:
        for name in arguments.parts:
            for row in parts[name](arguments):
                add(row)


if __name__ == "__main__":
    main()
