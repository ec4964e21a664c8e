"""What does one training step cost in time, memory and bytes, beside the other ways of training the same model?

The model (a GPT), its initial values, the data and AdamW's settings are the same for all systems, and so must the
losses be. Every system runs in processes of its own, one thread a rank, on the CPU. Several systems are kept alive
together and stepped in turn, the reference always among them, so that noise of the machine hits all alike; ratios are
taken turn by turn. Where the kernel permits, a system has a network namespace of its own, and the counter of its
loopback device says what it sent. (trilithon's ranks of one machine read messages of 4 MiB and more from each
other's memory, which no counter sees: its own ledger counts them, and the variant +tcp sends them through sockets.)

    python benchmarks/train_step.py --size tiny --only ddp-fp32 'trilithon-*-fp32'
    python benchmarks/train_step.py --size 50m --reference ddp-amp --only 'fsdp2-*-bf16' 'trilithon-*-bf16'
    python benchmarks/train_step.py --only 'ddp-*+accum4' 'trilithon-*+accum4' 'trilithon-*+clip'
    python benchmarks/train_step.py --memory --depths 1 3 5
    python benchmarks/train_step.py --list

Rows are appended to benchmarks/results/train_step.jsonl. The exit status is 1 if a system failed or losses disagree.
"""

from __future__ import annotations

import argparse
import functools
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from side_by_side.about import RESULTS, about, append, installed
from side_by_side.catalogue import VARIANTS, System, catalogue, reference_of, select
from side_by_side.measure import Measured, Plan, run_group
from side_by_side.processes import namespace_command
from side_by_side.shape import SIZES, Shape
from side_by_side.summary import TOLERANCE, Row, loss_spreads, memory_row, memory_table, time_row, time_table

console = Console(width=None if sys.stdout.isatty() else 200)
progress = Console(stderr=True)


def groups(systems: Sequence[System], reference: str, size: int, known: dict[str, System]) -> list[list[System]]:
    """Cut the systems into groups of up to `size`, the reference of its kind first in each."""
    by_reference: dict[str, list[System]] = {}
    for system in systems:
        by_reference.setdefault(reference_of(system, reference, known).name, []).append(system)
    cut: list[list[System]] = []
    for name, members in by_reference.items():
        others = [system for system in members if system.name != name]
        room = max(1, size - 1)
        cut += [[known[name], *others[at : at + room]] for at in range(0, max(1, len(others)), room)]
    return cut


def run_time(options: argparse.Namespace, plan: Plan, systems: Sequence[System], known: dict[str, System]) -> int:
    """Every group in turn; rows as soon as a group is done, the table at the end."""
    shape, facts = SIZES[options.size], about("train_step.py")
    rows: list[Row] = []
    everything: list[Measured] = []
    cut = groups(systems, options.reference, options.group, known)
    for number, members in enumerate(cut):
        found = run_group(members, shape, plan, functools.partial(progress.print, f"group {number + 1} of {len(cut)}:"))
        reference = found[0]
        fresh = [time_row(one, reference, shape, plan) for one in found if not one.error]
        for row in fresh:
            row.update({"group": number, "size": options.size, **facts})
        append(options.out, fresh)
        rows += fresh
        everything += found
    console.print(time_table(rows, f"{options.size}: {shape.num_parameters():,} parameters, {plan.world_size} ranks"))
    return report(everything)


def report(found: Sequence[Measured]) -> int:
    """Failures and the agreement of losses; the exit status."""
    failed = [measured for measured in found if measured.error]
    for measured in failed:
        console.print(f"[red]failed:[/red] {measured.error}", markup=True, highlight=False)
    disagree = False
    for (dtype, accumulation, clip), (worst, whose) in loss_spreads(found).items():
        within = worst <= TOLERANCE[dtype]
        disagree |= not within
        kind = f"{dtype}, accumulation {accumulation}, clip {clip:g}"
        console.print(
            f"losses of {kind}: at most {worst:.2g} apart{f' ({whose})' if whose else ''}; "
            f"{'within' if within else 'NOT within'} the tolerance of {TOLERANCE[dtype]:g}"
        )
    return int(bool(failed) or disagree)


