"""What of a checkpoint fits this run: decided for all parts before anything is changed, and alike on every rank.

The plan compares names and shapes only. What is missing, superfluous or of another shape becomes a line of `problems`
(an error under `strict`) and of the report.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trilithon.checkpoint.manifest import Entry
from trilithon.checkpoint.reader import CheckpointReader
from trilithon.checkpoint.report import LoadReport
from trilithon.engine.coordinates import same_mesh, whole_shapes
from trilithon.engine.train_state import persistent_buffers, stateful_of
from trilithon.errors import CheckpointError

if TYPE_CHECKING:
    from trilithon.engine.engine import Engine

PARTS = ("weights", "optimizer", "schedule", "scaler", "counters", "window", "stateful", "random")
"""What `engine.load(parts=...)` can be asked for."""

_NOT_OPTIMIZER = ("param", "master", "frozen", "buffer", "rank_state", "window")


@dataclass
class LoadPlan:
    """parts: what will be restored. sources: stored entry of each weight or buffer that has one. fields: of the
    optimizer, (field, parameter) that have an entry."""

    parts: set[str]
    report: LoadReport
    problems: list[str] = field(default_factory=list)
    sources: dict[str, Entry] = field(default_factory=dict)
    buffers: dict[str, Entry] = field(default_factory=dict)
    fields: dict[tuple[str, str], Entry] = field(default_factory=dict)

    def restored(self, part: str, names: Iterable[str]) -> None:
        self._note(self.report.restored, part, names)

    def initialised(self, part: str, names: Iterable[str]) -> None:
        self._note(self.report.initialised, part, names)

    def ignored(self, part: str, names: Iterable[str]) -> None:
        self._note(self.report.ignored, part, names)

    @staticmethod
    def _note(where: dict[str, list[str]], part: str, names: Iterable[str]) -> None:
        added = list(names)
        if added:
            where.setdefault(part, []).extend(added)


def asked_parts(engine: Engine, parts: Sequence[str] | None) -> set[str]:
    """Raises CheckpointError for a name that is none of `PARTS`."""
    if parts is None:
        return set(PARTS) if engine._update is not None else {"weights"}
    asked = [parts] if isinstance(parts, str) else list(parts) if isinstance(parts, Iterable) else [parts]
    if not asked or any(name not in PARTS for name in asked):
        raise CheckpointError(f"parts={asked}: there are {', '.join(PARTS)}; leave it out for all of them.")
    return set(asked)


def plan_load(
    engine: Engine,
    reader: CheckpointReader,
    asked: set[str],
    fields: Iterable[tuple[int, str]],
    known: Set[tuple[str, str]],
) -> LoadPlan:
    """fields: (group, field) that the update rule keeps, on any rank. known: ("weights" or "buffers", name) that some
    rank has; this one has those of its stage of a pipeline."""
    made = reader.manifest
    saved_by = f"{made.world_size} rank{'s' * (made.world_size > 1)}, zero.stage={made.zero_stage}, {made.precision}"
    plan = LoadPlan(set(asked), LoadReport(reader.folder, made.tag, made.step, saved_by))
    _plan_weights(engine, reader, plan, known)
    _plan_optimizer(engine, reader, plan, fields, _of(known, "weights"))
    _plan_schedule(engine, reader, plan)
    _plan_scaler(engine, reader, plan)
    _plan_window(engine, reader, plan)
    _plan_stateful(engine, reader, plan)
    if "random" in plan.parts and "random" not in reader.extra["ranks"][0]:
        plan.parts.discard("random")
        plan.report.notes.append("the checkpoint holds no random states; the generators go on as they are")
    for part in ("counters", "random"):
        if part in plan.parts:
            plan.restored(part, [part])
        else:
            plan.initialised(part, [part])
    return plan


def refuse(plan: LoadPlan) -> None:
    """Raise CheckpointError with every problem, and the flags that accept them."""
    if plan.problems:
        shown = plan.problems[:8] + ([f"and {len(plan.problems) - 8} more"] if len(plan.problems) > 8 else [])
        raise CheckpointError(
            f"{plan.report.path} does not fit this run, and nothing was changed: {'; '.join(shown)}. "
            "engine.load(strict=False) restores what fits and reports the rest; parts=(...) says what is wanted at all."
        )


def _plan_weights(engine: Engine, reader: CheckpointReader, plan: LoadPlan, known: Set[tuple[str, str]]) -> None:
    shapes = whole_shapes(engine)
    buffers = {name: tuple(tensor.shape) for name, tensor in persistent_buffers(engine.module)}
    stored = {e.name: e for part in ("frozen", "master") for e in reader.entries(part)}
    if "weights" not in plan.parts:
        plan.initialised("weights", shapes)
        plan.initialised("buffers", buffers)
        plan.ignored("weights", stored)
        plan.ignored("buffers", [entry.name for entry in reader.entries("buffer")])
        return
    trained = {name for group in engine._groups for name in group.names}
    for name, shape in shapes.items():
        found = reader.find("master", name) or reader.find("frozen", name)
        if found is None and reader.extra.get("without_frozen") and name not in trained:
            plan.initialised("weights", [name])
            continue
        _match(plan, "weights", name, shape, found=found, into=plan.sources)
    for name, shape in buffers.items():
        _match(plan, "buffers", name, shape, found=reader.find("buffer", name), into=plan.buffers)
    _left_over(plan, "weights", stored, plan.sources, _of(known, "weights"))
    _left_over(plan, "buffers", {e.name: e for e in reader.entries("buffer")}, plan.buffers, _of(known, "buffers"))


def _of(known: Set[tuple[str, str]], part: str) -> set[str]:
    return {name for found, name in known if found == part}


def _match(
    plan: LoadPlan, part: str, name: str, shape: tuple[int, ...], *, found: Entry | None, into: dict[str, Entry]
) -> None:
    if found is None:
        plan.problems.append(f"{part}: '{name}' {list(shape)} is not in the checkpoint")
        plan.initialised(part, [name])
    elif found.shape != shape:
        plan.problems.append(f"{part}: '{name}' is {list(shape)} here and {list(found.shape)} in the checkpoint")
        plan.initialised(part, [name])
        plan.ignored(part, [name])
    else:
        into[name] = found
        plan.restored(part, [name])


def _left_over(
    plan: LoadPlan, part: str, stored: Mapping[str, Entry], taken: Mapping[str, Entry], known: Set[str]
) -> None:
    used = {entry.name for entry in taken.values()}
    for name, entry in stored.items():
        if name not in used and name not in known:
            plan.problems.append(f"{part}: '{name}' {list(entry.shape)} is in the checkpoint and not in the model")
            plan.ignored(part, [name])


def saved_update(reader: CheckpointReader) -> Mapping[str, Any] | None:
    """The update rule's own counters: those of the first rank that took part in updates."""
    return next((rank["update"] for rank in reader.extra["ranks"] if rank.get("update")), None)


