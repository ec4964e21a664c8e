"""Why ranks wait for each other, from what each of them says: pure functions from rank states to one table.

The likeliest cause comes first: an exception, calls that differ between ranks, a program that ended early, a rank that
never arrived. A difference in the journals is a fact; the other causes are where each rank was when the alarm came.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from trilithon.comm.rank_state import CallState, RankState, Status


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first position of a group at which ranks issued different calls."""

    group: str
    sequence: int
    calls: dict[int, CallState]  # by rank


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Which ranks others wait for, in which call, and why."""

    culprits: tuple[int, ...]
    awaited: CallState | None
    cause: str
    way_out: str


def diagnose(states: Sequence[RankState]) -> Diagnosis:
    """The probable cause. `states`: one per rank, in rank order, `Status.GONE` for those that did not answer."""
    awaited, missing = _missing(states)
    raised = [state for state in states if state.status is Status.RAISED]
    if raised:
        cause = "; ".join(f"rank {s.rank} raised {s.error}" + (f" at {s.where}" if s.where else "") for s in raised)
        return Diagnosis(_ranks(raised), awaited, f"{cause}.", "Its traceback is in the output of that rank.")
    differs = first_mismatch(states)
    if differs is not None:
        return _explain(differs, states)
    left = [s for s in states if s.status is Status.LEFT and s.rank in missing]
    gone = [s for s in states if s.status is Status.GONE]
    if left:
        cause = f"{_named(left)} left early: its program ended and the others still wait for it."
        return Diagnosis(_ranks(left), awaited, cause, _make_it_on_all(awaited))
    if gone:
        cause = f"{_named(gone)} ended without a word (killed, out of memory, or its host is unreachable)."
        return Diagnosis(_ranks(gone), awaited, cause, "Look at the output of that rank and at the kernel's log.")
    late = [s for s in states if s.rank in missing]
    if any(s.status is Status.UNKNOWN for s in states):
        return Diagnosis(
            (),
            awaited,
            "the other ranks could not be asked.",
            "Look at the output of rank 0 first: it hosts the store.",
        )
    if not late:
        return Diagnosis(
            (),
            awaited,
            "every rank is inside the same collective, so the transport between them is stuck or slow.",
            "Check the network between the hosts, or raise comm.wait_limit_s.",
        )
    return _never_arrived(late, states, awaited)


def first_mismatch(states: Sequence[RankState]) -> Mismatch | None:
    """The earliest position in any group at which two ranks that share the group issued different calls."""
    groups = {(name, tuple(group.ranks)) for state in states for name, group in state.groups.items()}
    for name, ranks in sorted(groups):
        journals = {
            state.rank: {call.sequence: call for call in state.groups[name].calls}
            for state in states
            if name in state.groups and tuple(state.groups[name].ranks) == ranks
        }
        for sequence in sorted({position for journal in journals.values() for position in journal}):
            calls = {rank: journal[sequence] for rank, journal in journals.items() if sequence in journal}
            if len({call.signature for call in calls.values()}) > 1:
                return Mismatch(name, sequence, calls)
    return None


def table(states: Sequence[RankState], headline: str) -> str:
    """One row per rank under the headline, then who is missing, the cause and the way out."""
    found = diagnose(states)
    header = ("rank", "state", "group", "call", "collective", "module", "parameters", "step", "where")
    rows = [header, *(_row(state) for state in states)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    waited = ""
    if found.culprits and found.awaited is not None:
        about = f" ({', '.join(found.awaited.parameters)})" if found.awaited.parameters else ""
        plural = "s" if len(found.culprits) > 1 else ""
        waited = (
            f"missing: rank{plural} {_listed(found.culprits)}, in {found.awaited.kind} for module "
            f"{found.awaited.module}{about}\n"
        )
    return f"trilithon: {headline}\n\n" + "\n".join(lines) + f"\n\n{waited}cause: {found.cause}\n{found.way_out}\n"


def _missing(states: Sequence[RankState]) -> tuple[CallState | None, set[int]]:
    """The call that was waited for longest, and the ranks of its group that never issued it."""
    waiting = sorted((s for s in states if s.status is Status.WAITING), key=lambda s: -s.waited_s)
    for state in waiting:
        call, group = state.waiting_call(), state.groups.get(state.waits_in)
        if call is None or group is None:
            continue
        arrived = {
            other.rank
            for other in states
            if state.waits_in in other.groups
            and other.groups[state.waits_in].ranks == group.ranks
            and any(known.sequence >= call.sequence for known in other.groups[state.waits_in].calls)
        }
        missing = set(group.ranks) - arrived - {s.rank for s in states if s.status is Status.UNKNOWN}
        if missing:
            return call, missing
    return (waiting[0].waiting_call() if waiting else None), set()


def _explain(differs: Mismatch, states: Sequence[RankState]) -> Diagnosis:
    """Say which ranks left the common order, and how; both sides when neither is more usual than the other."""
    advice = (
        "All ranks must make the same calls in the same order: look for a branch that depends on the rank or on data "
        "(uneven() allows different numbers of forwards), and for calls such as saving made by one rank only."
    )
    at = f"at call {differs.sequence} of group {differs.group}"
    history = [
        call.signature
        for call in next(state.groups[differs.group].calls for state in states if state.rank == min(differs.calls))
        if call.sequence < differs.sequence
    ]
    usual = _usual({call.signature: 0 for call in differs.calls.values()}, differs, history)
    if usual is None:
        said = "; ".join(f"rank {rank} calls {call.signature}" for rank, call in sorted(differs.calls.items()))
        first = differs.calls[min(differs.calls)]
        return Diagnosis(tuple(sorted(differs.calls)), first, f"the order differs {at}: {said}.", advice)
    odd = {rank: call for rank, call in sorted(differs.calls.items()) if call.signature != usual}
    common = next(call for call in differs.calls.values() if call.signature == usual)
    said = "; ".join(
        f"rank {rank} {_how(call, common, history)}: it is in {call.signature} while the others wait for it in {usual}"
        for rank, call in odd.items()
    )
    return Diagnosis(tuple(odd), common, f"{at}, {said}.", advice)


def _usual(votes: dict[str, int], differs: Mismatch, history: Sequence[str]) -> str | None:
    """The signature that was due: that of most ranks, else what the calls so far suggest; None when nothing does."""
    for call in differs.calls.values():
        votes[call.signature] += 1
    ranked = sorted(votes, key=lambda signature: -votes[signature])
    if votes[ranked[0]] > votes[ranked[1]]:
        return ranked[0]
    if len(ranked) > 2:
        return None
    one, other = ranked
    if (one in history) != (other in history):
        return one if one in history else other
    one_was_next, other_was_next = _followed(one, other, history), _followed(other, one, history)
    if one_was_next == other_was_next:
        return None
    return one if one_was_next else other


def _followed(first: str, second: str, history: Sequence[str]) -> bool:
    return any(pair == (first, second) for pair in pairwise(history))


def _how(odd: CallState, common: CallState, history: Sequence[str]) -> str:
    """Whether a rank skipped what was due, made a call of its own, or just differs; told from the calls so far."""
    if (odd.kind, odd.module) == (common.kind, common.module):
        return "has another size or dtype"
    if odd.signature not in history and common.signature in history:
        return "made a call that no other rank made"
    if _followed(common.signature, odd.signature, history):
        return f"skipped {common.module}"
    return "is in a different collective"


def _never_arrived(late: Sequence[RankState], states: Sequence[RankState], awaited: CallState | None) -> Diagnosis:
    present = [s for s in states if s.status is Status.WAITING and s.rank not in _ranks(late)]
    elsewhere = [s for s in late if s.status is Status.WAITING]
    if elsewhere:
        said = "; ".join(
            f"rank {s.rank} waits in group {s.waits_in} for {call.signature}"
            for s in elsewhere
            if (call := s.waiting_call()) is not None
        )
        return Diagnosis(
            _ranks(late),
            awaited,
            f"the order between groups differs: {said}, and is waited for elsewhere.",
            "All ranks must make the same calls in the same order.",
        )
    where = "; ".join(f"rank {s.rank} is at {s.where or 'an unknown line'}" for s in late)
    if len(present) < len(late):
        return Diagnosis(
            _ranks(late),
            awaited,
            f"only {_named(present)} made this call; {_named(late)} never arrived: {where}.",
            "The call must be made by all ranks: take it out of `if rank == ...`.",
        )
    return Diagnosis(
        _ranks(late),
        awaited,
        f"{_named(late)} never arrived and is still busy outside any collective: {where}.",
        "If that line may take so long, raise comm.wait_limit_s; otherwise find out why only that rank runs it.",
    )


def _row(state: RankState) -> tuple[str, ...]:
    call, group = state.waiting_call(), state.waits_in
    if call is None:
        last = [(known[-1], name) for name, known in ((n, g.calls) for n, g in state.groups.items()) if known]
        call, group = max(last, key=lambda pair: (pair[0].step, pair[0].micro_step), default=(None, ""))
    status = f"{state.status} {state.waited_s:.1f} s" if state.status is Status.WAITING else f"{state.status}"
    where = state.where + (f" [{state.error}]" if state.error else "")
    if call is None:
        return (str(state.rank), status, "-", "-", "-", "-", "-", "-", where or "-")
    names = ", ".join(call.parameters[:3]) + (f", ... ({len(call.parameters)})" if len(call.parameters) > 3 else "")
    after = "" if state.status is Status.WAITING else "after "
    step = f"{call.step}.{call.micro_step}" if call.micro_step >= 0 else f"{call.step}"
    kind = f"{after}{call.kind}"
    return (str(state.rank), status, group, str(call.sequence), kind, call.module, names or "-", step, where or "-")


def _make_it_on_all(awaited: CallState | None) -> str:
    """The way out when a program ended before a call: training ran out of batches, or the call is made by some only."""
    call = awaited.module.partition(",")[0] if awaited is not None else ""
    if call.startswith("engine."):
        return f"Call {call} on every rank: take it out of `if rank == ...`."
    return "Give every rank the same number of batches, or wrap the loop in uneven()."


def _ranks(states: Sequence[RankState]) -> tuple[int, ...]:
    return tuple(state.rank for state in states)


def _named(states: Sequence[RankState]) -> str:
    return f"rank{'s' if len(states) > 1 else ''} {_listed(_ranks(states))}"


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(str(rank) for rank in ranks)
