"""How fast are checkpoints written and read, as a share of what the machine's disk does by itself?

The state is that of Adam in fp32 (12 bytes a parameter), cut over the ranks. Every round goes through all systems, so
that a busy disk disturbs all of them alike: write, read with the files dropped from memory, and an asynchronous save.

    raw         as many bytes in a row, by all ranks at once, with fsync: what the others are shares of
    trilithon   engine.save and engine.load at stage 3
    dcp-fsdp2   torch.distributed.checkpoint of a model under fully_shard
    torch.save  each rank's part as one file, with fsync; loads at the same number of ranks only
    deepspeed   save_checkpoint and load_checkpoint at stage 3, where it is installed

    python benchmarks/checkpoint.py --parameters 200e6 --rounds 3
    python benchmarks/checkpoint.py --parameters 4e6 --only trilithon --rounds 1

Rows are appended to benchmarks/results/checkpoint.jsonl. It needs about 60 bytes of memory a parameter, and 36 of disk.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from side_by_side.about import RESULTS, about, append, installed

REFERENCE = "raw"
SYSTEMS = ("raw", "trilithon", "dcp-fsdp2", "torch.save", "deepspeed")
_BYTES_A_PARAMETER = 12

console = Console(stderr=True)


class Ranks:
    """The processes of one system."""

    def __init__(self, system: str, world_size: int, layers: int, limit_s: float) -> None:
        from checkpointing.rank import serve

        self.system, self._limit_s = system, limit_s
        context = multiprocessing.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=serve,
                args=(theirs, system, layers),
                kwargs={"rank": rank, "world_size": world_size, "port": port},
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)
        self._answers()

    def ask(self, what: str, folder: Path) -> list[dict[str, Any]]:
        """One answer of every rank."""
        for pipe in self._pipes:
            pipe.send((what, str(folder)))
        return self._answers()

    def _answers(self) -> list[dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + self._limit_s
        while len(found) < len(self._pipes):
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in found]
            ready = wait(waiting, timeout=max(deadline - time.monotonic(), 0.0))
            if not ready:
                raise RuntimeError(f"{self.system}: {len(waiting)} ranks did not answer within {self._limit_s:g} s")
            for pipe in ready:
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    found[rank] = self._pipes[rank].recv()
                except EOFError:
                    raise RuntimeError(f"{self.system}: rank {rank} ended without an answer") from None
                if "error" in found[rank]:
                    raise RuntimeError(f"{self.system}, rank {rank}:\n{found[rank]['error']}")
        return [found[rank] for rank in range(len(self._pipes))]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


@contextmanager
def running(names: Sequence[str], world_size: int, layers: int, limit_s: float) -> Iterator[dict[str, Ranks]]:
    """All systems at once, ended for certain."""
    alive: dict[str, Ranks] = {}
    try:
        for name in names:
            console.print(f"{name}: starting {world_size} ranks")
            alive[name] = Ranks(name, world_size, layers, limit_s)
        yield alive
    finally:
        for ranks in alive.values():
            ranks.close()


def drop_from_memory(folder: Path) -> int:
    """Have the next read come from the disk, as far as the file system lets us; returns the bytes of all files."""
    total = 0
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as stream:
                os.fsync(stream.fileno())
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            total += path.stat().st_size
    return total


def one_round(ranks: Ranks, folder: Path) -> dict[str, float | None]:
    """Seconds of the slowest rank for each part; the folder is empty before and after."""
    folder.mkdir()
    try:
        saved = max(answer["seconds"] for answer in ranks.ask("save", folder))
        size = drop_from_memory(folder)
        loaded = max(answer["seconds"] for answer in ranks.ask("load", folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        answers = ranks.ask("async", folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    offered = all(answer["seconds"] is not None for answer in answers)
    return {
        "save_s": saved,
        "load_s": loaded,
        "file_bytes": float(size),
        "blocked_s": max(answer["blocked"] for answer in answers) if offered else None,
        "async_s": max(answer["seconds"] for answer in answers) if offered else None,
    }


def rows(found: dict[str, list[dict[str, Any]]], payload: int, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """One row a system: medians over rounds, and medians of the ratios taken within each round."""
    made = []
    for name, rounds in found.items():
        row: dict[str, Any] = {"system": name, "payload_bytes": payload, "n": len(rounds), **facts}
        for key in ("save_s", "load_s", "blocked_s", "async_s", "file_bytes"):
            values = [each[key] for each in rounds if each[key] is not None]
            row[key] = round(statistics.median(values), 4) if values else None
        for key in ("save_s", "load_s"):
            row[f"{key[:-2]}_mb_s"] = round(payload / row[key] / 1e6, 1)
            row[f"{key}_all"] = [round(each[key], 4) for each in rounds]
            if REFERENCE in found:
                shares = [raw[key] / each[key] for raw, each in zip(found[REFERENCE], rounds, strict=True)]
                row[f"{key[:-2]}_share_of_raw"] = round(statistics.median(shares), 3)
        if row["blocked_s"] is not None:
            shares = [each["blocked_s"] / each["save_s"] for each in rounds]
            row["blocked_share_of_save"] = round(statistics.median(shares), 3)
        made.append(row)
    return made


def table(made: Sequence[dict[str, Any]]) -> Table:
    """The rows for people."""
    columns = {
        "system": "system", "save_mb_s": "write MB/s", "save_share_of_raw": "of raw", "load_mb_s": "read MB/s",
        "load_share_of_raw": "of raw", "blocked_s": "async blocks s", "blocked_share_of_save": "of a save",
    }  # fmt: skip
    shown = Table()
    for name in columns.values():
        shown.add_column(name, justify="left" if name == "system" else "right", no_wrap=name == "system")
    for row in made:
        shown.add_row(*("" if row.get(key) is None else str(row[key]) for key in columns))
    return shown


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = made.add_argument
    add("--parameters", type=float, default=200e6, help="of the model")
    add("--ranks", type=int, default=2)
    add("--rounds", type=int, default=3)
    add("--only", nargs="+", choices=SYSTEMS, help="these systems; raw is always among them")
    add("--folder", type=Path, help="where to write; default: a new folder in the current one")
    add("--limit-s", type=float, default=300.0, help="for one answer of a system")
    add("--out", type=Path, default=RESULTS / "checkpoint.jsonl")
    return made


def main() -> int:
    made = parser()
    options = made.parse_args()
    if min(options.rounds, options.ranks) < 1 or options.parameters < 1:
        made.error("--rounds, --ranks and --parameters must be at least 1")
    from checkpointing.systems import build, num_layers

    layers = num_layers(int(options.parameters))
    count = layers * sum(p.numel() for p in build(1).parameters())
    names = [name for name in SYSTEMS if name == REFERENCE or not options.only or name in options.only]
    if installed("deepspeed") is None and "deepspeed" in names:
        names.remove("deepspeed")
        console.print("deepspeed is not installed, so it is left out")
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    above = options.folder or Path.cwd()
    with tempfile.TemporaryDirectory(prefix="trilithon-checkpoints-", dir=above) as scratch:
        with running(names, options.ranks, layers, options.limit_s) as alive:
            for number in range(options.rounds + 1):  # the first imports, connects and allocates: it is not counted
                for name in names:
                    console.print(f"round {number} of {options.rounds}: {name}")
                    once = one_round(alive[name], Path(scratch, "now"))
                    if number:
                        found[name].append(once)
    facts = {**about("checkpoint.py"), "parameters": count, "ranks": options.ranks}
    result = rows(found, _BYTES_A_PARAMETER * count, facts)
    append(options.out, result)
    Console().print(table(result))
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
    except RuntimeError as error:
        console.print(str(error), markup=False)
        sys.exit(1)
