"""What does compressing and decompressing cost per element, beside copying memory?

    python benchmarks/compression.py --millions 16

Each compressor encodes a vector in one piece, which also leaves its remainder behind (error feedback), and decodes it.
Beside them stands a copy of the same vector, which reads and writes every element once: the bandwidth of this machine
as a program sees it. All take turns, one thread; times are wall-clock seconds, the smallest and the median of all
turns. "x copy" is the time per element over that of the copy in the same turn.

Rows are appended to benchmarks/results/compression.jsonl.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from side_by_side.about import RESULTS, about, append

from trilithon.comm.blockwise import Blockwise
from trilithon.comm.cast import Cast
from trilithon.comm.compressor import Compressor, Rows
from trilithon.comm.sign import Sign
from trilithon.comm.topk import TopK

COMPRESSORS: dict[str, Compressor] = {
    "sign (l2)": Sign("l2"),
    "sign (l1)": Sign("l1"),
    "topk 1 %": TopK(0.01),
    "uniform 8 bit": Blockwise(8),
    "uniform 4 bit": Blockwise(4),
    "blockwise 8 bit": Blockwise(8, 2048),
    "bf16": Cast("bf16"),
}
Job = Callable[[], None]


def jobs(numel: int) -> dict[str, Job]:
    """By name: what is timed, over `numel` elements."""
    z, out = torch.randn(numel), torch.empty(numel)
    rows = Rows([numel], [numel])
    found: dict[str, Job] = {"copy": lambda: (out.copy_(z), None)[1]}
    for name, by in COMPRESSORS.items():
        payload = torch.empty(1, by.nbytes(numel), dtype=torch.uint8)
        work = z.clone()

        def encode(by: Compressor = by, payload: torch.Tensor = payload, work: torch.Tensor = work) -> None:
            by.encode_(work.view(1, -1), payload, rows)

        def decode(by: Compressor = by, payload: torch.Tensor = payload) -> None:
            by.decode(payload[0], out)

        found[f"{name}: encode"], found[f"{name}: decode"] = encode, decode
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, default=16.0, help="elements")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULTS / "compression.jsonl")
    options = parser.parse_args()
    torch.set_num_threads(1)
    numel = int(options.millions * 1e6) // 64 * 64
    everything = jobs(numel)
    for job in everything.values():
        job()  # compiles
    times: dict[str, list[float]] = {name: [] for name in everything}
    for _ in range(options.rounds):
        for name, job in everything.items():
            begin = time.perf_counter()
            job()
            times[name].append(time.perf_counter() - begin)
    rows = []
    for name, seconds in times.items():
        ratios = [one / copy for one, copy in zip(seconds, times["copy"], strict=True)]
        rows.append(
            {
                "job": name, "numel": numel, "n": len(seconds),
                "ns_per_element": 1e9 * statistics.median(seconds) / numel, "ns_min": 1e9 * min(seconds) / numel,
                "over_copy": statistics.median(ratios), **about("compression.py"),
            }
        )  # fmt: skip
    append(options.out, rows)
    table = Table(title=f"{numel:,} elements, one thread")
    for column in ("job", "ns / element", "smallest", "x copy"):
        table.add_column(column, justify="left" if column == "job" else "right")
    for row in rows:
        table.add_row(row["job"], *(f"{row[key]:.2f}" for key in ("ns_per_element", "ns_min", "over_copy")))
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
