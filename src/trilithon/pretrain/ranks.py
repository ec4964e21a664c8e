"""Several ranks on this machine: started, watched, restarted and ended together by torch's elastic agent.

What asks this process to stop reaches the ranks as the same signal. SIGUSR1 is passed on as a file that rank 0 looks
for after every step, since the agent does not tell who its processes are.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from trilithon.errors import LaunchError
from trilithon.pretrain.interrupt import SaveRequest
from trilithon.pretrain.rank import OURS
from trilithon.pretrain.settings import PretrainConfig
from trilithon.pretrain.start import default_folder


def start_ranks(config: PretrainConfig, num_ranks: int) -> int:
    """Train on `num_ranks` new processes of this machine; returns 0 or the exit status of an orderly stop.

    Each rank gets its share of the cores unless OMP_NUM_THREADS is set. The ranks meet at a free local port. When one
    fails, the others are ended, and all are started again from the last checkpoint as often as `run.max_restarts` says;
    then LaunchError carries that one's message and exit status. When this process is asked to stop, so are they.
    """
    if config.run.max_restarts and config.run.out is None:  # the next start must find the folder of this one
        out = default_folder()
        config = config.model_copy(update={"run": config.run.model_copy(update={"out": out})})
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with tempfile.TemporaryDirectory(prefix="trilithon-train-") as logs:
        launch = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=config.run.max_restarts,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
            shutdown_timeout=config.run.stop_within_s,
        )
        request = SaveRequest(Path(logs, "save-request"))
        environment = {
            OURS: str(os.getpid()),
            SaveRequest.VARIABLE: str(request.path),
            "OMP_NUM_THREADS": str(max(cores // num_ranks, 1)),
        }
        if "OMP_NUM_THREADS" in os.environ:
            del environment["OMP_NUM_THREADS"]
        with _quiet_agent(), _environment(environment), _signals_as_before():
            if config.run.save_on_signal and threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGUSR1, lambda *_: request.make())
            try:
                elastic_launch(launch, sys.executable)("-u", "-m", "trilithon.pretrain.rank", config.model_dump_json())
            except SignalException as error:
                return 128 + error.sigval
            except ChildFailedError as error:
                return _failure(error)
    return 0


class RankFailedError(LaunchError):
    """A rank ended with an error; `exit_status` is what a shell would show for it."""

    def __init__(self, message: str, exit_status: int) -> None:
        super().__init__(message)
        self.exit_status = exit_status


def _failure(error: ChildFailedError) -> int:
    """The exit status of an orderly stop, or RankFailedError for the rank that failed first."""
    statuses = {failure.exitcode for failure in error.failures.values()}
    for number in (signal.SIGINT, signal.SIGTERM):
        if statuses == {128 + number}:
            return 128 + number
    rank, failure = error.get_first_failure()
    status = failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
    if _told(failure) is not None:
        status = max(failure.exitcode, 1)  # it had failed already when a signal ended it
    raise RankFailedError(_message(rank, failure), status) from None


def _told(failure: ProcessFailure) -> str | None:
    """The message that the rank left about its own failure."""
    left = failure.error_file_data.get("message") if isinstance(failure.error_file_data, dict) else None
    return str(left["message"]) if isinstance(left, dict) else None


def _message(rank: int, failure: ProcessFailure) -> str:
    told = _told(failure)
    if told is not None:
        return told
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        hint = " It is what a machine out of memory does: try --zero-stage 3, a smaller --micro-batch or --model."
        return f"Rank {rank} was ended by {name}.{hint if name == 'SIGKILL' else ''}"
    return f"Rank {rank} ended with exit status {failure.exitcode}; what it printed is above."


@contextmanager
def _quiet_agent() -> Iterator[None]:
    """The agent's own account of a failure is left out: the message of the rank says it in one place."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Variables that the ranks inherit."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _signals_as_before() -> Iterator[None]:
    """The agent replaces signal handlers and does not put them back."""
    before = {
        which: signal.getsignal(which)
        for which in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
    }
    try:
        yield
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)
