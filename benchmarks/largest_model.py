"""How large a model trains when every rank has a hard limit of memory?

A GPT of `--width` grows by layers. A size counts when all ranks build it and train `--steps` steps with finite losses
under RLIMIT_DATA of `--limit-gib` each (what a process allocates for itself; see largest_models/rank.py) and within
`--limit-s` seconds. For each system the largest such size is found by bisection, to `--within` of it. A try is a set of
processes of its own, ended for certain; a folder per try under `--path` is removed afterwards.

    ddp                  torch DistributedDataParallel, fp32: 16 bytes a parameter on every rank
    fsdp2-offload        torch fully_shard with CPUOffloadPolicy, built on the meta device
    deepspeed-3-cpu      ZeRO stage 3, optimizer and parameters offloaded to the CPU, built under zero.Init
    deepspeed-3-nvme     the same offloaded to files, where its asynchronous IO can be built
    trilithon-3          stage 3, everything resident, built under zero.init
    trilithon-3-host     the same through the host tier
    trilithon-3-disk     everything on disk between its uses; ends at `--most-millions`, not at the limit of memory

    python benchmarks/largest_model.py --path /some/disk
    python benchmarks/largest_model.py --only ddp trilithon-3-disk --limit-gib 1 --most-millions 600

Rows are appended to benchmarks/results/largest_model.jsonl. What is compared is memory: a busy machine changes nothing
but the seconds.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from side_by_side.about import RESULTS, about, append
from side_by_side.shape import Shape

HERE = Path(__file__).resolve().parent
# Bytes a parameter and rank, on N ranks, that the search begins with; it goes on from what it finds.
FIRST_GUESS: dict[str, Callable[[int], float]] = {
    "ddp": lambda n: 19.0,
    "fsdp2-offload": lambda n: 19 / n,
    "deepspeed-3-cpu": lambda n: 25 / n,
    "deepspeed-3-nvme": lambda n: 25 / n,
    "trilithon-3": lambda n: 17 / n,
    "trilithon-3-host": lambda n: 17 / n,
    "trilithon-3-disk": lambda n: 0.0,
}
console = Console(stderr=True)


@dataclass(frozen=True)
class Search:
    """What is tried and for how long."""

    limit_bytes: int
    world_size: int
    steps: int
    limit_s: float
    within: float
    most: int  # parameters
    base: Shape
    folder: Path
    interpreters: dict[str, str]

    def shape(self, layers: int) -> Shape:
        return Shape(**{**asdict(self.base), "num_layers": layers})

    def layers_for(self, numel: float) -> int:
        """The most layers whose model has no more parameters than that, at least one."""
        block = self.shape(2).num_parameters() - self.shape(1).num_parameters()
        return max(1, int((numel - self.shape(1).num_parameters()) // block) + 1)


Try = Callable[[int], dict[str, Any]]


def largest(attempt: Try, first: int, most: int, within: float) -> tuple[int, list[dict[str, Any]]]:
    """The largest number of layers, at most `most`, for which `attempt` says "ok"; 0 if one layer does not either.

    Doubles or halves from `first` until one size fits and another does not, then bisects until they are `within` of
    each other. Returns it with all attempts.
    """
    done: list[dict[str, Any]] = []

    def fits(layers: int) -> bool:
        done.append({"layers": layers, **attempt(layers)})
        return bool(done[-1]["ok"])

    low, high, layers = 0, most + 1, min(first, most)
    while layers > low:
        if fits(layers):
            low = layers
            layers = min(2 * layers, high - 1) if high == most + 1 else (low + high) // 2
        else:
            high = layers
            layers = layers // 2 if low == 0 else (low + high) // 2
        if low and high <= most and high - low <= max(1, within * low):
            break
    return low, done


def attempt(system: str, layers: int, search: Search) -> dict[str, Any]:
    """Whether all ranks built and trained it; the processes are gone when this returns."""
    shape = search.shape(layers)
    console.print(f"{system}: {layers} layers, {shape.num_parameters() / 1e6:.0f} M parameters ...", end=" ")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="largest-model-", dir=search.folder) as folder:
        with ranks_of(system, shape, search, Path(folder)) as processes:
            answers = wait_for(processes, began + search.limit_s)
    answers = answers or [{"error": f"not done within {search.limit_s:g} s"}]
    errors = [answer["error"] for answer in answers if "error" in answer]
    if not errors and not all(math.isfinite(loss) for answer in answers for loss in answer["losses"]):
        errors = ["a loss is not finite"]
    found: dict[str, Any] = {"ok": not errors, "seconds": round(time.monotonic() - began, 1)}
    if errors:
        found["why"] = errors[0]
    else:
        for key in ("peak_resident_mib", "data_mib", "built_s"):
            found[key] = max(answer[key] for answer in answers)
        found["last_step_s"] = max(answer["step_s"][-1] for answer in answers)
    console.print("fits" if found["ok"] else found["why"].splitlines()[0][:120], markup=False)
    return found


@contextmanager
def ranks_of(
    system: str, shape: Shape, search: Search, folder: Path
) -> Iterator[list[tuple[subprocess.Popen[bytes], Path]]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
    started = []
    try:
        for rank in range(search.world_size):
            order = {
                "system": system, "shape": asdict(shape), "rank": rank, "world_size": search.world_size, "port": port,
                "steps": search.steps, "limit_bytes": search.limit_bytes, "folder": str(folder),
                "path": [str(HERE), str(HERE.parent / "src")],
            }  # fmt: skip
            command = [interpreter(system, search), str(HERE / "largest_models" / "rank.py"), json.dumps(order)]
            output = folder.with_name(f"{folder.name}-rank{rank}.out")
            with output.open("wb") as stream:
                process = subprocess.Popen(
                    command, stdout=stream, stderr=subprocess.STDOUT, env=environment, start_new_session=True
                )
            started.append((process, output))
        yield started
    finally:
        for process, output in started:
            end(process)
            output.unlink(missing_ok=True)


def interpreter(system: str, search: Search) -> str:
    return search.interpreters.get(system.partition("-")[0], sys.executable)


def end(process: subprocess.Popen[bytes]) -> None:
    """With everything that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_for(processes: list[tuple[subprocess.Popen[bytes], Path]], deadline: float) -> list[dict[str, Any]]:
    """What the ranks said. When one has failed, those that still run are not waited for; nothing if time is over."""
    while time.monotonic() < deadline:
        ends = [process.poll() for process, _ in processes]
        failed = [answer_of(process, path) for process, path in processes if process.returncode not in (None, 0)]
        if failed:
            return failed
        if all(status == 0 for status in ends):
            return [answer_of(process, path) for process, path in processes]
        time.sleep(0.1)
    return []


