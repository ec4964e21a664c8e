"""The warm interpreter answers as the plain one does: arguments, streams, environment, status, signals, children."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from warm_python import python

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="passes descriptors from /proc")
TELL = """
import json, os, sys
found = {"argv": sys.argv, "path": sys.path[0], "asked": os.environ.get("ASKED"), "cwd": os.getcwd(),
         "warm": "torch" in sys.modules, "main": __name__, "spec": getattr(__spec__, "name", None)}
print(json.dumps(found))
print("on stderr", file=sys.stderr)
if sys.stdin.read() == "fail":
    sys.exit("said at the end")
"""


def both(command, **settings):
    """The outcome with the warm interpreter and with the plain one."""
    return [
        subprocess.run([program, *command], capture_output=True, text=True, timeout=60, check=False, **settings)
        for program in (python(), sys.executable)
    ]


@pytest.mark.parametrize("kind", ["-c", "-m", "script"])
@pytest.mark.parametrize("told", ["", "fail"])
def test_a_program_finds_what_it_would_find_otherwise(kind, told, tmp_path):
    (tmp_path / "tell.py").write_text(TELL if kind != "-c" else "")
    how = {"-c": ["-c", TELL.replace("__spec__", "None")], "-m": ["-u", "-m", "tell"], "script": ["tell.py"]}[kind]
    environment = {**os.environ, "ASKED": "two words"}
    warm, plain = both([*how, "a b", "--x='"], cwd=tmp_path, input=told, env=environment)
    assert (warm.returncode, warm.stderr) == (plain.returncode, plain.stderr)
    assert warm.returncode == (1 if told else 0)
    found, expected = json.loads(warm.stdout), json.loads(plain.stdout)
    assert found.pop("warm") and not expected.pop("warm")
    assert found == expected and found["asked"] == "two words"


@pytest.mark.parametrize(
    "code",
    [
        "1 / 0",
        "import sys; sys.exit(7)",
        "import os; os._exit(9)",
        "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
        "raise KeyboardInterrupt",
        "import atexit; atexit.register(print, 'at the end'); print('before')",
        "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('from a thread'))).start()",
    ],
)
def test_it_ends_as_it_would_end_otherwise(code, tmp_path):
    warm, plain = both(["-c", code], cwd=tmp_path)
    assert (warm.returncode, warm.stdout) == (plain.returncode, plain.stdout)
    assert warm.stderr.splitlines()[-1:] == plain.stderr.splitlines()[-1:]


def test_descriptors_keep_their_numbers_and_end_with_the_program():
    read_end, write_end = os.pipe()
    command = [python(), "-c", f"import os; os.write({write_end}, b'through the pipe')"]
    subprocess.run(command, pass_fds=[write_end], check=True, timeout=60)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        assert pipe.read() == b"through the pipe"


def test_what_it_starts_is_warm_as_well():
    code = "import subprocess, sys; print(subprocess.check_output([sys.executable, '-c', INNER], text=True))"
    inner = "import sys; print('torch' in sys.modules)"
    command = [python(), "-c", code.replace("INNER", repr(inner))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["True"], done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGKILL])
def test_signals_reach_the_program(number, tmp_path):
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    process = subprocess.Popen([python(), "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    pid = int(process.stdout.readline())
    process.send_signal(number)
    assert process.wait(20) == -number
    for _ in range(400):
        if not os.path.exists(f"/proc/{pid}"):
            break
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{pid}"), "the program outlived the one that started it"
    process.stdout.close()
