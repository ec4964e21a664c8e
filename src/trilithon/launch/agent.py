"""One node's agent: torch's elastic agent for rendezvous, ranks and restarts, with our own hold on the processes.

`SimpleElasticAgent` (torch.distributed.elastic) is the documented class to build an agent on. What differs from the
agent inside torchrun: arguments reach the script untouched, every process is gone within `GRACE_S` of the first
failure and within the plan's own grace after a signal, a node's failure ends the other nodes too, and the failing
rank's traceback is the last thing shown.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousHandler
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from trilithon.errors import LaunchError
from trilithon.launch import child
from trilithon.launch.plan import Command, Plan
from trilithon.launch.processes import Failure, NodeProcesses

GRACE_S = 5.0
_POLL_S = 0.1
_STORE_EVERY_S = 0.5
_FAILED, _DONE, _STOPPED = "trilithon/failed", "trilithon/done", "trilithon/stopped"


class NodeAgent(SimpleElasticAgent):
    """Runs one node of a plan. After `run`, `failure` is this node's first failure and `elsewhere` another node's."""

    def __init__(self, spec: WorkerSpec, plan: Plan, records: Path) -> None:
        super().__init__(spec, exit_barrier_timeout=30, shutdown_timeout=math.ceil(plan.grace_s))
        self._plan = plan
        self._records = records
        self._processes = NodeProcesses({}, [])
        self._next_look = 0.0
        self._counted = False
        self._counted_everywhere = False
        self._starting = False
        self._signal_seen: signal.Signals | None = None
        self.failure: Failure | None = None
        self.global_rank: int | None = None
        self.elsewhere: dict[str, Any] | None = None

    def on_signal(self, number: signal.Signals) -> None:
        """First signal: end everything gracefully. Any further one: at once, without raising into the clean-up."""
        if self._signal_seen is not None:
            self._processes.hurry = True
            return
        self._signal_seen = number
        if not self._starting:  # while processes start it waits, so that none is left out of the list
            raise SignalException(f"signal {number}", number)

    def tell_others(self, note: dict[str, Any]) -> None:
        """Let the agents of the other nodes know, then give them time to end theirs."""
        store, nodes = self._worker_group.store, self._worker_group.group_world_size
        if store is None or not nodes or nodes < 2:
            return
        try:
            if json.loads(store.compare_set(_FAILED, "", json.dumps(note))) != note:
                store.add(_STOPPED, 1)  # another node was first and waits for this one
                return
            deadline = time.monotonic() + GRACE_S + 1
            while time.monotonic() < deadline and store.add(_STOPPED, 0) < nodes - 1:
                time.sleep(_POLL_S)
        except RuntimeError:  # the node that holds the store is gone, and with it whoever would listen
            return

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        attempt = worker_group.spec.max_restarts - self._remaining_restarts
        folder = self._records / f"attempt-{attempt}-{uuid.uuid4().hex[:8]}"
        folder.mkdir()
        workers = sorted(worker_group.workers, key=lambda worker: worker.local_rank)
        records = [folder / f"{worker.local_rank}.json" for worker in workers]
        added = self._plan.added_environment(self._plan.node_rank or 0)
        environments = []
        for worker in workers:
            environments.append(
                {
                    **os.environ,
                    **added,
                    "RANK": str(worker.global_rank),
                    "LOCAL_RANK": str(worker.local_rank),
                    "WORLD_SIZE": str(worker.world_size),
                    "LOCAL_WORLD_SIZE": str(len(workers)),
                    "LOCAL_SIZE": str(len(workers)),  # this and the next two: for scripts that know MPI's launchers
                    "CROSS_RANK": str(worker_group.group_rank),
                    "CROSS_SIZE": str(worker_group.group_world_size),
                    "GROUP_RANK": str(worker_group.group_rank),
                    "GROUP_WORLD_SIZE": str(worker_group.group_world_size),
                    "ROLE_RANK": str(worker.role_rank),
                    "ROLE_WORLD_SIZE": str(worker.role_world_size),
                    "ROLE_NAME": worker_group.spec.role,
                    "MASTER_ADDR": str(worker_group.master_addr),
                    "MASTER_PORT": str(worker_group.master_port),
                    "TORCHELASTIC_RESTART_COUNT": str(attempt),
                    "TORCHELASTIC_MAX_RESTARTS": str(worker_group.spec.max_restarts),
                    "TORCHELASTIC_RUN_ID": worker_group.spec.rdzv_handler.get_run_id(),
                    "TORCHELASTIC_USE_AGENT_STORE": str(worker_group.spec.rdzv_handler.use_agent_store),
                    "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
                }
            )
        commands = [_rank_command(self._plan.command, *one) for one in enumerate(records)]
        self._starting = True
        try:
            self._processes = NodeProcesses.start(commands, environments, records)
        finally:
            self._starting = False
        if self._signal_seen is not None:
            raise SignalException(f"signal {self._signal_seen}", self._signal_seen)
        self._counted = False
        return dict(self._processes.pids)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        failure = self._processes.first_failure()
        if failure is not None:
            rank = worker_group.workers[failure.local_rank].global_rank
            self.failure, self.global_rank = failure, rank
            self._processes.end(signal.SIGTERM, GRACE_S)
            return RunResult(WorkerState.FAILED, failures={rank: _torch_failure(failure)})
        done = self._processes.finished()
        if self._look_elsewhere(worker_group, done):
            self._remaining_restarts = 0
            self._processes.end(signal.SIGTERM, GRACE_S)
            return RunResult(WorkerState.FAILED)
        if not done or not self._counted_everywhere:
            return RunResult(WorkerState.HEALTHY)
        self._processes.reap()
        return RunResult(
            WorkerState.SUCCEEDED, return_values={worker.global_rank: None for worker in worker_group.workers}
        )

    def _look_elsewhere(self, worker_group: WorkerGroup, done: bool) -> bool:
        """Whether another node failed. Sets `_counted_everywhere` when all nodes are through."""
        nodes = worker_group.group_world_size or 1
        self._counted_everywhere = done and nodes == 1
        if nodes == 1 or time.monotonic() < self._next_look:
            return False
        self._next_look = time.monotonic() + _STORE_EVERY_S
        store = worker_group.store
        assert store is not None
        try:
            if done and not self._counted:
                store.add(_DONE, 1)
                self._counted = True
            if store.check([_FAILED]):
                self.elsewhere = json.loads(store.get(_FAILED))
                self._processes.end(signal.SIGTERM, GRACE_S)
                store.add(_STOPPED, 1)
                return True
            self._counted_everywhere = done and store.add(_DONE, 0) >= nodes
        except RuntimeError:
            if done:  # the node with the store finished after counting everyone, and left
                self._counted_everywhere = True
                return False
            self.elsewhere = {"what": "the launcher of node 0 is gone", "exit_status": 1}
            return True
        return False

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._processes.end(signal.SIGTERM, GRACE_S)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self._processes.end(death_sig, min(timeout, self._plan.grace_s))


def run_node(plan: Plan, *, rendezvous_timeout_s: int = 600) -> int:
    """Run this machine's node of the plan to its end; returns the exit status for the launcher.

    0 when every rank of every node ended well; the first failing rank's status otherwise; 128 + n after signal n. When
    it returns or raises, no process it started is alive. Raises LaunchError if processes cannot be started or the nodes
    do not meet within `rendezvous_timeout_s`.
    """
    if plan.node_rank is None:
        raise LaunchError("this plan only starts other machines; use remote.run_over_ssh.")
    with tempfile.TemporaryDirectory(prefix="trilithon-launch-") as records:
        agent = NodeAgent(_spec(plan, rendezvous_timeout_s), plan, Path(records))
        handlers = _take_signals(agent)
        try:
            result = agent.run()
        except SignalException as stop:
            agent.tell_others({"what": f"node {plan.node_rank} got {stop.sigval.name}", "exit_status": 1})
            return 128 + int(stop.sigval)
        except RendezvousConnectionError as error:
            raise LaunchError(
                f"node {plan.node_rank} could not meet the others at {plan.master_addr}:{plan.master_port}: {error}. "
                "Check the address, the port and that node 0 runs."
            ) from error
        finally:
            agent._shutdown()
            for number, handler in handlers.items():
                signal.signal(number, handler)
        if result.state is WorkerState.SUCCEEDED:
            return 0
        return _report(agent, plan)


def _report(agent: NodeAgent, plan: Plan) -> int:
    sys.stdout.flush()
    if agent.failure is None:
        note = agent.elsewhere or {"what": "a rank failed", "exit_status": 1}
        print(f"trilithon launch: stopped node {plan.node_rank}: {note['what']}.", file=sys.stderr, flush=True)
        return int(note["exit_status"])
    failure = agent.failure
    node = plan.nodes[plan.node_rank or 0]
    how = f"signal {failure.signal_name}" if failure.signal_name else f"exit status {failure.exit_status}"
    what = f"rank {agent.global_rank} on {node.host} (local rank {failure.local_rank}, pid {failure.pid})"
    agent.tell_others({"what": f"{what} failed with {how}", "exit_status": failure.exit_status})
    lines = [f"trilithon launch: {what} failed first, with {how}; the others were ended."]
    if failure.signal_name == "SIGKILL":
        lines.append("SIGKILL mostly comes from the system when memory runs out: see `dmesg` and lower the memory use.")
    if failure.left and agent.global_rank is not None:  # ranks that wait for one that is gone fail, and it does not
        base = agent.global_rank - failure.local_rank
        gone = ", ".join(str(base + rank) for rank in failure.left)
        lines.append(f"By then these ranks had ended with exit status 0, perhaps too early: {gone}.")
    print("\n".join(lines), file=sys.stderr)
    print(failure.traceback.rstrip("\n"), file=sys.stderr, end="\n" if failure.traceback else "", flush=True)
    return failure.exit_status


def _spec(plan: Plan, timeout_s: int) -> WorkerSpec:
    nodes = len(plan.nodes)
    node_rank = plan.node_rank or 0
    static = plan.master_port is not None and plan.max_restarts == 0
    host = f"[{plan.master_addr}]" if ":" in plan.master_addr else plan.master_addr
    settings: dict[str, Any] = {"timeout": timeout_s}
    if static:
        settings["rank"] = node_rank
    elif nodes == 1:
        settings["is_host"] = True
    parameters = RendezvousParameters(
        backend="static" if static else "c10d",
        endpoint=f"{host}:{plan.master_port or 0}",
        run_id=f"trilithon-{plan.master_port}" if nodes > 1 else uuid.uuid4().hex,
        min_nodes=nodes,
        max_nodes=nodes,
        local_addr=plan.master_addr if nodes == 1 else None,
        **settings,
    )
    handler: RendezvousHandler = get_rendezvous_handler(parameters)
    return WorkerSpec(
        role="trainer",
        local_world_size=len(plan.nodes[node_rank].devices),
        rdzv_handler=handler,
        entrypoint=plan.command.target,
        max_restarts=plan.max_restarts,
        monitor_interval=_POLL_S,
        master_addr=plan.master_addr if static else None,
        master_port=plan.master_port if static else None,
    )


def _rank_command(command: Command, local_rank: int, record: Path) -> list[str]:
    if command.kind == "program":
        return command.words(local_rank)
    bootstrap = [sys.executable, "-u", child.__file__, str(record), str(os.getpid()), command.kind]
    return [*bootstrap, command.target, *command.args_of(local_rank)]


def _take_signals(agent: NodeAgent) -> dict[int, Any]:
    if threading.current_thread() is not threading.main_thread():
        return {}
    wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    return {
        int(number): signal.signal(number, lambda n, _frame: agent.on_signal(signal.Signals(n))) for number in wanted
    }


def _torch_failure(failure: Failure) -> ProcessFailure:
    return ProcessFailure(failure.local_rank, failure.pid, failure.exit_status, error_file="")
