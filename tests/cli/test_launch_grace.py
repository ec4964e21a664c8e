"""How long ranks have to save once the launcher is asked to stop."""

import os
import signal
import subprocess
import sys
import time

import pytest

SAVES = """
import pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
def save(*_):
    time.sleep(7)
    (folder / "saved").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
(folder / "ready").touch()
time.sleep(120)
"""


def launch(*arguments: object) -> subprocess.Popen[str]:
    taken = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    environment = {name: value for name, value in os.environ.items() if name not in taken}
    command = [sys.executable, "-m", "trilithon.cli.main", "launch", *map(str, arguments)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)


def test_a_longer_grace_lets_a_script_save_for_longer_than_the_usual_five_seconds(tmp_path):
    script = tmp_path / "saves.py"
    script.write_text(SAVES)
    process = launch("--device", "cpu", "--grace", 40, script, tmp_path)
    try:
        for _ in range(900):
            if (tmp_path / "ready").exists():
                break
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
    finally:
        process.kill()
    assert (tmp_path / "saved").exists()


@pytest.mark.parametrize("seconds", ["0", "-1", "1e9"])
def test_a_grace_that_is_none_is_refused(tmp_path, seconds):
    (tmp_path / "x.py").write_text("")
    process = launch("--grace", seconds, tmp_path / "x.py")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2 and "--grace" in err and "seconds that ranks have" in err
