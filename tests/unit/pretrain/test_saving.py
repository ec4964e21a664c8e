from pathlib import Path

import pytest

from trilithon.errors import CheckpointError
from trilithon.pretrain.saving import Saver


class Engine:
    """Remembers what it was asked to save; fails as often as told."""

    def __init__(self, failures: int = 0) -> None:
        self.saved: list[tuple[str, bool]] = []
        self.failures = failures
        self.failing_later = False

    def save(self, folder, tag=None, client_state=None, blocking=True) -> Path:
        if self.failures:
            self.failures -= 1
            raise CheckpointError("the disk is full.")
        assert client_state == {"step": int(tag.removeprefix("step-"))}
        self.saved.append((tag, blocking))
        return Path(folder, tag)

    def finish_saving(self) -> None:
        if self.failing_later:
            self.failing_later = False
            raise CheckpointError("the disk went away.")


def saver(engine: Engine, said: list[str] | None = None, **changes) -> Saver:
    settings = {"every": 4, "on_signal": True, "steps": 10} | changes
    say = said.append if said is not None else lambda text: None
    return Saver(engine=engine, folder=Path("x"), client_state=lambda step: {"step": step}, say=say, **settings)


def go(it: Saver, *, asked: tuple[int, ...] = (), stopped_at: int | None = None) -> None:
    for step in range(1, it.steps + 1):
        it.after_step(step, asked=step in asked, last=step == stopped_at)
        if step == stopped_at:
            return


def test_by_interval_in_the_background_and_at_the_end_until_it_is_there():
    go(saver(engine := Engine()))
    assert engine.saved == [("step-00000004", False), ("step-00000008", False), ("step-00000010", True)]


def test_without_an_interval_only_when_asked():
    go(saver(engine := Engine(), every=0))
    assert engine.saved == []
    go(saver(engine, every=0), asked=(3,))
    assert engine.saved == [("step-00000003", False)]


@pytest.mark.parametrize(("on_signal", "expected"), [(True, [("step-00000003", True)]), (False, [])])
def test_a_run_that_is_stopped_saves_if_it_is_to(on_signal, expected):
    go(saver(engine := Engine(), on_signal=on_signal), stopped_at=3)
    assert engine.saved == expected


def test_one_step_is_saved_once():
    go(saver(engine := Engine(), every=5), asked=(5, 10))
    assert [tag for tag, _ in engine.saved] == ["step-00000005", "step-00000010"]


def test_a_save_that_fails_by_interval_is_told_and_tried_again_later():
    said: list[str] = []
    go(saver(engine := Engine(failures=1), said))
    assert said[0] == "No checkpoint of step 4: the disk is full. The run goes on."
    assert [tag for tag, _ in engine.saved] == ["step-00000008", "step-00000010"]


def test_a_failure_in_the_background_is_told_of_its_own_step():
    said: list[str] = []
    it = saver(engine := Engine(), said)
    for step in range(1, 11):
        engine.failing_later |= step == 5  # what was begun after step 4
        it.after_step(step, asked=False, last=False)
    assert said[0] == "No checkpoint of step 4: the disk went away. The run goes on."
    assert [tag for tag, _ in engine.saved] == ["step-00000004", "step-00000008", "step-00000010"]


def test_a_failure_that_the_engine_told_lets_the_step_be_saved_again():
    said: list[str] = []
    it = saver(engine := Engine(), said)
    it.after_step(4, asked=False, last=False)
    it.failed(CheckpointError("the disk went away."))
    it.after_step(4, asked=True, last=False)
    assert said == ["No checkpoint of step 4: the disk went away. The run goes on."]
    assert [tag for tag, _ in engine.saved] == ["step-00000004", "step-00000004"]


def test_a_save_that_fails_when_the_run_stops_is_an_error():
    with pytest.raises(CheckpointError, match="disk is full"):
        go(saver(Engine(failures=1)), stopped_at=3)
