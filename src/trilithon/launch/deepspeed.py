"""`trilithon launch --deepspeed`: flags of DeepSpeed's launcher, as the same request in words of `trilithon launch`.

    native_arguments(["--num_gpus", "2", "train.py"])    # ["--deepspeed", "--nproc", "2", "--local-rank", "train.py"]

Free of torch, like everything here that runs before there are ranks.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from trilithon.errors import ConfigError
from trilithon.launch.devices import this_machine
from trilithon.launch.hosts import Host, read_host_file, select
from trilithon.launch.plan import DEFAULT_PORT

HOST_FILE = "/job/hostfile"
ENVIRONMENT_FILE = ".deepspeed_env"
_WITHOUT_COUNTERPART = {
    "autotuning": "`trilithon bench` measures settings.",
    "bind_cores_to_rank": "OMP_NUM_THREADS is set to this machine's share of cores; use taskset or srun to bind.",
    "bind_core_list": "Use taskset or srun to bind.",
    "save_pid": "Stop the launcher, which stops its ranks.",
    "venv_script": "Activate the environment before starting.",
    "launcher_args": "Use --ssh_port, or `trilithon launch --ssh-command`.",
}


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """DeepSpeed's own flags, then the script and what is the script's."""
    p = argparse.ArgumentParser(prog="deepspeed", description="Start a script on several processes or machines.")
    p.add_argument("-H", "--hostfile", default=HOST_FILE, help="one line `name slots=N` per machine")
    p.add_argument("-i", "--include", default="", help="only these: NAME[:SLOT[,SLOT...]][@NAME...]")
    p.add_argument("-e", "--exclude", default="", help="all but these, same form")
    p.add_argument("--num_nodes", type=int, default=-1, help="the first machines of the host file")
    p.add_argument("--min_elastic_nodes", type=int, default=-1, help=argparse.SUPPRESS)
    p.add_argument("--max_elastic_nodes", type=int, default=-1, help=argparse.SUPPRESS)
    p.add_argument("--num_gpus", "--num_accelerators", type=int, default=-1, help="processes on each machine")
    p.add_argument("--master_port", type=int, default=int(os.environ.get("DLTS_MASTER_PORT", DEFAULT_PORT)))
    p.add_argument("--master_addr", default="", help="where the machines meet")
    p.add_argument("--node_rank", type=int, default=-1, help="this machine's place, with --no_ssh")
    p.add_argument("--launcher", default="pdsh", help="pdsh (machines are started over ssh) or slurm")
    p.add_argument("--launcher_args", default="")
    p.add_argument("--module", action="store_true", help="the script is a module")
    p.add_argument("--no_python", action="store_true", help="the script is a program of its own")
    p.add_argument("--no_local_rank", action="store_true", help="do not append --local_rank=N")
    p.add_argument("--no_ssh", action="store_true", help="every machine runs this command by itself")
    p.add_argument("--no_ssh_check", action="store_true")
    p.add_argument("--force_multi", action="store_true", help="over ssh even for one machine")
    p.add_argument("--save_pid", action="store_true")
    p.add_argument("--enable_each_rank_log", default="None", help="folder for the output of each rank")
    p.add_argument("--autotuning", default="", choices=["tune", "run"], type=str)
    p.add_argument("--elastic_training", action="store_true", help=argparse.SUPPRESS)
    p.add_argument("--bind_cores_to_rank", action="store_true")
    p.add_argument("--bind_core_list", default=None)
    p.add_argument("--ssh_port", type=int, default=None)
    p.add_argument("--venv_script", default=None)
    p.add_argument("--log_level", default="info")
    p.add_argument("-q", "--quiet", action="store_true")
    p.add_argument("user_script", help="script, module or program")
    p.add_argument("user_args", nargs=argparse.REMAINDER)
    return p.parse_args(args)


def native_arguments(argv: Sequence[str], machine_names: frozenset[str] | None = None) -> list[str]:
    """The words after `trilithon launch` that do what `deepspeed ARGV...` asks for.

    Raises ConfigError (a ValueError) for flags without a counterpart or that contradict each other, and for a host file
    or filter that is wrong.
    """
    args = parse_args(argv)
    _refuse(args)
    names = machine_names if machine_names is not None else this_machine().names
    words = ["--deepspeed"]
    hosts = _hosts(args)
    words += _on_hosts(args, hosts, names) if hosts else _here(args)
    if args.master_addr:
        words += ["--master-addr", args.master_addr]
    if args.master_port != DEFAULT_PORT or any(word.startswith("--master_port") for word in argv):
        words += ["--master-port", str(args.master_port)]
    for name in exported():
        words += ["--export", name]
    return [*words, *_command(args), args.user_script, *args.user_args]


def parse_node_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags of the part of DeepSpeed's launcher that starts one machine's processes.

    world_info: machine -> slots, as JSON in urlsafe base64.
    """
    p = argparse.ArgumentParser(prog="deepspeed.launcher.launch")
    p.add_argument("--node_rank", type=int, default=0)
    p.add_argument("--master_addr", default="127.0.0.1")
    p.add_argument("--master_port", type=int, default=DEFAULT_PORT)
    p.add_argument("--world_info", default="None")
    p.add_argument("--module", action="store_true")
    p.add_argument("--no_python", action="store_true")
    p.add_argument("--no_local_rank", action="store_true")
    p.add_argument("training_script")
    p.add_argument("training_script_args", nargs=argparse.REMAINDER)
    return p.parse_args(args)


