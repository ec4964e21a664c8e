"""Run a function on several ranks, and a test on several world sizes.

    @ranks(2, 4)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_sum(world_size, dtype):
        value = torch.ones(3, dtype=dtype)
        dist.all_reduce(value)
        assert value.tolist() == [world_size] * 3

The body runs in processes forked from a warm server (`fork_server`), with a gloo group, one thread and fixed seeds.
`run_ranks` returns what the ranks returned or raises `RanksError`, which opens with the traceback of the rank that
failed first. `run_ranks_raw` never raises for what a rank does: it is for tests in which ranks are meant to die.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Mapping
from multiprocessing.connection import Pipe
from typing import Any

from trilithon.errors import LaunchError
from trilithon.testing.fork_server import Ending, Record
from trilithon.testing.rank_process import Job
from trilithon.testing.rank_results import RankResult, RanksError, failure, rank_result

_START_LIMIT_S = 180.0  # for the server to import torch on a machine that is busy
_ANSWER_LIMIT_S = 30.0  # beyond a job's own time, for dumping stacks and collecting ranks
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
_BOOT += "from trilithon.testing.fork_server import serve; serve(int(sys.argv[1]))"


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60.0,
    env: Mapping[str, str] | None = None,
    init: bool = True,
    **kwargs: Any,
) -> list[Any]:
    """Call `fn(*args, **kwargs)` on `world_size` ranks of this machine and return their values in order of rank.

    `fn` is a function at the top level of a module or script; arguments and values are pickled. In each rank
    `torch.distributed` has a gloo group (also for one rank), torch runs one thread and the seeds of `random`, numpy and
    torch are the same. With `init=False` the body makes the group itself: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
    MASTER_PORT are set either way. `env` adds to the caller's environment.

    Raises RanksError if a rank raises, exits, is killed, or is not done within `timeout_s`; the other ranks are ended.
    """
    results = _results(_job(fn, world_size, args, kwargs, timeout_s=timeout_s, env=env, init=init, end_on_failure=True))
    if all(result.ending is Ending.RETURNED for result in results):
        return [result.value for result in results]
    raise failure(results, timeout_s)


def run_ranks_raw(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60.0,
    env: Mapping[str, str] | None = None,
    init: bool = True,
    end_on_failure: bool = False,
    **kwargs: Any,
) -> list[RankResult]:
    """Like `run_ranks`, but report how each rank ended instead of raising.

    Ranks run on when one fails (a rank that raised exits with status 1 at once), until `timeout_s` is over; with
    `end_on_failure` they are ended half a second after the first failure. Ranks that were still running then have the
    ending TIMED_OUT or ENDED, the exit code -9, and their Python stacks in `output`.
    """
    return _results(
        _job(fn, world_size, args, kwargs, timeout_s=timeout_s, env=env, init=init, end_on_failure=end_on_failure)
    )


def ranks(
    *world_sizes: int, timeout_s: float = 60.0, env: Mapping[str, str] | None = None, init: bool = True
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Decorator for pytest functions: the body runs once for each of `world_sizes`, on that many ranks.

    Fixtures and parameters are resolved by pytest, pickled and handed to the body; `world_size` too if the body names
    it. The other arguments are those of `run_ranks`. Raises TypeError for methods and nested functions.
    """
    if not world_sizes or min(world_sizes) < 1:
        raise ValueError(f"ranks{world_sizes} names no number of ranks. Write, for example, @ranks(2, 4).")

    def decorate(fn: Callable[..., Any]) -> Callable[..., None]:
        _check_reachable(fn)
        import pytest  # only those who decorate tests have it

        signature = inspect.signature(fn)
        wants_size = "world_size" in signature.parameters

        @functools.wraps(fn)
        def on_ranks(world_size: int, **kwargs: Any) -> None:
            __tracebackhide__ = _is_ranks_error
            if wants_size:
                kwargs["world_size"] = world_size
            _values(_job(fn, world_size, (), kwargs, timeout_s=timeout_s, env=env, init=init, end_on_failure=True))

        parameters = list(signature.parameters.values())
        if not wants_size:
            parameters.append(inspect.Parameter("world_size", inspect.Parameter.KEYWORD_ONLY))
        on_ranks.__dict__.update(rank_body=fn, __signature__=signature.replace(parameters=parameters))
        mark = pytest.mark.parametrize("world_size", world_sizes, ids=[f"{n}ranks" for n in world_sizes])
        marked: Callable[..., None] = mark(on_ranks)
        return marked

    return decorate


