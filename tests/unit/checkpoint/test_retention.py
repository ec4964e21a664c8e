"""Which checkpoints stay."""

from __future__ import annotations

import random

import pytest
from tables import model_contents

from trilithon.checkpoint import Alone, Retention, save, tags
from trilithon.checkpoint.retention import to_remove


@pytest.mark.parametrize("seed", range(20))
def test_the_newest_and_the_spared_stay_whatever_is_asked(seed):
    rng = random.Random(seed)
    steps = [(f"t{i}", rng.randrange(100)) for i in range(rng.randrange(1, 12))]
    rule = Retention(rng.choice([None, 1, 2, 50]), rng.choice([None, 1, 7, 10]), frozenset({rng.choice(steps)[0]}))
    newest = steps[-1][0]
    gone = to_remove(steps, rule, newest)
    assert newest not in gone
    assert not rule.spared & set(gone)
    left = [tag for tag, _ in steps if tag not in gone]
    if rule.keep is None:
        assert gone == []
    else:
        assert set(left) >= {tag for tag, _ in steps[-rule.keep :]}
        for tag, step in steps[: -rule.keep]:
            kept = tag in rule.spared or (rule.keep_every is not None and step % rule.keep_every == 0)
            assert (tag in left) == kept


def test_old_checkpoints_go_when_the_new_one_is_there(tmp_path):
    for step in range(1, 9):
        rule = Retention(keep=2, keep_every=3, spared=frozenset({"step-1"}))
        save(tmp_path, f"step-{step}", model_contents(step), Alone(), retention=rule)
    assert sorted(tags(tmp_path)) == ["step-1", "step-3", "step-6", "step-7", "step-8"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*tags(tmp_path), "latest"])


def test_folders_that_are_no_checkpoints_are_left_alone(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    for step in (1, 2):
        save(tmp_path, f"step-{step}", model_contents(step), Alone(), retention=Retention(keep=1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "notes", "step-2"]