def node_arguments(args: argparse.Namespace) -> tuple[list[str], list[int]]:
    """(the words after `trilithon launch`, the slots of this machine). Raises ConfigError for a wrong world_info."""
    if args.world_info in ("None", ""):
        raise ConfigError("--world_info is missing: it says which slots each machine has.")
    world: dict[str, list[int]] = json.loads(base64.urlsafe_b64decode(args.world_info))
    if not 0 <= args.node_rank < len(world):
        raise ConfigError(f"--node_rank {args.node_rank} does not fit {len(world)} machines.")
    slots = list(world.values())[args.node_rank]
    words = ["--deepspeed", "--nproc", str(len(slots)), "--num-nodes", str(len(world))]
    words += ["--node-rank", str(args.node_rank), "--master-addr", args.master_addr]
    words += ["--master-port", str(args.master_port)]
    return [*words, *_command(args), args.training_script, *args.training_script_args], slots


def encode_world_info(world_info: Mapping[str, Sequence[int]]) -> str:
    """Machine -> slots as `node_arguments` reads them: JSON in urlsafe base64."""
    return base64.urlsafe_b64encode(json.dumps(world_info).encode()).decode()


def slots_by_host(path: str) -> dict[str, int] | None:
    """Machine -> slots, in the order of a host file; None if there is no file. Raises ValueError for a bad one."""
    if not Path(path).is_file():
        return None
    return OrderedDict((host.name, len(host.slots)) for host in read_host_file(path))


def filter_slots(
    host_info: Mapping[str, Sequence[int]], include_str: str = "", exclude_str: str = ""
) -> dict[str, list[int]]:
    """What a filter leaves of machine -> slots. Raises ValueError for a wrong filter, and when nothing is left."""
    hosts = [Host(name, tuple(slots)) for name, slots in host_info.items()]
    left = select(hosts, include_str or None, exclude_str or None)
    return OrderedDict((host.name, list(host.slots)) for host in left)


def filter_slot_counts(resource_pool: Mapping[str, int], inclusion: str, exclusion: str) -> dict[str, list[int]]:
    """As `filter_slots`, from machine -> number of slots."""
    return filter_slots({name: range(count) for name, count in resource_pool.items()}, inclusion, exclusion)


def main(args: Sequence[str] | None = None) -> None:
    """The `deepspeed` command. Never returns: the process becomes `trilithon launch`, or ends with 2."""
    _become(lambda: (native_arguments(list(sys.argv[1:] if args is None else args)), None))


def node_main(args: Sequence[str] | None = None) -> None:
    """The same for one machine's processes, on the devices that world_info gives it."""
    _become(lambda: node_arguments(parse_node_args(args)))


def _become(asked: Callable[[], tuple[list[str], list[int] | None]]) -> None:
    try:
        words, slots = asked()
    except ConfigError as error:
        print(f"deepspeed: {error}", file=sys.stderr)
        sys.exit(2)
    visible = {} if slots is None else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, slots))}
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", "trilithon.cli.launch", *words], {**os.environ, **visible})