def _check_reachable(fn: Callable[..., Any]) -> None:
    qualname = getattr(fn, "__qualname__", None)
    if not inspect.isfunction(fn) or qualname is None or "." in qualname or qualname == "<lambda>":
        raise TypeError(
            f"{qualname or fn!r} cannot be found again in another process: the body of a rank has to be a function at "
            "the top level of a module. Move it there and pass what it needs as arguments."
        )


def _job(
    fn: Callable[..., Any],
    world_size: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    timeout_s: float,
    env: Mapping[str, str] | None,
    init: bool,
    end_on_failure: bool,
) -> Job:
    fn = getattr(fn, "rank_body", fn)
    _check_reachable(fn)
    if world_size < 1:
        raise ValueError(f"world_size={world_size}: there has to be at least 1 rank.")
    try:
        arguments = pickle.dumps((args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"an argument of {fn.__qualname__} cannot be pickled for the ranks ({error}). "
            "Pass plain data and build the rest in the body."
        ) from error
    return Job(
        module=fn.__module__,
        qualname=fn.__qualname__,
        path=os.path.abspath(fn.__code__.co_filename),
        arguments=arguments,
        world_size=world_size,
        timeout_s=timeout_s,
        init=init,
        end_on_failure=end_on_failure,
        environ={**os.environ, **_ONE_THREAD, **(env or {})},
        import_path=tuple(os.path.abspath(entry) for entry in sys.path),
        folder=os.getcwd(),
    )


def _is_ranks_error(info: Any) -> bool:
    """For pytest: the frames between a test and its ranks say nothing that the message does not."""
    return isinstance(info.value, RanksError)


def _values(job: Job) -> list[Any]:
    __tracebackhide__ = _is_ranks_error
    results = _results(job)
    if all(result.ending is Ending.RETURNED for result in results):
        return [result.value for result in results]
    raise failure(results, job.timeout_s)


class _Server:
    """The caller's end of a fork server. Not shared with forks of the caller: they would read each other's answers."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `close`)
        self._connection, theirs = Pipe(duplex=True)
        path = json.dumps([os.path.abspath(entry) for entry in sys.path])
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, str(theirs.fileno()), path],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # an interrupt typed at the terminal reaches the caller only
            env={**os.environ, **_ONE_THREAD},
        )
        theirs.close()
        try:
            _, num_threads = self._answer(_START_LIMIT_S)
        except BaseException:
            self.close()
            raise
        if num_threads > 1:
            warnings.warn(
                f"the fork server for ranks has {num_threads} threads after its imports; only one survives in a "
                "rank, which may hang. Look for a package that starts threads when it is imported.",
                stacklevel=2,
            )

    def ask(self, job: Job) -> list[Record]:
        self._connection.send(job)
        records: list[Record] = self._answer(job.timeout_s + _ANSWER_LIMIT_S)
        return records

    def _answer(self, limit_s: float) -> Any:
        try:
            if self._connection.poll(limit_s):
                return self._connection.recv()
            reason = f"gave no answer within {limit_s:.0f} s"
        except (EOFError, OSError) as error:
            reason = f"ended ({type(error).__name__})"
        self._errors.seek(0)
        said = self._errors.read().decode("utf-8", errors="replace").strip()
        raise LaunchError(f"the fork server for ranks {reason}. It said: {said or 'nothing'}")

    def close(self) -> None:
        """Close the life line; the server ends its ranks and itself."""
        self._connection.close()
        if self.owner != os.getpid():
            return
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()


_lock = threading.Lock()
_server: _Server | None = None


def _results(job: Job) -> list[RankResult]:
    global _server
    with _lock:
        if _server is None or _server.owner != os.getpid():
            _server = _Server()
            atexit.register(_server.close)
        try:
            records = _server.ask(job)
        except BaseException:  # an interrupt, or a server that is gone: nothing of this job may stay behind
            broken, _server = _server, None
            atexit.unregister(broken.close)
            broken.close()
            raise
    return [rank_result(number, record) for number, record in enumerate(records)]