def _plan_optimizer(
    engine: Engine, reader: CheckpointReader, plan: LoadPlan, fields: Iterable[tuple[int, str]], known: Set[str]
) -> None:
    stored = [e for e in reader.manifest.entries if e.part.split("/")[0] not in _NOT_OPTIMIZER]
    names = [name for group in engine._groups for name in group.names]

    def leave(problem: str | None) -> None:
        plan.parts.discard("optimizer")
        plan.problems += [problem] if problem else []
        plan.initialised("optimizer", names)
        for entry in stored:
            plan.ignored(entry.part, [entry.name])

    update, saved = engine._update, saved_update(reader)
    if "optimizer" not in plan.parts or update is None:
        return leave(None)
    if saved is None:
        return leave(
            "optimizer: the checkpoint holds no optimizer state (a weights-only load, parts=('weights',), accepts that)"
        )
    mine, theirs = update.state_dict()["rule"], saved.get("rule")
    if theirs in getattr(update, "resembles", ()):  # the same state, another formula
        plan.problems.append(
            f"optimizer: the checkpoint was written by rule {theirs!r} and this run has {mine!r}, which keeps the same "
            "state and decays weights differently (strict=False accepts that)"
        )
    elif theirs not in (mine, *getattr(update, "continues", ())):
        return leave(
            f"optimizer: the checkpoint was written by rule {theirs!r} and this run has {mine!r} (leave "
            "'optimizer' out of parts to start its state anew)"
        )
    shapes = whole_shapes(engine)
    here = {(e.part, e.name): e for e in stored}
    foreign = "whole" in saved  # it decides by itself what it keeps, in any shape
    if foreign:
        wanted = {(e.part, name) for e in stored for name in names if reader.find(e.part, name) is e}
    else:
        sometimes = getattr(update, "sometimes", ())  # fields of one phase only: they are there if they were saved
        wanted = {(f, name) for group, f in fields for name in engine._groups[group].names if f not in sometimes}
        wanted |= {(e.part, e.name) for e in stored if e.part in sometimes and e.name in set(names)}
    for part, name in sorted(wanted):
        if 0 in shapes[name]:
            continue
        found = reader.find(part, name)
        if found is None:
            plan.problems.append(f"optimizer: {part} of '{name}' is not in the checkpoint")
            plan.initialised(part, [name])
        elif found.shape != shapes[name] and "weights" not in plan.parts and not foreign:
            plan.problems.append(
                f"optimizer: {part} of '{name}' is {list(shapes[name])} here and {list(found.shape)} saved"
            )
            plan.initialised(part, [name])
        elif plan.sources.get(name) is None and "weights" in plan.parts:  # told already
            plan.initialised(part, [name])
        else:
            plan.fields[part, name] = found
            plan.restored(part, [name])
            here.pop((found.part, found.name), None)
    for part, name in here:
        if name in shapes or name not in known:  # another stage takes what is its own
            plan.ignored(part, [name])
    plan.problems += [f"optimizer: {text}" for text in settings_by_group(engine, reader)[1]]


