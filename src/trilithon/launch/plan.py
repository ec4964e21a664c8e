"""The plan of a launch: which process runs where, on which device, with which environment. Pure and torch-free.

Ranks follow the order of nodes, then of devices on a node. A machine is one *node*; the launcher on each node starts
that node's processes and meets the others at `master_addr:master_port`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trilithon.errors import ConfigError
from trilithon.launch.devices import (
    VISIBLE,
    Assignment,
    DeviceKind,
    LocalMachine,
    assign,
    check_filter,
    filter_base,
    this_machine,
)
from trilithon.launch.hosts import Host, parse_filter, read_host_file, select
from trilithon.launch.slurm import SlurmJob, slurm_job

DEFAULT_PORT = 29500
DEFAULT_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class Command:
    """What every rank runs: a Python script, a module (as `python -m` would) or a program."""

    kind: Literal["script", "module", "program"]
    target: str
    args: tuple[str, ...] = ()
    local_rank: bool = False  # --local_rank=N follows the arguments, for scripts that read it there

    def words(self, local_rank: int | None = None) -> list[str]:
        """The command as it would be typed without a launcher, on one rank or (None) without saying on which."""
        args = self.args if local_rank is None else self.args_of(local_rank)
        if self.kind == "program":
            return [self.target, *args]
        return [sys.executable, *(["-m"] if self.kind == "module" else []), self.target, *args]

    def args_of(self, local_rank: int) -> tuple[str, ...]:
        return (*self.args, f"--local_rank={local_rank}") if self.local_rank else self.args


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """What the user asked for; None means not given."""

    command: Command
    nproc: int | None = None
    host_file: Path | None = None
    include: str | None = None
    exclude: str | None = None
    num_nodes: int | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    device: DeviceKind = "auto"
    max_restarts: int = 0
    grace_s: float = DEFAULT_GRACE_S
    ssh: bool = False


@dataclass(frozen=True, slots=True)
class Node:
    """One machine and the device of each of its processes, in order of local rank."""

    host: str
    devices: tuple[str, ...]
    visible: str | None  # CUDA_VISIBLE_DEVICES for its processes; None leaves the variable alone


@dataclass(frozen=True, slots=True)
class Process:
    """One row of the process table. `environment` holds what the launcher adds."""

    host: str
    rank: int
    local_rank: int
    device: str
    environment: dict[str, str]
    command: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Who runs where. `node_rank` is this machine's place; None when it only starts others over ssh."""

    nodes: tuple[Node, ...]
    node_rank: int | None
    master_addr: str
    master_port: int | None  # None: a free port is taken at the start (one node only)
    command: Command
    max_restarts: int = 0
    grace_s: float = DEFAULT_GRACE_S  # that ranks have to end by themselves once the launcher is asked to stop
    threads: int | None = None  # OMP_NUM_THREADS on this machine, unless the environment sets it

    @property
    def world_size(self) -> int:
        return sum(len(node.devices) for node in self.nodes)

    def processes(self) -> list[Process]:
        """Every process of every node, in order of rank."""
        rows: list[Process] = []
        for place, node in enumerate(self.nodes):
            for local_rank, device in enumerate(node.devices):
                environment = {
                    "RANK": str(len(rows)),
                    "LOCAL_RANK": str(local_rank),
                    "WORLD_SIZE": str(self.world_size),
                    "LOCAL_WORLD_SIZE": str(len(node.devices)),
                    "MASTER_ADDR": self.master_addr,
                    "MASTER_PORT": "free" if self.master_port is None else str(self.master_port),
                    **self.added_environment(place),
                }
                command = tuple(self.command.words(local_rank))
                rows.append(Process(node.host, len(rows), local_rank, device, environment, command))
        return rows

    def added_environment(self, node_rank: int) -> dict[str, str]:
        """What the processes of one node get besides ranks and addresses."""
        visible = self.nodes[node_rank].visible
        added = {} if visible is None else {VISIBLE: visible}
        if self.threads is not None and node_rank == self.node_rank:
            added["OMP_NUM_THREADS"] = str(self.threads)
        return added


