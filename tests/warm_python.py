"""A Python interpreter that has imported torch already, for tests of programs whose start is not what is tested.

    command = [warm_python.python(), "-m", "trilithon.cli.main", "train", ...]

Importing torch and what a training needs takes a process several seconds of a core; a fork of a process that has done
so takes hundredths. What `python` returns is an executable that behaves like `python`: -m, -c and scripts, arguments,
environment, folder, open descriptors, signals, exit status. In the program `sys.executable` is that path again, so the
ranks that it starts are warm as well. Programs under test are the same in every respect but their start, their place in
the process tree (a fork of the server, in a session of its own), and interpreter options, of which only -u counts.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import io
import json
import multiprocessing
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

WARM = (
    "torch",
    "torch._dynamo",  # which the first torch optimizer of a process imports, for seconds
    "torch.distributed.run",
    "torch.utils.checkpoint",
    "torch.utils.tensorboard",
    "numba",
    "tokenizers",
    "matplotlib.pyplot",
    "rich.progress",
    "trilithon.cli.main",
    "trilithon.cli.train",
    "trilithon.doctor",
    "trilithon.compare",
    "trilithon.engine.build",
    "trilithon.pretrain.rank",
    "trilithon.pretrain.ranks",
)
WITHOUT_VALUE, WITH_VALUE = "BEIOPSqsuvbdx", "WX"  # options of the interpreter
START_LIMIT_S = 180.0


class WarmPython:
    """Starts the server; it ends, with what it runs, when this object is closed or its process dies."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="warm-python-"))
        self.path = str(self.folder / "python")
        client = Path(__file__).with_name("warm_client.py").read_text()
        Path(self.path).write_text(f"#!{sys.executable} -IS\n{client}")
        Path(self.path).chmod(0o700)
        self._server = subprocess.Popen(
            [sys.executable, __file__, str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "MPLBACKEND": "Agg"},
        )
        assert self._server.stdout is not None
        ready, _, _ = select.select([self._server.stdout], [], [], START_LIMIT_S)
        said = self._server.stdout.readline() if ready else b""
        if said != b"ready\n":
            self.close()
            raise RuntimeError(f"the warm interpreter did not start: {said!r}")

    def close(self) -> None:
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.close()
        try:
            self._server.wait(10)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        self._server.stdout.close()
        shutil.rmtree(self.folder, ignore_errors=True)


@cache
def python() -> str:
    """The executable of this process's warm interpreter; the plain one where descriptors cannot be read from /proc, or
    with TRILITHON_COLD_TESTS set."""
    global _python
    if not sys.platform.startswith("linux") or os.environ.get("TRILITHON_COLD_TESTS"):
        return sys.executable
    _python = WarmPython()
    atexit.register(_python.close)
    return _python.path


_python: WarmPython | None = None


def program_of(client: int) -> int:
    """The process id of the program that a process started as `python` stands for; a plain interpreter is its own."""
    if _python is None:
        return client
    with contextlib.suppress(OSError):
        return int((_python.folder / f"{client}.pid").read_text())
    return client


# ----------------------------------------------------------------------------------------------------------- the server
def serve(folder: Path) -> None:
    """Fork a program for every connection, and send back how it ended. One thread: a fork copies no other."""
    taken = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    import_path = [entry for entry in sys.path[1:] if entry not in taken]
    for name in WARM:
        with contextlib.suppress(ImportError):  # the program that needs it will say so
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    wake_read, wake_write = os.pipe()
    for end in (wake_read, wake_write):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    programs: dict[socket.socket, int] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(folder / "socket"))
        listener.listen(64)
        os.write(1, b"ready\n")
        while True:
            ready, _, _ = select.select([0, listener, wake_read, *programs], [], [])
            if 0 in ready:  # the tests are over
                break
            if wake_read in ready:
                os.read(wake_read, 4096)
            _tell_ends(programs)
            for connection in ready:
                if connection in programs:  # nothing is ever sent: the client is gone
                    os.kill(programs[connection], signal.SIGKILL)
                    connection.recv(1)
            if listener in ready:
                connection, _ = listener.accept()
                with contextlib.suppress(OSError, EOFError):
                    programs[connection] = _start(connection, folder, import_path)
    for pid in programs.values():
        os.kill(pid, signal.SIGKILL)


def _tell_ends(programs: dict[socket.socket, int]) -> None:
    while programs:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        connection = next(connection for connection, started in programs.items() if started == pid)
        del programs[connection]
        with connection, contextlib.suppress(OSError):  # the client may be gone
            connection.sendall(os.waitstatus_to_exitcode(status).to_bytes(4, "little", signed=True))


