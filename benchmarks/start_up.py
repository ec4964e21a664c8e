"""How long does a program wait before its first step: importing torch, importing trilithon, and initialize()?

Every row is the median of fresh processes that take turns, so that a busy machine disturbs all of them alike:

    torch                       import torch
    trilithon                   import trilithon (its names resolve lazily, so this loads almost nothing)
    initialize                  import torch and trilithon, build a small model, initialize()
    first step, cold kernels    the same, and one training step with an empty kernel cache: loops are compiled
    first step, warm kernels    the same with the loops on disk, as every process after the first finds them

Seconds are on the clock of the process, from its first line; starting Python itself is the same for all and left out.
The kernel cache is a temporary folder, never the user's own.

    python benchmarks/start_up.py --repeats 7
    python benchmarks/start_up.py --only torch initialize

Rows are appended to benchmarks/results/start_up.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from side_by_side.about import RESULTS, about, append, installed

_WIDTH = 512  # of the model's one matrix: large enough that the optimizer step asks for compiled loops

_BEGIN = """
import json, resource, sys, time
wall, cpu, before = time.perf_counter(), time.process_time(), len(sys.modules)
"""
_INITIALIZE = f"""
import torch
torch.set_num_threads(1)
import trilithon
model = torch.nn.Linear({_WIDTH}, {_WIDTH})
engine = trilithon.initialize(model, {{"optimizer": "adamw"}})
"""
_STEP = f"""
engine.backward(engine(torch.ones(2, {_WIDTH})).square().mean())
engine.step()
"""
_END = """
print(json.dumps({
    "wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu, "modules": len(sys.modules) - before,
    "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
}))
"""

PROGRAMS = {
    "torch": "import torch\n",
    "trilithon": "import trilithon\n",
    "initialize": _INITIALIZE,
    "first step, cold kernels": _INITIALIZE + _STEP,
    "first step, warm kernels": _INITIALIZE + _STEP,
}


def run_once(name: str, cache: Path, limit_s: float) -> dict[str, float]:
    """One fresh process. Raises RuntimeError with its output if it fails."""
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    environment |= {"TRILITHON_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    program = _BEGIN + PROGRAMS[name] + _END
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=limit_s, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{name} failed:\n{done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(names: Sequence[str], repeats: int, limit_s: float) -> dict[str, list[dict[str, float]]]:
    """All names in turn, `repeats` times, after one round that fills the disk's cache and the warm kernel cache."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(prefix="trilithon-start-up-") as folder:
        for turn in range(-1, repeats):
            for name in names:
                cache = Path(folder) / (f"cold-{turn}" if "cold" in name else "warm")
                once = run_once(name, cache, limit_s)
                if turn >= 0:
                    found[name].append(once)
    return found


def row(name: str, runs: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Medians and spreads of one program."""
    walls, cpus = [run["wall_s"] for run in runs], [run["cpu_s"] for run in runs]
    return {
        "program": name,
        "n": len(runs),
        "wall_s": round(statistics.median(walls), 4),
        "wall_s_min": round(min(walls), 4),
        "wall_s_max": round(max(walls), 4),
        "cpu_s": round(statistics.median(cpus), 4),
        "cpu_s_min": round(min(cpus), 4),
        "modules": int(runs[0]["modules"]),
        "peak_mib": round(statistics.median(run["peak_mib"] for run in runs), 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="fresh processes of each program")
    parser.add_argument("--only", nargs="+", choices=list(PROGRAMS), default=list(PROGRAMS), metavar="PROGRAM")
    parser.add_argument("--limit-s", type=float, default=120.0, help="longest time of one process")
    parser.add_argument("--out", type=Path, default=RESULTS / "start_up.jsonl")
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error("--repeats must be at least 1")
    facts = {**about("start_up.py"), "numba": installed("numba")}
    rows = [row(name, runs) for name, runs in measure(options.only, options.repeats, options.limit_s).items()]
    append(options.out, [{**one, **facts} for one in rows])
    table = Table(title=f"start-up, median of {options.repeats}")
    for column in ("program", "wall s (min-max)", "CPU s", "modules", "peak MiB"):
        table.add_column(column, justify="left" if column == "program" else "right")
    for one in rows:
        spread = f"{one['wall_s']:.2f} ({one['wall_s_min']:.2f}-{one['wall_s_max']:.2f})"
        table.add_row(one["program"], spread, f"{one['cpu_s']:.2f}", str(one["modules"]), f"{one['peak_mib']:.0f}")
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    if facts["numba"] is None:
        print("numba is not installed, so no kernel is compiled: cold and warm are the same")
    return 0


if __name__ == "__main__":
    sys.exit(main())
