"""`engine.save` and `engine.load`: who talks to whom, and in what order.

Agreement on what is saved uses the engine's own control group, where the watchdog sees a rank that does not call.
Writing takes as long as a disk takes, so from then on the ranks talk over a group of their own, which nothing else
uses: a save in the background never meets the collectives of training.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from trilithon.checkpoint.agreement import Coordinator, together
from trilithon.checkpoint.asked import agreed, folder_asked, tag_asked
from trilithon.checkpoint.background import Background
from trilithon.checkpoint.manifest import POINTER
from trilithon.checkpoint.opening import open_checkpoint
from trilithon.checkpoint.reader import CheckpointReader
from trilithon.checkpoint.report import LoadReport, SaveProgress, SaveReport
from trilithon.checkpoint.retention import Retention
from trilithon.checkpoint.save import prepare
from trilithon.comm.collectives import Group
from trilithon.contracts import Collectives, Tag
from trilithon.engine.load_plan import PARTS, asked_parts, plan_load, refuse
from trilithon.engine.restore import Restore
from trilithon.engine.train_state import SAVE, contents_of, names_here, slice_holdings
from trilithon.errors import CheckpointError, ProtocolError

if TYPE_CHECKING:
    from trilithon.engine.engine import Engine

logger = logging.getLogger(__name__)

T = TypeVar("T")
LOAD = "engine.load, which every rank has to call"  # what the watchdog says when one does not


class OverTraining:
    """A coordinator over the group in which training agrees: the watchdog names a rank that does not call."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def rank(self) -> int:
        return self._engine.rank

    @property
    def world_size(self) -> int:
        return self._engine.world_size

    def exchange(self, value: Any, what: str) -> list[Any]:
        return self._engine._sharding.exchange(value, what)


class OverGroup:
    """A coordinator over one group of ranks."""

    def __init__(self, group: Collectives) -> None:
        self._group = group

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def world_size(self) -> int:
        return self._group.world_size

    def exchange(self, value: Any, what: str) -> list[Any]:
        return self._group.all_gather_object(value, Tag(what))