def make_plan(options: LaunchOptions, environment: Mapping[str, str], machine: LocalMachine | None = None) -> Plan:
    """Settle who runs where. Raises ConfigError for settings that are wrong or contradict each other."""
    machine = machine or this_machine()
    _check_options(options)
    slurm = slurm_job(environment)
    if options.host_file is not None:
        nodes, node_rank = _from_host_file(options, environment, machine, slurm)
    else:
        nodes, node_rank = _without_host_file(options, environment, machine, slurm)
    several = len(nodes) > 1
    port = options.master_port
    if port is None and several:
        port = DEFAULT_PORT if slurm is None else slurm.master_port
    address = options.master_addr or (nodes[0].host if several else "127.0.0.1")
    threads = None
    if node_rank is not None and "OMP_NUM_THREADS" not in environment:
        threads = max(1, machine.cores // len(nodes[node_rank].devices))
    return Plan(nodes, node_rank, address, port, options.command, options.max_restarts, options.grace_s, threads)


def _check_options(options: LaunchOptions) -> None:
    filtered = "--include" if options.include is not None else "--exclude" if options.exclude is not None else None
    if options.nproc is not None and options.nproc < 1:
        raise ConfigError(f"--nproc {options.nproc} starts nothing. Use at least 1.")
    if options.nproc is not None and filtered:
        raise ConfigError(f"--nproc and {filtered} both choose processes. Keep one of them.")
    if options.nproc is not None and options.host_file is not None:
        raise ConfigError("--nproc and --host-file both say how many processes run. Write slots=N in the host file.")
    if options.num_nodes is not None and options.host_file is not None:
        raise ConfigError("--num-nodes and --host-file both say how many machines run. Use --include to choose hosts.")
    if options.num_nodes is not None and options.num_nodes < 1:
        raise ConfigError(f"--num-nodes {options.num_nodes} starts nothing. Use at least 1.")
    if options.ssh and options.host_file is None:
        raise ConfigError("--ssh starts the machines of a host file. Add --host-file FILE.")
    if options.ssh and options.node_rank is not None:
        raise ConfigError("--ssh starts every node and --node-rank only this one. Keep one of them.")
    if options.ssh and options.max_restarts:
        raise ConfigError("--ssh ends all nodes when one fails, so --max-restarts has no effect. Leave one out.")
    if not 0 < options.grace_s < 86400:
        raise ConfigError(f"--grace {options.grace_s:g}: give the seconds that ranks have to save and end, such as 60.")
    if options.max_restarts < 0:
        raise ConfigError(f"--max-restarts {options.max_restarts} is negative. Use 0 or more.")
    if options.master_port is not None and not 0 < options.master_port < 65536:
        raise ConfigError(f"--master-port {options.master_port} is not a port. Use 1024 to 65535.")


def _from_host_file(
    options: LaunchOptions, environment: Mapping[str, str], machine: LocalMachine, slurm: SlurmJob | None
) -> tuple[tuple[Node, ...], int | None]:
    assert options.host_file is not None
    if slurm is not None and len(slurm.nodes) > 1:
        raise ConfigError(
            f"--host-file {options.host_file} was given inside a SLURM step of {len(slurm.nodes)} nodes. Leave the "
            "host file out (SLURM's node list is used), or start outside srun."
        )
    listed = read_host_file(options.host_file)
    hosts = select(listed, options.include, options.exclude)
    filtered = options.include is not None or options.exclude is not None
    here = _place_of_this_machine(hosts, options, machine)
    nodes = []
    for place, host in enumerate(hosts):
        chosen = len(host.slots) if not filtered else None
        if place == here or (options.ssh and host.name in machine.names):
            given = assign(
                host.name,
                count=chosen,
                indices=host.slots if filtered else None,
                kind=options.device,
                environment=environment,
                machine=machine,
            )
        else:
            given = _elsewhere(host, filtered, options.device)
        nodes.append(Node(host.name, given.devices, given.visible))
    return tuple(nodes), here


def _place_of_this_machine(hosts: list[Host], options: LaunchOptions, machine: LocalMachine) -> int | None:
    if options.ssh:
        return None
    if options.node_rank is not None:
        if not 0 <= options.node_rank < len(hosts):
            raise ConfigError(
                f"--node-rank {options.node_rank} does not fit {len(hosts)} hosts. Use 0 to {len(hosts) - 1}."
            )
        return options.node_rank
    if len(hosts) > 1:
        raise ConfigError(
            f"{options.host_file} names {len(hosts)} hosts ({', '.join(host.name for host in hosts)}). Add --ssh to "
            "start them all from here, or run the same command with --node-rank 0, 1, ... on each of them."
        )
    if hosts[0].name not in machine.names:
        raise ConfigError(
            f"the only host is {hosts[0].name} and this machine is {_own_name(machine)}. Add --ssh to start there, or "
            "--node-rank 0 if this is that machine under another name."
        )
    return 0


def _without_host_file(
    options: LaunchOptions, environment: Mapping[str, str], machine: LocalMachine, slurm: SlurmJob | None
) -> tuple[tuple[Node, ...], int]:
    name, indices = "localhost", None
    if options.include is not None or options.exclude is not None:
        name, indices = _filtered_locally(options, environment, machine)
    given = assign(
        name, count=options.nproc, indices=indices, kind=options.device, environment=environment, machine=machine
    )
    if options.num_nodes is not None:
        if options.num_nodes > 1 and options.node_rank is None:
            raise ConfigError(f"--num-nodes {options.num_nodes} needs --node-rank, 0 on the first machine.")
        if options.num_nodes > 1 and options.master_addr is None:
            raise ConfigError(f"--num-nodes {options.num_nodes} needs --master-addr, the first machine's address.")
        hosts, here = [f"node-{place}" for place in range(options.num_nodes)], options.node_rank or 0
    elif options.node_rank:
        raise ConfigError(f"--node-rank {options.node_rank} needs --num-nodes or --host-file.")
    elif slurm is not None and len(slurm.nodes) > 1:
        hosts, here = list(slurm.nodes), slurm.node_rank
    else:
        hosts, here = [name], 0
    if not 0 <= here < len(hosts):
        raise ConfigError(f"--node-rank {here} does not fit {len(hosts)} nodes. Use 0 to {len(hosts) - 1}.")
    return tuple(Node(host, given.devices, given.visible) for host in hosts), here


def _filtered_locally(
    options: LaunchOptions, environment: Mapping[str, str], machine: LocalMachine
) -> tuple[str, tuple[int, ...]]:
    option, text = ("--include", options.include) if options.include is not None else ("--exclude", options.exclude)
    assert text is not None
    named = parse_filter(text, option)
    name = next((host for host in named if host in machine.names), "localhost")
    for host, slots in named.items():
        if host in machine.names:
            check_filter(option, slots or (), environment)
    chosen = select([Host(name, filter_base(environment, machine))], options.include, options.exclude)
    return name, chosen[0].slots


def _elsewhere(host: Host, filtered: bool, kind: DeviceKind) -> Assignment:
    if kind == "cpu":
        return Assignment(("cpu",) * len(host.slots), "")
    devices = tuple(str(slot) for slot in host.slots)
    return Assignment(devices, ",".join(devices) if filtered else None)


def _own_name(machine: LocalMachine) -> str:
    return max(machine.names - {"localhost", "127.0.0.1", "::1"}, key=len, default="localhost")