def answer_of(process: subprocess.Popen[bytes], path: Path) -> dict[str, Any]:
    text = path.read_text(errors="replace").rstrip()
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            try:
                found: dict[str, Any] = json.loads(line)
            except ValueError:
                continue
            return found
    return {"error": f"ended with status {process.returncode}: {text[-300:]}"}


def row(system: str, search: Search) -> dict[str, Any]:
    """The largest size of one system and how it was found."""
    bytes_each = FIRST_GUESS[system](search.world_size)
    guess = search.limit_bytes / bytes_each if bytes_each else search.most
    most = search.layers_for(search.most)
    layers, tries = largest(
        lambda layers: attempt(system, layers, search), search.layers_for(guess), most, search.within
    )
    best = next((each for each in tries if each["layers"] == layers and each["ok"]), {})
    failed = [each for each in tries if not each["ok"]]
    return {
        "question": "largest model under a limit of memory",
        "system": system,
        "parameters": search.shape(layers).num_parameters() if layers else 0,
        "layers": layers,
        "bounded_by": "size tried" if layers == most else "memory" if layers else "does not run",
        "limit_mib": search.limit_bytes >> 20,
        "ranks": search.world_size,
        **{key: best.get(key) for key in ("peak_resident_mib", "data_mib", "built_s", "last_step_s")},
        "next_failed": min(failed, key=lambda each: each["layers"]) if failed else None,
        "tries": len(tries),
    }


def table(rows: list[dict[str, Any]]) -> Table:
    shown = Table()
    for name in ("system", "M parameters", "of DDP", "bounded by", "peak resident MiB", "s a step"):
        shown.add_column(name, justify="right" if name != "system" else "left")
    reference = next((each["parameters"] for each in rows if each["system"] == "ddp"), 0)
    for each in rows:
        ratio = f"{each['parameters'] / reference:.1f}" if reference else ""
        figures = (each["peak_resident_mib"], each["last_step_s"])
        shown.add_row(
            each["system"], f"{each['parameters'] / 1e6:.0f}", ratio, each["bounded_by"],
            *("" if figure is None else str(figure) for figure in figures),
        )  # fmt: skip
    return shown


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = made.add_argument
    add("--only", nargs="+", choices=list(FIRST_GUESS), help="these systems; default: all that can be imported")
    add("--limit-gib", type=float, default=2.0, help="of memory for each rank")
    add("--ranks", type=int, default=2)
    add("--steps", type=int, default=2)
    add("--width", type=int, default=512)
    add("--vocabulary", type=int, default=8192)
    add("--tokens", type=int, default=32, help="context; every rank has one sequence a step")
    add("--within", type=float, default=0.04, help="of the size, where the search ends")
    add("--most-millions", type=float, default=1500.0, help="parameters; larger models are not tried")
    add("--limit-s", type=float, default=400.0, help="for one try")
    add("--path", type=Path, default=Path("."), help="a folder on the disk in question")
    add("--deepspeed-python", help="an interpreter that has DeepSpeed; default: this one, if it has it")
    add("--out", type=Path, default=RESULTS / "largest_model.jsonl")
    return made


def main() -> int:
    made = parser()
    options = made.parse_args()
    if min(options.ranks, options.steps, options.width, options.limit_gib) <= 0:
        made.error("--ranks, --steps, --width and --limit-gib must be above 0")
    search = Search(
        limit_bytes=int(options.limit_gib * 2**30),
        world_size=options.ranks,
        steps=options.steps,
        limit_s=options.limit_s,
        within=options.within,
        most=int(options.most_millions * 1e6),
        base=Shape(1, options.width, max(1, options.width // 64), 1, options.tokens, options.vocabulary),
        folder=options.path.resolve(),
        interpreters={"deepspeed": options.deepspeed_python} if options.deepspeed_python else {},
    )
    needed = 20 * search.most  # bytes of everything on disk, over all ranks
    free = shutil.disk_usage(search.folder).free
    if free < needed:
        made.error(f"{search.folder} has {free / 1e9:.0f} GB free, and {needed / 1e9:.0f} may be needed")
    rows = []
    with tempfile.TemporaryDirectory(prefix="largest-model-extensions-", dir=search.folder) as extensions:
        # DeepSpeed compiles on first use; a build that was killed elsewhere leaves a lock for which it waits for ever
        os.environ["TORCH_EXTENSIONS_DIR"] = extensions
        for system in options.only or FIRST_GUESS:
            rows.append({**row(system, search), **about("largest_model.py")})
            append(options.out, rows[-1:])
    Console().print(table(rows))
    return 0


def _stop(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        console.print("stopped; no process is left")
        sys.exit(130)
