"""All ranks are killed at a random moment after `save` returned: "latest" names a checkpoint that loads, keep = 1."""

import os
import random
import signal
import threading
import time

import pytest

import trilithon
from saved_runs import OddNet, batches, settings, train
from trilithon.checkpoint import open_checkpoint
from trilithon.testing import run_ranks_raw


def save_until_killed(folder, delay_s):
    engine = trilithon.initialize(OddNet(), settings(2, checkpoints={"keep": 1}))
    if (folder / "latest").exists():
        engine.load(folder)
    first = engine.steps
    for number, batch in enumerate(batches(200)):
        train(engine, [batch])
        engine.save(folder, f"step-{first + number + 1}", client_state={"step": engine.steps}, blocking=False)
        if number == 1:
            threading.Thread(target=kill_after, args=(delay_s,)).start()


def kill_after(delay_s):
    time.sleep(delay_s)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("round_", range(5))
def test_latest_is_always_whole(round_, tmp_path):
    """Four kills each, one after the other in one folder: 20 in all."""
    rng, before = random.Random(round_), 0
    for _ in range(4):
        results = run_ranks_raw(save_until_killed, 2, tmp_path, rng.uniform(0.0, 0.15), timeout_s=60)
        assert -signal.SIGKILL in [result.exit_code for result in results], results[0].output
        with open_checkpoint(tmp_path) as reader:
            for entry in reader.entries():
                reader.read(entry.part, entry.name)
            step = reader.extra["client_state"]["step"]
        assert (tmp_path / "latest").read_text().strip() == f"step-{step}"
        assert step > before
        before = step
