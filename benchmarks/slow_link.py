"""What does a training step take when the network is slow, with and without compressed communication?

    python benchmarks/slow_link.py --rates 10mbit 100mbit 1gbit
    python benchmarks/slow_link.py --rates 100mbit --total-steps 40          (whole runs, warm-up included)
    python benchmarks/slow_link.py --ranks 4 --rates 100mbit --only adamw onebit_adam ddp-fp16 --layers 2

Every rank runs in a network namespace of its own; all are joined by a bridge through links whose rate is limited in
both directions, without added latency. The same GPT is trained on the same data by AdamW, LAMB, each compressed rule,
and torch's DDP with its communication hooks. All systems of one rate are alive together and stepped in turn; ratios are
taken turn by turn against AdamW (for LAMB's kin against LAMB). "wire" is what the kernel counted on rank 0's interface,
headers and acknowledgements included; "ledger" is what the library counted itself.

Needs root and iproute2. Where the machine does not permit it, says so and ends with status 77, having measured nothing.
Rows are appended to benchmarks/results/slow_link.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from side_by_side.about import RESULTS, about, append
from slow_links.hosts import Hosts, NotPermittedError

SKIPPED = 77
SYSTEMS = (
    *("adamw", "lamb", "onebit_adam", "onebit_lamb", "zero_one_adam"),
    *("apmsqueeze-quant8", "apmsqueeze-quant4", "apmsqueeze-topk1%"),
    *("ddp", "ddp-fp16", "ddp-bf16", "ddp-powersgd"),
)
PARENT = {"onebit_lamb": "lamb", "lamb": "lamb"}  # all others: adamw
SHARES = {
    "onebit_adam": 0.15,
    "onebit_lamb": 1000 / 5993,
    "zero_one_adam": 12_500 / 152_000,
}  # warm-up in the papers' BERT runs
console = Console(width=None if sys.stdout.isatty() else 160)


def ask(hosts: Hosts, order: dict[str, Any]) -> list[dict[str, Any]]:
    """Start the ranks and collect rank 0's rows. Raises RuntimeError when a rank fails."""
    here = str(Path(__file__).resolve().parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    rows = []
    with hosts.start([sys.executable, "-m", "slow_links.rank", json.dumps(order)]) as processes:
        first = processes[0]
        assert first.stdout is not None
        for line in first.stdout:
            rows.append(json.loads(line))
            console.print(f"  {rows[-1]['system']}: {rows[-1]['seconds']:.3f} s", style="dim")
        statuses = [process.wait(timeout=60) for process in processes]
    if any(statuses):
        raise RuntimeError(f"ranks ended with {statuses}; what they said is above")
    return rows


def summary(rows: list[dict[str, Any]], rate: str, order: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per system: medians over turns, and the ratio to its parent taken turn by turn."""
    seconds: dict[str, list[float]] = defaultdict(list)
    last: dict[str, dict[str, Any]] = {}
    for row in rows:
        seconds[row["system"]].append(row["seconds"])
        last[row["system"]] = row
    found = []
    for name, times in seconds.items():
        parent = PARENT.get(name, "adamw")
        ratios = [b / a for a, b in zip(times, seconds.get(parent, []), strict=False)]
        base = last.get(parent, {}).get("wire_bytes")
        found.append(
            {
                "system": name, "rate": rate, "ranks": order["ranks"], "parameters": order["parameters"],
                "total_steps": order["total_steps"] or None, "warm_up_share": last[name].get("warm_up_share"),
                "n": len(times), "seconds": statistics.median(times), "seconds_min": min(times),
                "seconds_max": max(times), "faster_than_parent": statistics.median(ratios) if ratios else None,
                "wire_bytes": last[name]["wire_bytes"], "ledger_bytes": last[name].get("ledger_bytes"),
                "fewer_bytes_than_parent": base / last[name]["wire_bytes"] if base else None, **about("slow_link.py"),
            }
        )  # fmt: skip
    return found


def show(rows: list[dict[str, Any]], title: str) -> None:
    table = Table(title=title)
    for column in ("system", "s", "min..max", "wire MB", "ledger MB", "x fewer bytes", "x faster"):
        table.add_column(column, justify="left" if column == "system" else "right")
    for row in rows:
        ledger = f"{row['ledger_bytes'] / 1e6:.3f}" if row["ledger_bytes"] is not None else "-"
        ratios = [f"{row[key]:.2f}" if row[key] else "-" for key in ("fewer_bytes_than_parent", "faster_than_parent")]
        spread = f"{row['seconds_min']:.3f}..{row['seconds_max']:.3f}"
        table.add_row(row["system"], f"{row['seconds']:.3f}", spread, f"{row['wire_bytes'] / 1e6:.3f}", ledger, *ratios)
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rates", nargs="+", default=["100mbit"], help="as tc writes them, or none")
    parser.add_argument(
        "--only", nargs="+", default=[], choices=SYSTEMS, metavar="SYSTEM", help=", ".join(SYSTEMS).replace("%", "%%")
    )
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--rows", type=int, default=2, help="sequences of one rank and step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1, help="steps of one turn")
    parser.add_argument("--total-steps", type=int, default=0, help="whole runs of this length instead of single steps")
    parser.add_argument("--limit-s", type=float, default=300.0, help="how long a collective may take")
    parser.add_argument("--out", type=Path, default=RESULTS / "slow_link.jsonl")
    options = parser.parse_args()
    if options.total_steps and any(name.startswith("ddp") for name in options.only):
        parser.error("--total-steps compares rules of this library; leave DDP out of --only, or --total-steps")
    shape = {"vocab_size": options.vocab, "context": options.context, "num_layers": options.layers}
    shape |= {"width": options.width, "num_heads": 4}
    whole = ("adamw", "onebit_adam", "lamb", "onebit_lamb")
    names = options.only or list(whole if options.total_steps else SYSTEMS)
    parameters = options.vocab * options.width + options.layers * (12 * options.width**2 + 2 * options.width)
    order = {"systems": names, "shape": shape, "rows": options.rows, "rounds": options.rounds, "steps": options.steps,
             "total_steps": options.total_steps, "shares": SHARES, "warm_up": 9, "ranks": options.ranks,
             "limit_s": options.limit_s, "parameters": parameters + options.width}  # fmt: skip
    try:
        with Hosts(options.ranks) as hosts:
            for rate in options.rates:
                hosts.limit(rate)
                console.print(f"{rate}, {options.ranks} ranks, {order['parameters']:,} parameters")
                rows = summary(ask(hosts, order), rate, order)
                append(options.out, rows)
                what = f"runs of {options.total_steps} steps" if options.total_steps else "one step"
                show(rows, f"{what} at {rate}, {options.ranks} ranks")
    except NotPermittedError as error:
        console.print(f"skipped, nothing was measured: {error}", highlight=False)
        return SKIPPED
    return 0


if __name__ == "__main__":
    sys.exit(main())
