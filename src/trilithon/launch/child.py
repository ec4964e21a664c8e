"""What the launcher runs in each rank's interpreter: the user's script, with its first failure written down.

    python child.py RECORD PARENT_PID script|module TARGET [ARGUMENTS...]

Standard library only, and run by path, so that it works whatever the script's environment holds. `sys.argv`,
`sys.path[0]` and `__main__` are what they are without a launcher. A failure is written to RECORD with its time, before
anything else of the process ends, which is how the launcher knows which rank failed first.
"""

from __future__ import annotations

import io
import json
import os
import runpy
import signal
import sys
import time
import traceback
import types
from collections.abc import Callable
from importlib.machinery import SourceFileLoader

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    record, parent, kind, target = sys.argv[1:5]
    sys.argv[:] = sys.argv[4:]
    _end_with_parent(int(parent))
    run = _run_module if kind == "module" else _run_script
    if not sys.flags.safe_path:  # where the interpreter had put this file's folder
        sys.path[0] = os.getcwd() if kind == "module" else os.path.dirname(os.path.realpath(target))
    _guard(run, target, record)


def _guard(run: Callable[[str], None], target: str, record: str) -> None:
    try:
        run(target)
    except SystemExit as stop:
        if stop.code not in (None, 0):
            status = stop.code & 0xFF if isinstance(stop.code, int) else 1
            _write(record, status, "" if isinstance(stop.code, int) else f"SystemExit: {stop.code}\n")
        raise
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__):
            trace = trace.tb_next
        while trace is not None and trace.tb_frame.f_code.co_filename.startswith("<frozen runpy"):
            trace = trace.tb_next
        error.__traceback__ = trace
        status = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        _write(record, status, "".join(traceback.format_exception(error)))
        sys.excepthook(type(error), error, trace)
        sys.exit(status)


def _run_script(path: str) -> None:
    if os.path.isdir(path) or path.endswith((".zip", ".pyz")):
        runpy.run_path(path, run_name="__main__")
        return
    module = types.ModuleType("__main__")
    path = os.path.abspath(path)
    module.__file__ = path
    module.__loader__ = SourceFileLoader("__main__", path)
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec")
    exec(code, module.__dict__)


def _run_module(name: str) -> None:
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _write(record: str, status: int, trace: str) -> None:
    """Atomically, once: a record that appears is whole. Failing to write must not hide the failure itself."""
    try:
        with open(record + ".part", "w", encoding="utf-8", errors="backslashreplace") as file:
            json.dump({"time_ns": time.time_ns(), "exit_status": status, "traceback": trace}, file)
        os.replace(record + ".part", record)
    except OSError:
        pass


def _end_with_parent(parent: int) -> None:
    """Ask Linux for SIGTERM when the launcher dies, so that even `kill -9` of it leaves no orphan."""
    if not sys.platform.startswith("linux"):
        return
    try:
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    except (ImportError, OSError, AttributeError):
        return
    if os.getppid() != parent:  # it died before the request
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