class Checkpointing:
    """The saves and loads of one engine."""

    def __init__(self, engine: Engine, make_writers: Callable[[], Group]) -> None:
        self._engine, self._control, self._make_writers = engine, OverTraining(engine), make_writers
        self._background = Background()
        self._writers: Group | None = None
        self._loaded: dict[Path, str] = {}  # folder -> tag that was loaded from it: never removed by this run
        self._mixed = ""  # why the engine holds half of a checkpoint

    @property
    def progress(self) -> SaveProgress | None:
        return self._background.progress

    @property
    def last(self) -> SaveReport | None:
        return self._background.last

    def save(  # noqa: PLR0917 (of engine.save)
        self, folder: Path | str, tag: str | None, client_state: Mapping[str, Any] | None, blocking: bool,
        latest: bool, frozen: bool,
    ) -> Path:  # fmt: skip
        engine, begun, settings = self._engine, time.monotonic(), self._engine.config.checkpoints
        self._background.collect()

        def asked() -> dict[str, Any]:
            if client_state is not None and not isinstance(client_state, Mapping):
                kind = type(client_state).__name__
                raise CheckpointError(f"client_state is a {kind}; pass a dictionary of plain data.")
            told = {"folder": folder_asked(folder), "tag": tag_asked(tag), "blocking": bool(blocking)}
            return {**told, "latest": bool(latest), "frozen": bool(frozen)}

        agreed(self._control, "engine.save", asked, what=SAVE)
        root = folder_asked(folder)
        name = tag if tag is not None else f"step-{engine.steps:08d}"
        contents = contents_of(engine, client_state, frozen=frozen)
        prepared = prepare(root, name, contents, self._control, file_bytes=settings.file_bytes)
        spared = frozenset(self._loaded[path] for path in self._loaded if path == root)
        retention = Retention(settings.keep, settings.keep_every, spared, latest)
        notes = _notes(engine)
        if engine.rank == 0 and self.last is None:
            for note in notes:
                logger.info("%s", note)
        work = self._background.run if blocking else self._background.start
        return work(prepared, self._talkers(), retention, begun, notes)

    def finish(self) -> None:
        """Wait for a save in the background, and raise what it failed with."""
        self._background.collect()

    def _talkers(self) -> Coordinator:
        """The group for what happens while files are written; made at the first save, by all ranks together."""
        if self._writers is None:
            self._writers = self._make_writers()
        return OverGroup(self._writers)

    def load(self, folder: Path | str, tag: str | None, strict: bool, parts: Sequence[str] | None) -> LoadReport:
        engine = self._engine
        self._background.collect()

        def wanted() -> dict[str, Any]:
            named = asked_parts(engine, parts)
            these = [name for name in PARTS if name in named]
            return {
                "folder": folder_asked(folder), "tag": tag_asked(tag) or POINTER, "parts": these, "strict": bool(strict)
            }  # fmt: skip

        agreed(self._control, "engine.load", wanted, what=LOAD)
        asked, root = asked_parts(engine, parts), folder_asked(folder)
        fields = {
            (part.group, span.part)
            for part, holding in zip(engine._sharding.slices(), slice_holdings(engine))
            for span in holding.spans
            if span.part != "master"
        }
        told = together(self._control, LOAD, lambda: (self._chosen(root, tag), fields, names_here(engine)))
        chosen, everybodys = told[0][0], {field for _, theirs, _ in told for field in theirs}
        known = {name for _, _, theirs in told for name in theirs}

        assert chosen is not None

        def planned() -> tuple[CheckpointReader, Restore, LoadReport]:
            reader = open_checkpoint(*chosen)
            plan = plan_load(engine, reader, asked, sorted(everybodys), known)
            if strict:
                refuse(plan)
            else:
                plan.report.notes += plan.problems
            return reader, Restore(engine, reader, plan), plan.report

        reader, restore, report = self._locally("what fits this run", planned)
        with reader:
            self._mixed = f"loading {report.path} failed halfway, so the engine holds a mixture"
            self._locally("reading the checkpoint", restore.settings)
            self._locally("reading the checkpoint", restore.tensors)
            restore.publish()
            self._locally("state of registered objects", restore.finish)
            self._mixed = ""
            report.bytes_read = reader.bytes_read
        self._loaded[root] = report.tag
        if engine.rank == 0:
            logger.info("%s", report)
        return report

    def _chosen(self, root: Path, tag: str | None) -> tuple[Path, str] | None:
        """Rank 0 decides which checkpoint "latest" is."""
        if self._engine.rank != 0:
            return None
        with open_checkpoint(root, tag) as reader:
            return reader.folder, "latest"

    def _locally(self, what: str, work: Callable[[], T]) -> T:
        """Do it here, hear whether it worked everywhere, and keep the result."""
        kept: list[T] = []
        together(self._control, what, lambda: kept.append(work()))
        return kept[0]

    @property
    def ended(self) -> float:
        """1 when a save in the background has ended here and nobody has asked yet how."""
        return float(self._background.ended)

    def hear(self, ended_on: float) -> None:
        """Once it has ended on all ranks: raise, on all alike, what it failed with."""
        if ended_on == self._engine.world_size:
            self._background.collect()

    def require_whole(self) -> None:
        if self._mixed:
            raise ProtocolError(f"{self._mixed}. Load a checkpoint that is whole before going on.")

    def close(self) -> None:
        """Write out what was begun; raises what it failed with."""
        try:
            self._background.close()
        finally:
            writers, self._writers = self._writers, None
            if writers is not None:
                writers.destroy()


def _notes(engine: Engine) -> tuple[str, ...]:
    """What a reader of the checkpoint might look for in vain."""
    found = []
    if engine._update is None:
        found.append("the engine has no optimizer, so the checkpoint holds weights and buffers")
    elif not engine._rate.given:
        found.append(
            "the engine was given no learning-rate schedule, so the checkpoint holds present rates and no schedule; "
            "a scheduler of yours is saved when it is passed to initialize() or put into engine.stateful"
        )
    return tuple(found)
