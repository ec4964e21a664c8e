"""Start scripts of clients on one or two ranks, with the `deepspeed` under test.

By default that is trilithon's, through `python -m trilithon.compat.deepspeed`. `CLIENTS_PYTHON` names the Python of an
environment in which another distribution of `deepspeed` is installed: the scripts then run with that one, which is how
they were proven before ours ran them.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SCRIPTS = HERE / "scripts"
OTHER_PYTHON = os.environ.get("CLIENTS_PYTHON")
_OUTPUT_SHOWN = 6000  # characters of each rank's output in a failure


def python_command() -> list[str]:
    """What a script and its arguments are appended to."""
    return [OTHER_PYTHON] if OTHER_PYTHON else [sys.executable, "-m", "trilithon.compat.deepspeed"]


def environment(**changes: str) -> dict[str, str]:
    """One thread a rank, nothing from a hub, and nothing that a launcher of these tests left behind."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    quiet = {"TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    cpu = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo"}
    return {**kept, **offline, **quiet, **cpu, **changes}


class ScriptFailedError(AssertionError):
    """A rank of a script ended with another code than 0; the message has the end of every rank's output."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The folder that a script wrote to, and what each rank printed."""

    folder: Path
    outputs: tuple[str, ...]

    def report(self, name: str = "report.json") -> dict[str, Any]:
        read: dict[str, Any] = json.loads((self.folder / name).read_text())
        return read


class RankServer:
    """The other end of rank_server.py; started on first use."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._process: subprocess.Popen[str] | None = None
        self._answers: Any = None
        self._jobs = 0

    def _start(self) -> subprocess.Popen[str]:
        read, write = os.pipe()
        os.set_inheritable(write, True)
        command = [*python_command(), str(HERE / "rank_server.py"), str(write)]
        with tempfile.TemporaryFile() as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(write,),
                text=True,
                env=environment(HF_HOME=str(self._home / "hf"), HF_DATASETS_CACHE=str(self._home / "datasets")),
            )
            os.close(write)
            self._answers = os.fdopen(read)
            if not self._answers.readline():
                process.wait(30)
                log.seek(0)
                shown = log.read().decode(errors="replace")[-_OUTPUT_SHOWN:]
                raise ScriptFailedError(f"{' '.join(command)} ended with {process.returncode}:\n{shown}")
        return process

    def run(
        self,
        script: str,
        folder: Path,
        *args: object,
        world_size: int = 1,
        preludes: tuple[str, ...] = (),
        timeout_s: float = 60.0,
        **env: str,
    ) -> Finished:
        """Run `script` of scripts/ with `folder` as its output folder; ScriptFailedError unless all ranks end well."""
        self._process = self._process or self._start()
        self._jobs += 1
        folder.mkdir(parents=True, exist_ok=True)
        outputs = [str(folder / f"rank_{rank}_{self._jobs}.log") for rank in range(world_size)]
        job = {
            "script": str(SCRIPTS / script),
            "args": [str(arg) for arg in args],
            "world_size": world_size,
            "env": env,
            "outputs": outputs,
            "folder": str(folder),
            "preludes": [str(HERE / "preludes" / name) for name in preludes],
            "timeout_s": timeout_s,
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        codes = json.loads(self._answers.readline())["codes"]
        printed = tuple(Path(path).read_text(errors="replace") if Path(path).exists() else "" for path in outputs)
        if any(codes):
            ends = [
                f"--- rank {rank}, code {code}\n{printed[rank][-_OUTPUT_SHOWN:]}" for rank, code in enumerate(codes)
            ]
            shown = "\n".join(ends)
            raise ScriptFailedError(f"{script} {' '.join(job['args'])}\n{shown}")
        return Finished(folder, printed)

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
