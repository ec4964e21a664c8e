"""Schedules as data: for each stage the order of its forwards and backwards, before anything runs.

    F  forward of one micro-batch through one chunk of layers
    B  backward of it
    I  the part of a backward that makes the gradient of the chunk's input
    W  the part that makes the gradients of its weights

With S stages and m micro-batches, chunks numbered c on each of them, the layers go through (chunk 0, stages 0..S-1),
(chunk 1, stages 0..S-1) and so on. Sends and receives follow from the order: see `executor`.
(GPipe: Huang et al. 2019, arXiv:1811.06965, section 2.3. 1F1B: Narayanan et al. 2019, PipeDream, section 3.3, flushed
every step as in Narayanan et al. 2021, arXiv:2104.04473, section 2.2; interleaved: section 2.2.2 there. Zero bubble:
Qi et al. 2024, arXiv:2401.10241, section 2.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from trilithon.errors import ConfigError


class Kind(StrEnum):
    """What an action computes."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHT = "W"


@dataclass(frozen=True, slots=True)
class Action:
    """One entry of a stage's order. micro: of the micro-batch; chunk: of the stage's layers."""

    kind: Kind
    micro: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.micro}" + (f"/{self.chunk}" if self.chunk else "")


Orders = list[list[Action]]  # by stage


def make_orders(schedule: str, stages: int, micros: int, chunks: int = 1) -> Orders:
    """The order of every stage. schedule: "gpipe", "1f1b", "interleaved", "zero-bubble" or "forward" (evaluation).

    Raises ConfigError for numbers that the schedule cannot do.
    """
    if stages < 1 or micros < 1 or chunks < 1:
        raise ConfigError(f"a pipeline needs stages, micro-batches and chunks; got {stages}, {micros}, {chunks}.")
    if schedule == "forward":
        return [_forwards(micros, chunks) for _ in range(stages)]
    if schedule == "interleaved":
        _require_rounds(stages, micros)
        return [_interleaved(stage, stages, micros, chunks) for stage in range(stages)]
    if chunks > 1:
        raise ConfigError(
            f"pipeline.schedule={schedule!r} has one chunk of layers per stage, and pipeline.chunks is {chunks}. "
            'Use pipeline.schedule="interleaved", or leave pipeline.chunks out.'
        )
    if schedule == "gpipe":
        return [_all_forwards_first(micros) for _ in range(stages)]
    if schedule == "1f1b":
        return [_one_forward_one_backward(stage, stages, micros) for stage in range(stages)]
    if schedule == "zero-bubble":
        return _zero_bubble(stages, micros)
    raise ConfigError(
        f"pipeline.schedule={schedule!r}: there are gpipe, 1f1b, interleaved and zero-bubble; 1f1b is a good start."
    )


def _require_rounds(stages: int, micros: int) -> None:
    if micros % stages:
        below = micros // stages * stages
        nearest = f"{below} or {below + stages}" if below else f"{stages}"
        raise ConfigError(
            f"pipeline.schedule='interleaved' goes in rounds of as many micro-batches as there are stages, and "
            f"batch.accumulation={micros} is not a multiple of {stages}. Use {nearest}, or pipeline.schedule='1f1b'."
        )


def _forwards(micros: int, chunks: int) -> list[Action]:
    return [Action(Kind.FORWARD, micro, chunk) for micro in range(micros) for chunk in range(chunks)]


def _all_forwards_first(micros: int) -> list[Action]:
    """Backwards in order of micro-batch as well, so that gradients add up as on one process."""
    forwards = [Action(Kind.FORWARD, micro) for micro in range(micros)]
    return forwards + [Action(Kind.BACKWARD, micro) for micro in range(micros)]


def _one_forward_one_backward(stage: int, stages: int, micros: int) -> list[Action]:
    warm_up = min(stages - stage - 1, micros)
    order = [Action(Kind.FORWARD, micro) for micro in range(warm_up)]
    for micro in range(micros - warm_up):
        order += [Action(Kind.FORWARD, warm_up + micro), Action(Kind.BACKWARD, micro)]
    return order + [Action(Kind.BACKWARD, micro) for micro in range(micros - warm_up, micros)]