def run_memory(options: argparse.Namespace, plan: Plan, systems: Sequence[System]) -> int:
    """Each system alone, at each depth; the slope of its peaks."""
    plan = replace(plan, warmup=2, rounds=1, steps=1)
    facts, rows, status = about("train_step.py"), [], 0
    for system in systems:
        points: list[tuple[Shape, Measured]] = []
        for depth in options.depths:
            heads = max(1, options.memory_width // 64)
            shape = Shape(depth, options.memory_width, heads, micro_batch=1, num_tokens=64)
            progress.print(f"{system.name}: {depth} layers, {shape.num_parameters():,} parameters")
            (measured,) = run_group([system], shape, plan)
            if measured.error:
                console.print(f"[red]failed:[/red] {measured.error}", highlight=False)
                status = 1
                break
            points.append((shape, measured))
        if len(points) == len(options.depths):
            rows.append(memory_row(system.name, points, plan))
            append(options.out, [{**rows[-1], "depths": options.depths, **facts}])
    console.print(memory_table(rows))
    return status


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add: Any = made.add_argument
    add("--size", choices=SIZES, default="10m")
    add("--only", nargs="+", default=["*"], metavar="PATTERN", help="systems; only patterns with + reach variants")
    add("--reference", default="ddp-fp32", metavar="SYSTEM", help="in every group, and what ratios are taken to")
    add("--group", type=int, default=5, help="systems alive at once, the reference included (memory is what limits it)")
    add("--rounds", type=int, default=5, help="turns of each system")
    add("--steps", type=int, default=2, help="timed steps in one turn")
    add("--warmup", type=int, default=2, help="steps before the first turn")
    add("--ranks", type=int, default=2)
    add("--threads", type=int, default=1, help="of each rank")
    add("--no-namespace", action="store_true", help="share the machine's network: bytes of others are not measured")
    add("--allocator", choices=("own", "kept"), default="own",
        help="own: as each system sets glibc up (trilithon keeps freed memory); kept: all keep it")  # fmt: skip
    add("--memory", action="store_true", help="bytes per parameter and rank instead of times")
    add("--depths", type=int, nargs="+", default=[1, 3, 5], help="numbers of layers for --memory, at least two")
    add("--memory-width", type=int, default=768, help="width of the models for --memory")
    add("--setup-limit-s", type=float, default=300.0)
    add("--step-limit-s", type=float, default=120.0)
    add("--out", type=Path, default=RESULTS / "train_step.jsonl")
    add("--list", action="store_true", help="show the systems and variants, and end")
    return made


def main() -> int:
    made, known = parser(), catalogue()
    options = made.parse_args()
    if options.list:
        print("\n".join(name for name in known if "+" not in name))
        print("\n".join(f"  +{variant}: {meaning}" for variant, meaning in VARIANTS.items()))
        if installed("deepspeed") is None:
            print("  deepspeed is not installed, so its systems are not here")
        return 0
    if min(options.rounds, options.steps, options.warmup, options.ranks, options.group) < 1:
        made.error("--rounds, --steps, --warmup, --ranks and --group must be at least 1")
    if options.memory and len(set(options.depths)) < 2:
        made.error("--memory needs at least two different --depths")
    if options.reference not in known:
        made.error(f"--reference {options.reference} does not exist; --list shows the names")
    try:
        systems = select(options.only, known)
    except ValueError as error:
        made.error(str(error))
    plan = Plan(
        options.ranks, options.threads, options.warmup, options.rounds, options.steps, not options.no_namespace,
        options.allocator, options.setup_limit_s, options.step_limit_s,
    )  # fmt: skip
    if plan.namespace and not namespace_command():
        progress.print("unshare -n is not permitted here: bytes on the wire are not measured")
    if options.memory:
        return run_memory(options, plan, systems)
    return run_time(options, plan, systems, known)


def _stop(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)  # so that a stopped benchmark ends its ranks as Ctrl-C does
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        progress.print("stopped; no process is left")
        sys.exit(130)