def settings_by_group(engine: Engine, reader: CheckpointReader) -> tuple[list[dict[str, Any] | None], list[str]]:
    """For each group of this run the saved settings of its parameters, None where they do not agree; and complaints."""
    saved = {name: group["settings"] for group in reader.extra["groups"] for name in group["names"]}
    found: list[dict[str, Any] | None] = []
    problems = []
    for index, group in enumerate(engine._groups):
        theirs = [saved[name] for name in group.names if name in saved]
        if theirs and all(other == theirs[0] for other in theirs[1:]):
            found.append(theirs[0])
            continue
        found.append(None)
        if theirs:
            problems.append(f"the parameters of group {index} were in groups with different settings")
    return found, problems


def _plan_schedule(engine: Engine, reader: CheckpointReader, plan: LoadPlan) -> None:
    saved = reader.extra["schedule"]
    if "schedule" not in plan.parts or engine._update is None:
        plan.parts.discard("schedule")
        plan.initialised("schedule", ["schedule"])
        plan.ignored("schedule", ["schedule"] if saved is not None else [])
        return
    mine = engine._rate.scheduler
    problem = None
    if saved is None:
        problem = "the checkpoint holds no learning-rate schedule"
    elif (saved["scheduler"] is None) != (mine is None):
        kinds = ("a torch scheduler", "no torch scheduler")
        was, now = kinds if saved["scheduler"] is not None else kinds[::-1]
        problem = f"the checkpoint was written with {was} and this run has {now}"
    elif saved_rates(engine, reader) is None:
        problem = "the groups of this run do not follow from the saved ones, so neither do their rates"
    if problem is None:
        plan.restored("schedule", ["schedule"])
    else:
        plan.parts.discard("schedule")
        plan.problems.append(f"schedule: {problem} (leave 'schedule' out of parts to begin it anew)")
        plan.initialised("schedule", ["schedule"])


def saved_rates(engine: Engine, reader: CheckpointReader) -> list[float] | None:
    """The saved rate of each group of this run, by the names of its parameters; None when they do not agree."""
    rates = dict(zip(range(len(reader.extra["groups"])), reader.extra["schedule"]["lr"]))
    of_name = {name: rates[i] for i, group in enumerate(reader.extra["groups"]) for name in group["names"]}
    found = []
    for index, group in enumerate(engine._groups):
        theirs = {of_name[name] for name in group.names if name in of_name}
        if not group.names and len(rates) == len(engine._groups):
            theirs = {rates[index]}
        if len(theirs) != 1:
            return None
        found.append(theirs.pop())
    return found


def _plan_scaler(engine: Engine, reader: CheckpointReader, plan: LoadPlan) -> None:
    saved, mine = reader.extra["scaler"]["kind"], engine._precision.state_dict()["kind"]
    if "scaler" in plan.parts and saved == mine:
        plan.restored("scaler", ["scaler"])
        return
    if "scaler" in plan.parts:
        plan.report.notes.append(
            f"the loss scale begins anew: it was of kind '{saved}' and is '{mine}' in this precision"
        )
    plan.parts.discard("scaler")
    plan.initialised("scaler", ["scaler"])
    plan.ignored("scaler", ["scaler"])


def _plan_window(engine: Engine, reader: CheckpointReader, plan: LoadPlan) -> None:
    ranks = reader.extra["ranks"]
    if not ranks[0].get("window"):
        plan.parts.discard("window")
        return
    count, accumulation = ranks[0]["window"]["backwards"], reader.extra["accumulation"]
    if "window" not in plan.parts:
        plan.ignored("window", [f"{count} micro-batches"])
        return
    here = (engine.world_size, engine.accumulation)
    experts = engine._experts.describe() == reader.extra.get("experts", {})
    alike = same_mesh(engine, reader.extra) and engine.accumulation == accumulation and experts
    if alike and "scaler" in plan.parts and "weights" in plan.parts:
        plan.restored("window", [f"{count} micro-batches"])
        return
    plan.parts.discard("window")
    plan.ignored("window", [f"{count} micro-batches"])
    plan.problems.append(
        f"window: it was saved after {count} of {accumulation} micro-batches on {len(ranks)} ranks, whose gradients "
        f"fit the same number of both, on the same mesh and in the same precision only; here are {here[0]} ranks and "
        f"{here[1]} micro-batches "
        "(leave 'window' out of parts to drop these gradients, or save after engine.step())"
    )


def _plan_stateful(engine: Engine, reader: CheckpointReader, plan: LoadPlan) -> None:
    mine, theirs = stateful_of(engine), set().union(*(rank["stateful"] for rank in reader.extra["ranks"]))
    if "stateful" not in plan.parts:
        plan.initialised("stateful", mine)
        plan.ignored("stateful", sorted(theirs))
        return
    for name in mine:
        if name in theirs:
            plan.restored("stateful", [name])
        else:
            plan.problems.append(f"stateful: '{name}' is registered here and was not when the checkpoint was saved")
            plan.initialised("stateful", [name])
    for name in sorted(theirs - set(mine)):
        plan.problems.append(f"stateful: '{name}' was saved, and no object or hook of that name is registered here")
        plan.ignored("stateful", [name])