def _start(connection: socket.socket, folder: Path, import_path: list[str]) -> int:
    connection.settimeout(10.0)
    head, received, _, _ = socket.recv_fds(connection, 4, 256)
    missing, words = int.from_bytes(head, "little"), b""
    while len(words) < missing:
        part = connection.recv(missing - len(words))
        if not part:
            raise EOFError
        words += part
    connection.settimeout(None)
    request = json.loads(words)
    pid = os.fork()
    if pid == 0:
        _become(request, received, str(folder / "python"), import_path)
    for descriptor in received:
        os.close(descriptor)
    (folder / f"{request['client']}.pid").write_text(str(pid))
    connection.sendall(pid.to_bytes(4, "little"))
    return pid


# ---------------------------------------------------------------------------------------------------------- the program
def _become(request: dict[str, Any], received: list[int], executable: str, import_path: list[str]) -> NoReturn:
    """In the fork: take over what the client was given, run the program and end as an interpreter would."""
    status = 1
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _take_descriptors(received, request["descriptors"])
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        _show_parent(request["parent"])
        sys.executable = executable
        multiprocessing.set_executable(executable)
        program, unbuffered = _program_of(request["arguments"][1:])
        _take_streams(unbuffered)
        _set_threads()
        added = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
        sys.path[:] = [*added, *import_path]
        status = _run(program)
    finally:
        os._exit(status)


def _show_parent(parent: int) -> None:
    """Programs look whether the one that started them is still there; their own forks have them as parents."""
    program, actual = os.getpid(), os.getppid
    os.getppid = lambda: parent if os.getpid() == program else actual()


def _take_descriptors(received: list[int], wanted: list[int]) -> None:
    for number in map(int, os.listdir("/proc/self/fd")):
        if number not in received:
            with contextlib.suppress(OSError):
                os.close(number)
    above = max(wanted, default=2) + 1
    moved = [fcntl.fcntl(number, fcntl.F_DUPFD, above) for number in received]
    for number in received:
        os.close(number)
    for number, target in zip(moved, wanted, strict=True):
        os.dup2(number, target)
        os.close(number)


def _take_streams(unbuffered: bool) -> None:
    if Path("/proc/self/fd/0").exists():
        sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), encoding="utf-8")
    for name, number in (("stdout", 1), ("stderr", 2)):
        raw = io.BufferedWriter(io.FileIO(number, "w", closefd=False))
        lines, errors = number == 2 or os.isatty(number), "strict" if number == 1 else "backslashreplace"
        stream = io.TextIOWrapper(
            raw, encoding="utf-8", errors=errors, line_buffering=lines or unbuffered, write_through=unbuffered
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _set_threads() -> None:
    import torch

    asked = os.environ.get("OMP_NUM_THREADS", "")
    torch.set_num_threads(int(asked) if asked.isdigit() else len(os.sched_getaffinity(0)))


def _program_of(arguments: list[str]) -> tuple[list[str], bool]:
    """[-m, module, ...], [-c, code, ...] or [script, ...] after the interpreter's own options, and whether -u was."""
    unbuffered, place = bool(os.environ.get("PYTHONUNBUFFERED")), 0
    while place < len(arguments) and arguments[place].startswith("-") and arguments[place][:2] not in ("-m", "-c"):
        option = arguments[place]
        if option[1] in WITH_VALUE:
            place += 2 if len(option) == 2 else 1
            continue
        if set(option[1:]) - set(WITHOUT_VALUE):
            raise SystemExit(f"the warm interpreter does not know {option}")
        unbuffered |= "u" in option
        place += 1
    return arguments[place:], unbuffered


def _run(program: list[str]) -> int:
    """The exit status, after what an interpreter does at its end: threads, exit functions, buffers."""
    status = 0
    try:
        try:
            _execute(program)
        finally:
            threading._shutdown()
    except SystemExit as request:
        status = request.code if isinstance(request.code, int) else int(request.code is not None)
        if request.code is not None and not isinstance(request.code, int):
            print(request.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(*sys.exc_info())
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status & 0xFF


def _execute(program: list[str]) -> None:
    if program[0] == "-m":
        sys.argv = program[1:]
        sys.path.insert(0, os.getcwd())
        if not hasattr(sys.modules.get(program[1]), "__path__"):
            sys.modules.pop(program[1], None)  # an interpreter has not imported it before
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    elif program[0] == "-c":
        sys.argv = ["-c", *program[2:]]
        sys.path.insert(0, "")
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        exec(compile(program[1], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = program
        sys.path.insert(0, os.path.dirname(os.path.abspath(program[0])))
        runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