def _interleaved(stage: int, stages: int, micros: int, chunks: int) -> list[Action]:
    """Rounds of S micro-batches through one chunk after the other; the wait for the pipeline to fill is chunks times
    shorter, for chunks times the messages."""
    total = micros * chunks

    def place(index: int) -> tuple[int, int]:
        """(micro-batch, chunk) of the index-th forward."""
        rounds, within = divmod(index, stages * chunks)
        chunk, offset = divmod(within, stages)
        return rounds * stages + offset, chunk

    forwards = [Action(Kind.FORWARD, *place(index)) for index in range(total)]
    backwards = [Action(Kind.BACKWARD, micro, chunks - 1 - chunk) for micro, chunk in map(place, range(total))]
    warm_up = total if micros == stages else min(2 * (stages - stage - 1) + (chunks - 1) * stages, total)
    order = forwards[:warm_up]
    for index in range(total - warm_up):
        order += [forwards[warm_up + index], backwards[index]]
    return order + backwards[total - warm_up :]


def _zero_bubble(stages: int, micros: int) -> Orders:
    """1F1B whose weight gradients wait for moments in which a stage would otherwise wait.

    Slot by slot, with forwards, input gradients and weight gradients taken to be of equal length, each stage does the
    first of these that it can: the gradient its predecessor waits for, a forward, a weight gradient. At most S
    micro-batches are between their forward and their weight gradient, so no stage needs more memory than the first one
    under 1F1B.
    """
    done: list[dict[str, int]] = [{"F": 0, "I": 0, "W": 0} for _ in range(stages)]  # how many of each, at slot's begin
    orders: Orders = [[] for _ in range(stages)]
    while any(counts["W"] < micros for counts in done):
        before = [dict(counts) for counts in done]
        for stage, counts in enumerate(before):
            fed = micros if stage == 0 else before[stage - 1]["F"]
            asked = counts["F"] if stage == stages - 1 else min(before[stage + 1]["I"], counts["F"])
            if counts["I"] < asked:
                kind = Kind.INPUT
            elif (
                counts["F"] < fed and counts["F"] - counts["I"] < stages - stage and counts["F"] - counts["W"] < stages
            ):
                kind = Kind.FORWARD
            elif counts["W"] < counts["I"]:
                kind = Kind.WEIGHT
            else:
                continue
            orders[stage].append(Action(kind, counts[kind]))
            done[stage][kind] += 1
    return orders


def channel_order(orders: Orders, chunks: int = 1) -> list[str]:
    """What is wrong with the order of messages: a receiver that expects another one than its peer sends next.

    Messages from one stage to another of one kind arrive in the order in which they were sent.
    """
    sent: dict[tuple[str, int, int], list[tuple[int, int]]] = {}
    expected: dict[tuple[str, int, int], list[tuple[int, int]]] = {}
    stages = len(orders)
    last = stages * chunks - 1
    for stage, order in enumerate(orders):
        for action in order:
            place = action.chunk * stages + stage
            if action.kind is Kind.FORWARD:
                if place > 0:
                    expected.setdefault(("F", (place - 1) % stages, stage), []).append((place - 1, action.micro))
                if place < last:
                    sent.setdefault(("F", stage, (place + 1) % stages), []).append((place, action.micro))
            elif action.kind is not Kind.WEIGHT:
                if place < last:
                    expected.setdefault(("B", (place + 1) % stages, stage), []).append((place + 1, action.micro))
                if place > 0:
                    sent.setdefault(("B", stage, (place - 1) % stages), []).append((place, action.micro))
    return [
        f"{kind} from stage {source} to {target}: {sent.get((kind, source, target))} is sent, {wanted} expected"
        for (kind, source, target), wanted in expected.items()
        if sent.get((kind, source, target)) != wanted
    ]


def count(order: Sequence[Action], kind: Kind) -> int:
    return sum(action.kind is kind for action in order)
