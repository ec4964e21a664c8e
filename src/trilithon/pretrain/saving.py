"""When a run's checkpoints are written, and what is told about them.

By interval they are written in the background while training goes on; what stops the run waits until its last one is on
the disk. A checkpoint that could not be written leaves the ones before it, and a run that goes on says so and tries
again at the next interval; one that stops ends with the error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trilithon.errors import CheckpointError


class Saving(Protocol):
    """The part of the engine that writes checkpoints; every call is collective and fails on all ranks alike."""

    def save(
        self, folder: Path | str, tag: str | None = None, client_state: Mapping[str, Any] | None = None,
        blocking: bool = True,
    ) -> Path: ...  # fmt: skip

    def finish_saving(self) -> None: ...


@dataclass(slots=True)
class Saver:
    """Saves an engine after some of the steps of a run; the same decisions on every rank."""

    engine: Saving
    folder: Path
    every: int  # steps between two checkpoints; 0: only when asked
    on_signal: bool  # whether a run that is stopped saves first
    steps: int  # of the whole run: the last one is saved, too, if any is by interval
    client_state: Callable[[int], Mapping[str, Any]]  # by step
    say: Callable[[str], None]
    saved: int = 0  # step of the newest checkpoint of this process, as far as is known
    _under_way: int = 0  # step that is being written in the background, 0 if none

    def after_step(self, step: int, *, asked: bool, last: bool) -> None:
        """asked: a signal asks for a checkpoint; last: the run stops here, before its end."""
        due = asked or (self.every > 0 and step % self.every == 0)
        if self._under_way and (last or due or step == self.steps):
            self.finish()  # before another one is begun, so that each failure is told of its own step
        if last:
            if self.on_signal:
                self._write(step, blocking=True)
        elif step == self.steps:
            if self.every or asked:
                self._write(step, blocking=True)
        elif due:
            try:
                self._write(step, blocking=False)
            except CheckpointError as error:
                self._tell(step, error)

    def finish(self) -> None:
        """Wait for what is written in the background. The run is over: a failure is told, and is no error of it."""
        try:
            self.engine.finish_saving()
        except CheckpointError as error:
            self.failed(error)
        self._under_way = 0

    def failed(self, error: CheckpointError) -> None:
        """The save in the background has failed, as the engine tells at its next step."""
        self._tell(self._under_way, error)
        self.saved, self._under_way = 0, 0

    def _write(self, step: int, *, blocking: bool) -> None:
        if step == self.saved:
            return
        path = self.engine.save(self.folder, tag=tag_of(step), client_state=self.client_state(step), blocking=blocking)
        self.saved, self._under_way = step, 0 if blocking else step
        if blocking:
            self.say(f"Saved step {step} in {path}")

    def _tell(self, step: int, error: CheckpointError) -> None:
        self.say(f"No checkpoint of step {step}: {error} The run goes on.")


def tag_of(step: int) -> str:
    """Names of checkpoints sort by step."""
    return f"step-{step:08d}"
