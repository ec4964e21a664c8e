"""A process that imports the clients once and forks ranks that run scripts: importing them takes seconds, a fork none.

It is itself run the way a script is run (through the runner of trilithon, or by the Python of an environment with
another `deepspeed`), so its ranks see the `deepspeed` that a script of a user would see. One line of JSON per job on
standard input, one line of JSON per answer on the file descriptor named on the command line.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import random
import runpy
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_WARM = (
    "torch",
    "torch._dynamo",
    "torch.utils.checkpoint",
    "deepspeed",
    "deepspeed.runtime.engine",
    "accelerate",
    "transformers",
    "transformers.trainer",
    "transformers.models.llama.modeling_llama",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.generation",
    "peft",
    "trl",
    "trl.trainer.sft_trainer",
)
_POLL_S = 0.02
_AFTER_A_FAILURE_S = 5.0  # how long the other ranks may go on after one has failed


def _free_port() -> int:
    """Below the ports that systems hand out by themselves, so that no other program gets it before rank 0 listens."""
    while True:
        port = random.SystemRandom().randrange(20000, 32768)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _run_rank(job: dict[str, Any], rank: int, port: int) -> None:
    world = job["world_size"]
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "LOCAL_SIZE": world}
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **job["env"]})
    os.setsid()
    output = os.open(job["outputs"][rank], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.dump_traceback_later(max(1.0, job["timeout_s"] - 5.0))
    os.chdir(job["folder"])
    script = job["script"]
    sys.path[0] = str(Path(script).parent)
    sys.argv = [script, *job["args"]]
    for prelude in job["preludes"]:
        runpy.run_path(prelude)
    runpy.run_path(script, run_name="__main__")


def _exit_code_of(job: dict[str, Any], rank: int, port: int) -> int:
    try:
        _run_rank(job, rank, port)
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _fork(job: dict[str, Any], rank: int, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    with contextlib.suppress(BaseException):
        code = _exit_code_of(job, rank, port)
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _end(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def run(job: dict[str, Any]) -> list[int]:
    """The exit code of every rank; negative numbers are signals, as in `subprocess`."""
    port = _free_port()
    pids = [_fork(job, rank, port) for rank in range(job["world_size"])]
    codes: dict[int, int] = {}
    deadline = time.monotonic() + job["timeout_s"]
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[pid] = os.waitstatus_to_exitcode(status)
                    if codes[pid] != 0:
                        deadline = min(deadline, time.monotonic() + _AFTER_A_FAILURE_S)
        if time.monotonic() > deadline:
            _end(pid for pid in pids if pid not in codes)
        time.sleep(_POLL_S)
    return [codes[pid] for pid in pids]


def main() -> None:
    answers = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    for name in _WARM:
        importlib.import_module(name)
    getattr(sys.modules["deepspeed"], "initialize")  # noqa: B009 (what stands behind the name is imported by asking)
    # DeepSpeed itself would compile its exchange through shared memory first, which takes minutes; gloo does without.
    importlib.import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
    gc.collect()
    gc.freeze()
    answers.write(json.dumps({"ready": sys.modules["deepspeed"].__version__}) + "\n")
    for line in sys.stdin:
        answers.write(json.dumps({"codes": run(json.loads(line))}) + "\n")


if __name__ == "__main__":
    main()
