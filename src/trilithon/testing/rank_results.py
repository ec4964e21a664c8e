"""What is known of each rank when a job is over, and how a failure is told.

The rank that failed first is the one to read about: its traceback and output come first, then one line for every other
rank, then what the others printed.
"""

from __future__ import annotations

import pickle
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trilithon.errors import LaunchError
from trilithon.testing.fork_server import Ending, Record

_OUTPUT_LINES = 40  # shown per rank of a failure; the stacks of a rank that was ended are the last of them


@dataclass(frozen=True, slots=True)
class RankResult:
    """How one rank ended.

    exit_code: 0, what the body exited with, 1 if it raised, or minus the number of the signal that killed it.
    output: standard output and error together (the last 256 KiB). value: what the body returned.
    error: the traceback; None unless the body raised. failed_at: `time.monotonic()` of a failure of its own.
    """

    rank: int
    ending: Ending
    exit_code: int
    output: str
    value: Any
    error: str | None
    summary: str
    failed_at: float | None
    seconds: float


class RanksError(LaunchError):
    """A rank failed or was not done in time; `results` holds what every rank did, `first` the one that failed first."""

    def __init__(self, message: str, results: Sequence[RankResult], first: RankResult) -> None:
        super().__init__(message)
        self.results = list(results)
        self.first = first


def rank_result(number: int, record: Record) -> RankResult:
    """Open the value in the caller's process, where its classes can be imported."""
    report = record.report
    value = report.value if report is not None and record.ending is Ending.RETURNED else None
    return RankResult(
        rank=number,
        ending=record.ending,
        exit_code=record.exit_code,
        output=record.output,
        value=None if value is None else pickle.loads(value),
        error=report.error if report is not None else None,
        summary=(report.summary if report is not None else None) or _summary(record),
        failed_at=record.failed_at,
        seconds=record.seconds,
    )


def _summary(record: Record) -> str:
    match record.ending:
        case Ending.RETURNED:
            return "the body returned"
        case Ending.EXITED:
            return f"exited with status {record.exit_code} before its body was over"
        case Ending.KILLED:
            return f"killed by signal {_signal_name(-record.exit_code)}"
        case Ending.ENDED:
            return "still running when another rank failed; ended"
        case Ending.TIMED_OUT:
            return "still running when the time was over; ended"
        case Ending.RAISED:
            return "the body raised"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def failure(results: Sequence[RankResult], timeout_s: float) -> RanksError:
    """The exception for results of which at least one is not RETURNED."""
    failed = [result for result in results if result.failed_at is not None]
    unfinished = [result for result in results if result.ending is not Ending.RETURNED]
    first = min(failed, key=lambda result: result.failed_at or 0.0) if failed else unfinished[0]
    if failed:
        lines = [f"rank {first.rank} of {len(results)} failed first: {first.summary}"]
    else:
        late = ", ".join(str(result.rank) for result in unfinished)
        lines = [f"{len(unfinished)} of {len(results)} ranks (rank {late}) were not done within {timeout_s:g} s"]
    if first.error is not None:
        lines += [f"--- rank {first.rank}, after {first.seconds:.2f} s ---", first.error.rstrip()]
    lines += [f"rank {result.rank}: {result.summary}" for result in results if result is not first]
    for result in (first, *(result for result in results if result is not first)):
        lines += _output(result)
    return RanksError("\n".join(lines), results, first)


def _output(result: RankResult) -> list[str]:
    lines = result.output.rstrip().splitlines()
    if not lines:
        return []
    left_out = len(lines) - _OUTPUT_LINES
    head = f"--- output of rank {result.rank}{f' (without its first {left_out} lines)' if left_out > 0 else ''} ---"
    return [head, *lines[-_OUTPUT_LINES:]]
