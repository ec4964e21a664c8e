"""Systems alive side by side, stepped in turn, so that whatever disturbs the machine disturbs all of them alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from side_by_side.catalogue import System
from side_by_side.processes import FailedError, Ranks
from side_by_side.shape import Shape


@dataclass(frozen=True)
class Plan:
    """How much is run and how long it may take. steps: of one system before the next has its turn."""

    world_size: int = 2
    threads: int = 1
    warmup: int = 2
    rounds: int = 5
    steps: int = 2
    namespace: bool = True
    allocator: str = "own"
    setup_limit_s: float = 300.0
    step_limit_s: float = 120.0


@dataclass
class Measured:
    """One system: seconds and losses of every step, warm-up first, and what its processes said of themselves."""

    system: System
    error: str = ""
    ready: dict[str, float] = field(default_factory=dict)  # the largest over ranks
    turns: list[list[float]] = field(default_factory=list)  # wall seconds of the slowest rank, without the warm-up
    cpu_turns: list[list[float]] = field(default_factory=list)  # CPU seconds of all ranks together
    losses: list[float] = field(default_factory=list)  # mean over ranks
    first_step_s: float = 0.0
    wire_bytes: float | None = None  # per step, all ranks, by the kernel's count
    sent_bytes: float | None = None  # per step, all ranks, by the library's ledger
    peak_bytes: int | None = None  # of a rank, since set-up

    @property
    def walls(self) -> list[float]:
        return [wall for turn in self.turns for wall in turn]

    @property
    def cpus(self) -> list[float]:
        return [cpu for turn in self.cpu_turns for cpu in turn]

    def add(self, answers: Sequence[dict[str, Any]], *, warmup: bool, wire_is_measured: bool) -> None:
        """Take in one turn: the answers of all ranks."""
        walls = [max(each) for each in zip(*(answer["wall_s"] for answer in answers), strict=True)]
        cpus = [sum(each) for each in zip(*(answer["cpu_s"] for answer in answers), strict=True)]
        losses = zip(*(answer["loss"] for answer in answers), strict=True)
        self.losses += [sum(each) / len(answers) for each in losses]
        if warmup:
            self.first_step_s = walls[0]
            return
        self.turns.append(walls)
        self.cpu_turns.append(cpus)
        self.wire_bytes = answers[0]["wire_bytes"] if wire_is_measured else None
        sent = [answer["sent_bytes"] for answer in answers]
        self.sent_bytes = None if None in sent else sum(sent)


def run_group(
    systems: Sequence[System], shape: Shape, plan: Plan, say: Callable[[str], None] = lambda _: None
) -> list[Measured]:
    """Set all systems up one after another, then step them in turn. A system that fails is left out from then on.

    Every process has ended when this returns or raises.
    """
    found = [Measured(system) for system in systems]
    with ExitStack() as stack:
        alive: list[tuple[Measured, Ranks]] = []
        for measured in found:
            say(f"set up {measured.system.name}")
            ranks = Ranks(
                measured.system, shape, plan.world_size,
                threads=plan.threads, namespace=plan.namespace, allocator=plan.allocator,
            )  # fmt: skip
            stack.callback(ranks.close)
            answers = _ask(measured, ranks, None, plan.setup_limit_s)
            if answers is not None:
                measured.ready = {key: max(answer[key] for answer in answers) for key in answers[0]}
                alive.append((measured, ranks))
        made = 0
        for turn in range(-1, plan.rounds):
            count = plan.warmup if turn < 0 else plan.steps
            say(f"turn {turn + 1} of {plan.rounds}")
            for measured, ranks in alive if turn % 2 else alive[::-1]:
                answers = _ask(
                    measured, ranks, {"command": "steps", "first": made, "count": count}, plan.step_limit_s * count
                )
                if answers is not None:
                    measured.add(answers, warmup=turn < 0, wire_is_measured=ranks.wire_is_measured)
            made += count
        for measured, ranks in alive:
            ends = _ask(measured, ranks, {"command": "quit"}, 30.0)
            peaks = [answer["peak_bytes"] for answer in ends or []]
            measured.peak_bytes = max(peaks) if peaks and None not in peaks else None
    return found


def _ask(measured: Measured, ranks: Ranks, order: dict[str, Any] | None, limit_s: float) -> list[dict[str, Any]] | None:
    if measured.error:
        return None
    try:
        return ranks.ask(order, limit_s)
    except FailedError as error:
        measured.error = str(error)
        return None
