"""One rank of a test: what happens in a forked process between the fork and its end.

A rank becomes the leader of a process group of its own (so that everything it starts can be ended with it), asks the
kernel to end it when the fork server dies, sends its standard streams to a file, takes over the environment, folder and
import path of the caller, fixes the seeds, joins the gloo group, runs the body and leaves a `Report`. It then stays
alive until every rank has reported, because a peer may still be reading from its sockets (a rank that raised does not
wait when the others are to run on without it). It always ends by `os._exit`:
the interpreter it was forked from belongs to the server.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import importlib.util
import os
import pickle
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import CodeType, FrameType, ModuleType
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

SEED = 20_200_501
RAISED_STATUS = 1  # exit status of a rank whose body raised
DUMP_SIGNAL = signal.SIGUSR1  # asks a rank for the Python stacks of all its threads
_PR_SET_PDEATHSIG = 1
_LOCAL_CLIP = 160  # characters of a local variable shown beside a failed assert


@dataclass(frozen=True, slots=True)
class Job:
    """One request to the fork server. Pickled without the caller's classes: those wait inside `arguments`."""

    module: str
    qualname: str
    path: str  # source file of the body, for bodies that cannot be imported by name
    arguments: bytes  # pickled (args, kwargs), opened in the rank once its import path is in place
    world_size: int
    timeout_s: float
    init: bool  # join a gloo group before the body runs
    end_on_failure: bool  # end the other ranks once one has failed
    environ: Mapping[str, str]
    import_path: tuple[str, ...]
    folder: str


@dataclass(frozen=True, slots=True)
class Report:
    """What a rank says about its body when it is over."""

    at: float  # time.monotonic(), which all processes of a machine share
    value: bytes | None  # pickled return value
    error: str | None  # formatted traceback
    summary: str | None  # the exception in one line


@dataclass(frozen=True, slots=True)
class Streams:
    """Descriptors that a rank inherits from the server."""

    output: int  # file that takes standard output and error
    report: int  # file that takes the pickled `Report`
    notice: int  # write end: the rank's number is written here once its report is complete
    release: int  # read end: at end of file every rank has reported


def end_with_parent(parent_pid: int) -> None:
    """Have the kernel end this process when its parent does; returns only if the parent is still there (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died between the fork and the call above
        os._exit(RAISED_STATUS)


def run_rank(job: Job, rank: int, port: int, streams: Streams, parent_pid: int) -> NoReturn:
    """Run the body as `rank` and end this process. Exit status: 0, 1 if the body raised, or what it exited with."""
    status = RAISED_STATUS
    try:
        end_with_parent(parent_pid)
        _take_streams(streams.output)
        report, status = _run_body(job, rank, port)
        _leave(streams, rank, report, wait=report.error is None or job.end_on_failure)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _take_streams(output: int) -> None:
    os.setpgid(0, 0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = (os.fdopen(fd, "w", encoding="utf-8", buffering=1, closefd=False) for fd in (1, 2))
    faulthandler.enable(file=2, all_threads=True)
    faulthandler.register(DUMP_SIGNAL, file=2, all_threads=True, chain=False)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _run_body(job: Job, rank: int, port: int) -> tuple[Report, int]:
    try:
        _enter(job, rank, port)
        body = _find_body(job)
        args, kwargs = pickle.loads(job.arguments)
        if job.init:
            dist.init_process_group("gloo", timeout=timedelta(seconds=2 * job.timeout_s + 1))
        value = pickle.dumps(body(*args, **kwargs))
    except SystemExit as exit_request:
        status = _exit_status(exit_request)
        line = f"SystemExit: the body asked to exit with status {status}"
        return Report(time.monotonic(), None, traceback.format_exc(), line), status
    except BaseException as error:
        at = time.monotonic()
        summary = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
        return Report(at, None, _format(error), summary), RAISED_STATUS
    return Report(time.monotonic(), value, None, None), 0


def _enter(job: Job, rank: int, port: int) -> None:
    sys.path[:] = job.import_path
    os.chdir(job.folder)
    os.environ.clear()
    os.environ.update(job.environ)
    os.environ.update(rank_environment(rank, job.world_size, port))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback())
    torch.set_num_threads(1)
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun would set. The store is hosted outside the ranks, hence the agent-store flag."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _loopback() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next(name for name in ("lo", "lo0", *names) if name in names)


def _find_body(job: Job) -> Callable[..., Any]:
    found: Any = _find_module(job.module, job.path)
    for part in job.qualname.split("."):
        found = getattr(found, part)
    body: Callable[..., Any] = getattr(found, "rank_body", found)  # beneath the `ranks` decorator
    return body


def _find_module(name: str, path: str) -> ModuleType:
    """The module by name if that is the same file, else from the file itself (`__main__`, importlib test modules)."""
    if name != "__main__":
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as missing:
            if missing.name is None or not (name + ".").startswith(missing.name + "."):
                raise
        else:
            if os.path.realpath(module.__file__ or "") == os.path.realpath(path):
                return module
    spec = importlib.util.spec_from_file_location("__ranks_main__" if name == "__main__" else name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"the body's module {name!r} has no loadable source file at {path!r}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _exit_status(request: SystemExit) -> int:
    if request.code is None:
        return 0
    if isinstance(request.code, int):
        return request.code & 0xFF
    print(request.code, file=sys.stderr)
    return 1


def _format(error: BaseException) -> str:
    """The traceback without the frames of this file; a failed assert also shows the locals it was about."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))
    if isinstance(error, AssertionError) and trace is not None:
        while trace.tb_next is not None:
            trace = trace.tb_next
        text += _format_locals(trace.tb_frame)
    return text


def _format_locals(frame: FrameType) -> str:
    code: CodeType = frame.f_code
    lines = []
    for name, value in frame.f_locals.items():
        try:
            shown = " ".join(repr(value).split())
        except Exception as failure:
            shown = f"<repr raised {type(failure).__name__}>"
        lines.append(f"    {name} = {shown[:_LOCAL_CLIP]}{'...' if len(shown) > _LOCAL_CLIP else ''}\n")
    return f"  Locals of {code.co_name}:\n{''.join(lines)}" if lines else ""


def _leave(streams: Streams, rank: int, report: Report, wait: bool) -> None:
    with open(streams.report, "wb") as out:
        pickle.dump(report, out)
    os.write(streams.notice, rank.to_bytes(4, "little"))
    if wait:
        os.read(streams.release, 1)
