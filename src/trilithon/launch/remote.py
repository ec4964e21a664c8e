"""All nodes of a plan from one place, through ssh: one agent per host, all of them ended when one fails.

Every remote agent keeps its standard input open to the ssh connection and stops when it closes, so that nothing is
left running when this side ends, however it ends.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence

from trilithon.errors import LaunchError
from trilithon.launch.plan import DEFAULT_PORT, Plan

DEFAULT_SSH = ("ssh", "-o", "BatchMode=yes")
_END_WITHIN_S = 4.0  # for an agent, once its ranks have ended
_CARRIED = ("OMP_NUM_THREADS", "PYTHONPATH", "TRILITHON_", "NCCL_", "GLOO_", "TORCH_", "CUDA_DEVICE_")


def node_commands(plan: Plan, environment: Mapping[str, str], folder: str, exported: Sequence[str] = ()) -> list[str]:
    """One shell line per node that starts its agent in `folder`, every word quoted for a POSIX shell.

    exported: variables that go along besides those that always do.
    """
    chosen = set(exported)
    carried = {name: value for name, value in environment.items() if name.startswith(_CARRIED) or name in chosen}
    lines = []
    for rank, node in enumerate(plan.nodes):
        settings = dict(carried)
        if node.visible is not None:
            settings["CUDA_VISIBLE_DEVICES"] = node.visible
        on_cpu = all(device == "cpu" for device in node.devices)
        kind = {"script": [], "module": ["--module"], "program": ["--no-python"]}[plan.command.kind]
        words = [sys.executable, "-m", "trilithon.cli.launch", "--nproc", str(len(node.devices))]
        words += ["--num-nodes", str(len(plan.nodes)), "--node-rank", str(rank), "--master-addr", plan.master_addr]
        words += ["--master-port", str(plan.master_port or DEFAULT_PORT), "--stop-with-stdin"]
        words += ["--grace", f"{plan.grace_s:g}"]
        words += ["--local-rank"] if plan.command.local_rank else []
        words += (["--device", "cpu"] if on_cpu else []) + kind + [plan.command.target, *plan.command.args]
        assigned = [f"{name}={value}" for name, value in settings.items()]
        lines.append(f"cd {shlex.quote(folder)} && exec {shlex.join(['env', *assigned, *words])}")
    return lines


def run_over_ssh(plan: Plan, ssh: Sequence[str] = DEFAULT_SSH, exported: Sequence[str] = ()) -> int:
    """Start every node, wait, and return the first failing node's exit status (0 when all ended well).

    exported: variables of this environment that the nodes get too.

    Raises LaunchError if the ssh program cannot be started. 128 + n after signal n.
    """
    lines = node_commands(plan, os.environ, os.getcwd(), exported)
    nodes: list[subprocess.Popen[bytes]] = []
    stopped: list[int] = []
    wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.signal(number, lambda n, _: stopped.append(n)) for number in wanted}
    try:
        for node, line in zip(plan.nodes, lines, strict=True):
            try:
                command = [*ssh, node.host, line]
                nodes.append(subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True))
            except OSError as error:
                raise LaunchError(
                    f"{ssh[0]} could not be started: {error.strerror}. Install it or give --ssh-command."
                ) from None
        while not stopped:
            statuses = [process.poll() for process in nodes]
            failed = next((status for status in statuses if status), None)
            if failed is not None:
                return 128 - failed if failed < 0 else failed
            if all(status == 0 for status in statuses):
                return 0
            time.sleep(0.1)
        return 128 + stopped[0]
    finally:
        _end(nodes, plan.grace_s + _END_WITHIN_S)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def stop_with_stdin() -> None:
    """Watch standard input from a thread; when it closes, this process gets SIGTERM (and ends its ranks).

    The ranks get an empty standard input instead of this one.
    """
    watched = os.dup(0)
    os.set_inheritable(watched, False)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)

    def watch() -> None:
        while os.read(watched, 4096):
            continue
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="stop-with-stdin", daemon=True).start()


def _end(nodes: Sequence[subprocess.Popen[bytes]], within_s: float) -> None:
    for process in nodes:
        if process.stdin is not None:
            process.stdin.close()  # the remote agent sees the end of its input and stops
    deadline = time.monotonic() + within_s
    for process in nodes:
        try:
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=3.0)
