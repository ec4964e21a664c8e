"""Do the library's collectives on gloo beat torch's own, in wall time and in CPU time?

Every implementation of an operation runs in turn within a round, so that a busy machine disturbs all of them alike.
A row is one (operation, implementation, dtype, size, ranks): median, quartiles and minimum of the slowest rank's wall
time, and the median CPU time of all ranks together (gloo's threads included). Rows are appended as JSON lines.

    python benchmarks/collectives.py --mib 1 16 64 --ranks 2 4 --rounds 9
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trilithon.comm.collectives import Group
from trilithon.contracts import Tag
from trilithon.testing import run_ranks

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TAG = Tag("benchmark")
Operation = Callable[[], object]


def implementations(
    group: Group, direct: Group | None, dtype: torch.dtype, numel: int
) -> dict[tuple[str, str], Operation]:
    """(operation, implementation) -> one blocking call on a whole tensor of `numel` elements."""
    full = torch.ones(numel, dtype=dtype)
    shard = torch.ones(numel // group.world_size, dtype=dtype)
    out = torch.empty_like(shard)
    found: dict[tuple[str, str], Operation] = {
        ("reduce_scatter", "torch"): lambda: dist.reduce_scatter_single(out, full),
        ("all_gather", "torch"): lambda: dist.all_gather_single(full, shard),
        ("all_reduce", "torch"): lambda: dist.all_reduce(full),
    }
    for name, ours in (("trilithon", group), ("trilithon, one host", direct)):
        if ours is not None:
            found[("reduce_scatter", name)] = lambda ours=ours: ours.reduce_scatter(full, out, TAG).wait()
            found[("all_gather", name)] = lambda ours=ours: ours.all_gather(full, shard, TAG).wait()
            found[("all_reduce", name)] = lambda ours=ours: ours.all_reduce(full, TAG).wait()
    return found


def time_on_this_rank(
    dtype: str, numel: int, rounds: int, one_host: bool
) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Wall and CPU seconds of every call on this rank, by (operation, implementation); the first is left out."""
    group = Group(dist.new_group(), name="benchmark")
    direct = Group(dist.new_group(), name="direct", shared_memory=True) if one_host else None
    calls = implementations(group, direct, DTYPES[dtype], numel)
    times: dict[tuple[str, str], list[tuple[float, float]]] = {key: [] for key in calls}
    for round_ in range(rounds + 1):
        for key, call in calls.items():
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            call()
            wall, used = time.perf_counter() - wall, time.process_time() - cpu
            dist.barrier()  # a peer may still be reading what this rank sent
            if round_ > 0:
                times[key].append((wall, used))
    return times


def rows(dtype: str, mib: float, world_size: int, rounds: int, one_host: bool) -> list[dict[str, Any]]:
    """Run one configuration and summarise it."""
    numel = int(mib * 2**20) // DTYPES[dtype].itemsize // world_size * world_size
    ranks = run_ranks(time_on_this_rank, world_size, dtype, numel, rounds, one_host, timeout_s=300)
    made = []
    for operation, implementation in ranks[0]:
        each = [rank[(operation, implementation)] for rank in ranks]
        wall = [max(rank[r][0] for rank in each) * 1e3 for r in range(rounds)]
        cpu = [sum(rank[r][1] for rank in each) * 1e3 for r in range(rounds)]
        low, _, high = statistics.quantiles(wall, n=4)
        made.append(
            {
                "operation": operation,
                "implementation": implementation,
                "dtype": dtype,
                "mib": mib,
                "ranks": world_size,
                "wall_ms": round(statistics.median(wall), 3),
                "wall_ms_quartiles": [round(low, 3), round(high, 3)],
                "wall_ms_min": round(min(wall), 3),
                "cpu_ms_all_ranks": round(statistics.median(cpu), 3),
                "rounds": rounds,
            }
        )
    return made


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=float, nargs="+", default=[1, 16, 64], help="size of the whole tensor")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--dtypes", nargs="+", choices=sorted(DTYPES), default=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=9, help="timed calls of each implementation (at least 2)")
    parser.add_argument("--no-one-host", action="store_true", help="leave out the transport within one host")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "collectives.jsonl")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("--rounds must be at least 2")
    about = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": f"{_cpu_name()}, {len(os.sched_getaffinity(0))} cores, {torch.backends.cpu.get_cpu_capability()}",
        "torch": torch.__version__,
        "command": " ".join(["python", "benchmarks/collectives.py", *sys.argv[1:]]),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    print("operation       implementation       dtype  ranks    MiB    wall ms (quartiles)          CPU ms, all ranks")
    with options.out.open("a") as out:
        for world_size in options.ranks:
            for dtype in options.dtypes:
                for mib in options.mib:
                    for row in rows(dtype, mib, world_size, options.rounds, not options.no_one_host):
                        out.write(json.dumps({**row, **about}) + "\n")
                        low, high = row["wall_ms_quartiles"]
                        print(
                            f"{row['operation']:15} {row['implementation']:20} {dtype:5} {world_size:6} {mib:6g} "
                            f"{row['wall_ms']:10.2f} ({low:.2f} - {high:.2f}) {row['cpu_ms_all_ranks']:20.2f}",
                            flush=True,
                        )


if __name__ == "__main__":
    main()