def _command(args: argparse.Namespace) -> list[str]:
    return ["--module"] * args.module + ["--no-python"] * args.no_python + ["--local-rank"] * (not args.no_local_rank)


def _refuse(args: argparse.Namespace) -> None:
    for name, way in _WITHOUT_COUNTERPART.items():
        if getattr(args, name):
            raise ConfigError(f"--{name} has no counterpart here. {way}")
    if args.launcher not in ("pdsh", "slurm"):
        raise ConfigError(
            f"--launcher {args.launcher} has no counterpart here: machines are started over ssh, or by srun."
        )
    if args.elastic_training or args.min_elastic_nodes >= 0 or args.max_elastic_nodes >= 0:
        raise ConfigError("--elastic_training has no counterpart here: checkpoints load on any number of ranks.")
    if args.enable_each_rank_log not in ("None", None, ""):
        raise ConfigError("--enable_each_rank_log has no counterpart here: ranks write to the launcher's output.")
    if args.include and args.exclude:
        raise ConfigError(f"--include {args.include!r} and --exclude {args.exclude!r} exclude each other. Keep one.")
    if (args.include or args.exclude) and (args.num_nodes >= 0 or args.num_gpus >= 0):
        raise ConfigError("--num_nodes and --num_gpus do not go together with --include and --exclude.")


def _hosts(args: argparse.Namespace) -> list[Host]:
    """Machines and slots that are left of the host file; none without one."""
    if not Path(args.hostfile).is_file():
        return []
    hosts = select(read_host_file(args.hostfile), args.include or None, args.exclude or None)
    if args.num_nodes > 0:
        hosts = hosts[: args.num_nodes]
    if args.num_gpus > 0:
        short = [host.name for host in hosts if len(host.slots) < args.num_gpus]
        if short:
            raise ConfigError(f"--num_gpus {args.num_gpus}, but {short} have fewer slots in {args.hostfile}.")
        hosts = [Host(host.name, host.slots[: args.num_gpus], host.line) for host in hosts]
    return hosts


def _on_hosts(args: argparse.Namespace, hosts: Sequence[Host], names: frozenset[str]) -> Iterator[str]:
    yield from ("--host-file", args.hostfile)
    yield from ("--include", "@".join(f"{_bracketed(h.name)}:{','.join(map(str, h.slots))}" for h in hosts))
    if args.no_ssh or args.node_rank >= 0:
        if args.node_rank < 0 and len(hosts) > 1:
            raise ConfigError("--no_ssh with several machines needs --node_rank, 0 on the first one.")
        yield from ("--node-rank", str(max(args.node_rank, 0)))
    elif len(hosts) > 1 or args.force_multi or hosts[0].name not in names:
        yield "--ssh"
        if args.ssh_port is not None:
            yield from ("--ssh-command", f"ssh -o BatchMode=yes -p {args.ssh_port}")


def _here(args: argparse.Namespace) -> Iterator[str]:
    for flag, value in (("--include", args.include), ("--exclude", args.exclude)):
        if value:
            yield from (flag, value)
    if args.num_gpus > 0:
        yield from ("--nproc", str(args.num_gpus))
    if args.num_nodes > 1:
        yield from ("--num-nodes", str(args.num_nodes))
        if args.node_rank >= 0:
            yield from ("--node-rank", str(args.node_rank))


def _bracketed(name: str) -> str:
    return f"[{name}]" if ":" in name else name


def environment_file() -> dict[str, str]:
    """The KEY=VALUE lines of `.deepspeed_env` in the home folder or here, or of the file that DS_ENV_FILE names."""
    name = os.environ.get("DS_ENV_FILE", ENVIRONMENT_FILE)
    found: dict[str, str] = {}
    for path in (Path.home() / name, Path(name)):
        if path.is_file():
            lines = (line.strip() for line in path.read_text().splitlines())
            found.update(_assignments(line for line in lines if line and not line.startswith("#")))
    return found


def _assignments(lines: Iterator[str]) -> Mapping[str, str]:
    pairs = [line.partition("=") for line in lines]
    return {key.strip(): value.strip() for key, _, value in pairs}


def exported() -> list[str]:
    """Variables that every machine gets."""
    return sorted(environment_file())
