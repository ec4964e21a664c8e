"""What share of the disk's own rate does state on disk reach when an optimizer step streams it?

    python benchmarks/disk.py --path /some/disk --mib 1024

Rounds of five jobs on one path, taking turns, so that a busy machine disturbs all alike:

    raw read, raw write     sequential, O_DIRECT, threads of preadv and pwritev on aligned memory, nothing of ours
    raw both                the same, half of the threads reading while the others write: the limit of the next two
    stream                  trilithon's store: borrow every slice of Adam's state, change nothing, write it back
    step                    the same with the Adam update of a bf16 gradient and a bf16 result in between

and, where `fio` is installed, its sequential read and write with the same block and depth, once.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import torch

from trilithon.kernels import adam_step
from trilithon.tiers import DiskStore, FileIO, Staging, page_up

RESULTS = Path(__file__).parent / "results" / "disk.jsonl"
PIECE = 8 << 20
FIELDS = ("master", "exp_avg", "exp_avg_sq")
Job = Callable[[], int]  # returns the bytes it moved


class Raw:
    """A file and aligned memory, moved by `threads` threads without anything in between."""

    def __init__(self, folder: Path, size: int, threads: int) -> None:
        self.size, self.pool = size // PIECE * PIECE, ThreadPoolExecutor(threads)
        self.path = folder / "raw"
        self.descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self.descriptor, 0, self.size)
        self.memory = [memoryview(mmap.mmap(-1, PIECE)) for _ in range(threads)]
        self.threads = threads

    def _run(self, thread: int, threads: int, call: Callable[..., int]) -> int:
        moved = 0
        for offset in range(thread * PIECE, self.size, threads * PIECE):
            moved += call(self.descriptor, [self.memory[thread % self.threads]], offset)
        return moved

    def one_way(self, call: Callable[..., int]) -> int:
        jobs = [self.pool.submit(self._run, i, self.threads, call) for i in range(self.threads)]
        return sum(job.result() for job in jobs)

    def both(self) -> int:
        half = max(self.threads // 2, 1)
        jobs = [self.pool.submit(self._run, i, half, os.preadv) for i in range(half)]
        jobs += [self.pool.submit(self._run, i, half, os.pwritev) for i in range(half)]
        return sum(job.result() for job in jobs)

    def close(self) -> None:
        os.close(self.descriptor)
        self.path.unlink()
        self.pool.shutdown()


class Streamed:
    """Adam's state of `numel` elements in slices, as an engine keeps it."""

    def __init__(self, folder: Path, numel: int, slice_numel: int, threads: int, buffers: int) -> None:
        longest = 3 * page_up(4 * slice_numel)
        self.io = FileIO(threads, PIECE)
        self.store = DiskStore(folder, Staging(buffers * longest), self.io, expected_bytes=12 * numel + longest)
        self.sizes = [min(slice_numel, numel - at) for at in range(0, numel, slice_numel)]
        for key, size in enumerate(self.sizes):
            with self.store.borrow(str(key), lambda size=size: {name: torch.zeros(size) for name in FIELDS}):
                pass
        self.gradient = torch.full((slice_numel,), 1e-3, dtype=torch.bfloat16)
        self.low = torch.empty(slice_numel, dtype=torch.bfloat16)
        self.store.finish_writes()

    def run(self, *, update: bool) -> int:
        before = self.io.bytes_read + self.io.bytes_written
        for key, size in enumerate(self.sizes):
            with self.store.borrow(str(key)) as state:
                for ahead in (1, 2):
                    if key + ahead < len(self.sizes):
                        self.store.prefetch(str(key + ahead))
                if update:
                    moments = state["exp_avg"], state["exp_avg_sq"]
                    adam_step(
                        state["master"],
                        self.gradient[:size],
                        *moments,
                        self.low[:size],
                        lr=1e-3,
                        step=10,
                        grad_scale=0.7,
                    )
        self.store.finish_writes()
        return self.io.bytes_read + self.io.bytes_written - before


def measure(jobs: dict[str, Job], repeats: int) -> dict[str, list[float]]:
    """Bytes per second of each, taking turns, after one unmeasured round."""
    rates: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(repeats + 1):
        for name, job in jobs.items():
            started = time.perf_counter()
            moved = job()
            if turn:
                rates[name].append(moved / (time.perf_counter() - started))
    return rates


def fio(folder: Path, mib: int, threads: int) -> dict[str, float]:
    """MB/s of fio's sequential O_DIRECT read and write; empty without fio."""
    found = {}
    for direction in ("read", "write") if shutil.which("fio") else ():
        command = [
            *("fio", f"--directory={folder}", "--filename=fio", f"--size={mib}m", "--direct=1", "--ioengine=libaio"),
            *(f"--rw={direction}", "--bs=8M", f"--iodepth={threads}", "--name=x", "--output-format=json"),
        ]
        told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        found[f"fio_{direction}"] = round(told["jobs"][0][direction]["bw_bytes"] / 1e6, 1)
    (folder / "fio").unlink(missing_ok=True)
    return found


def hardware() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, default=Path("."), help="a folder on the disk in question")
    parser.add_argument("--mib", type=int, default=1024, help="size of the state and of the raw file")
    parser.add_argument("--slice-mib", type=int, default=48, help="size of a slice's three fields")
    parser.add_argument("--threads", type=int, default=4, help="requests in flight")
    parser.add_argument("--buffers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.path) as name:
        folder = Path(name)
        raw = Raw(folder, arguments.mib << 20, arguments.threads)
        numel, slice_numel = (arguments.mib << 20) // 12, (arguments.slice_mib << 20) // 12
        streamed = Streamed(folder / "state", numel, slice_numel, arguments.threads, arguments.buffers)
        jobs: dict[str, Job] = {
            "raw_write": lambda: raw.one_way(os.pwritev),
            "raw_read": lambda: raw.one_way(os.preadv),
            "raw_both": raw.both,
            "stream": lambda: streamed.run(update=False),
            "step": lambda: streamed.run(update=True),
        }
        rates = measure(jobs, arguments.repeats)
        direct = streamed.store.probe.direct
        streamed.store.close()
        raw.close()
        by_fio = fio(folder, arguments.mib, arguments.threads)
    shares = {
        name: statistics.median(a / b for a, b in zip(rates[name], rates["raw_both"], strict=True))
        for name in ("stream", "step")
    }
    row = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "question": "streamed state against the disk's own rate",
        "unit": "MB/s read and written together",
        "mib": arguments.mib,
        "slice_mib": arguments.slice_mib,
        "threads": arguments.threads,
        "buffers": arguments.buffers,
        "repeats": arguments.repeats,
        "direct": direct,
        **{f"{name}_median": round(statistics.median(found) / 1e6, 1) for name, found in rates.items()},
        **{f"{name}_min": round(min(found) / 1e6, 1) for name, found in rates.items()},
        **{f"{name}_max": round(max(found) / 1e6, 1) for name, found in rates.items()},
        "stream_share_of_raw_both": round(shares["stream"], 3),
        "step_share_of_raw_both": round(shares["step"], 3),
        **by_fio,
        "load_before": round(os.getloadavg()[0], 2),
        "hardware": hardware(),
        "torch": torch.__version__,
        "command": shlex.join(["python", "benchmarks/disk.py", *sys.argv[1:]]),
    }
    print(json.dumps(row))
    arguments.out.parent.mkdir(exist_ok=True)
    with arguments.out.open("a") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
