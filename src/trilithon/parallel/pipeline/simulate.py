"""What a schedule costs, without running it: who waits when, and how many micro-batches are alive.

Each stage does its actions in its order; one begins when the one before it is done and what it needs has arrived.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trilithon.errors import ProtocolError
from trilithon.parallel.pipeline.schedule import Action, Kind, Orders

COSTS: Mapping[Kind, float] = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.INPUT: 1.0, Kind.WEIGHT: 1.0}
"""Durations of actions through one stage's layers: a backward is taken to be twice a forward."""


@dataclass(frozen=True, slots=True)
class Span:
    """When an action ran."""

    action: Action
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """spans: by stage, in order. live: by stage, the most micro-batches (of one chunk) that were between their forward
    and the end of their backward at one time."""

    spans: tuple[tuple[Span, ...], ...]
    live: tuple[int, ...]

    @property
    def duration(self) -> float:
        return max(span.stop for spans in self.spans for span in spans)

    @property
    def bubble(self) -> float:
        """The part of the stages' time in which they wait: (S - 1) / (m + S - 1) for GPipe and 1F1B."""
        busy = sum(span.stop - span.start for spans in self.spans for span in spans)
        return 1.0 - busy / (self.duration * len(self.spans))

    def draw(self, width: int = 100) -> str:
        """One line per stage, time from left to right, '.' where it waits. Only for whole durations."""
        lines = []
        for stage, spans in enumerate(self.spans):
            cells = ["." for _ in range(round(self.duration))]
            for span in spans:
                for slot in range(round(span.start), round(span.stop)):
                    cells[slot] = str(span.action)
            size = max(len(cell) for cell in cells) + 1
            lines.append((f"stage {stage}  " + "".join(cell.ljust(size) for cell in cells)).rstrip()[:width])
        return "\n".join(lines)


def simulate(orders: Orders, chunks: int = 1, costs: Mapping[Kind, float] = COSTS, message_s: float = 0.0) -> Timeline:
    """Run the orders of `schedule.make_orders` on paper. costs: of an action through all chunks of a stage.

    Raises ProtocolError when stages wait for each other for ever, or for something that nobody makes.
    """
    stages = len(orders)
    last = stages * chunks - 1
    ended: dict[tuple[str, int, int], float] = {}  # (F or B, place, micro) -> when its result is there
    clock, at = [0.0] * stages, [0] * stages
    spans: list[list[Span]] = [[] for _ in orders]
    while any(at[stage] < len(order) for stage, order in enumerate(orders)):
        moved = False
        for stage, order in enumerate(orders):
            while at[stage] < len(order):
                action = order[at[stage]]
                ready = _ready(action, stage, stages, last, ended, message_s)
                if ready is None:
                    break
                start = max(clock[stage], ready)
                clock[stage] = stop = start + costs[action.kind] / chunks
                place = action.chunk * stages + stage
                if action.kind is not Kind.WEIGHT:
                    direction = "F" if action.kind is Kind.FORWARD else "B"
                    ended[direction, place, action.micro] = stop
                spans[stage].append(Span(action, start, stop))
                at[stage] += 1
                moved = True
        if not moved:
            stuck = {stage: str(order[at[stage]]) for stage, order in enumerate(orders) if at[stage] < len(order)}
            raise ProtocolError(f"the schedule never ends: stages wait before {stuck}.")
    return Timeline(tuple(map(tuple, spans)), tuple(_most_alive(order) for order in orders))


def _ready(  # noqa: PLR0917 (the place of an action)
    action: Action, stage: int, stages: int, last: int, ended: Mapping[tuple[str, int, int], float], message_s: float
) -> float | None:
    """When all that the action needs is there; None if not all of it has been made."""
    place, micro = action.chunk * stages + stage, action.micro
    if action.kind is Kind.FORWARD:
        needs = [("F", place - 1, micro)] if place > 0 else []
    elif action.kind is Kind.WEIGHT:
        needs = [("B", place, micro)]
    else:
        needs = [("F", place, micro)] + ([("B", place + 1, micro)] if place < last else [])
    if any(need not in ended for need in needs):
        return None
    return max((ended[need] + (message_s if need[1] != place else 0.0) for need in needs), default=0.0)


def _most_alive(order: list[Action]) -> int:
    """Chunk by chunk, micro-batches whose activations are kept: until their backward, or their weight gradients."""
    alive = most = 0
    split = any(action.kind is Kind.WEIGHT for action in order)
    for action in order:
        if action.kind is Kind.FORWARD:
            alive += 1
            most = max(most, alive)
        elif action.kind is (Kind.WEIGHT if split else Kind.BACKWARD):
            alive -= 1
    return most
