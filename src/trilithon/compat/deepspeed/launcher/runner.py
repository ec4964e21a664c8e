"""`deepspeed` and `deepspeed.launcher.runner`: DeepSpeed's command, which becomes `trilithon launch`."""

from __future__ import annotations

import base64
import json
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from trilithon.compat.deepspeed.stand_in import environment
from trilithon.errors import ConfigError
from trilithon.launch import Host, read_host_file, select
from trilithon.launch.deepspeed import environment_file, native_arguments


def fetch_hostfile(hostfile_path: str) -> OrderedDict[str, int] | None:
    """Machine -> slots, in the order of the file; None if there is no file. Raises ValueError for a bad one."""
    if not Path(hostfile_path).is_file():
        return None
    return OrderedDict((host.name, len(host.slots)) for host in read_host_file(hostfile_path))


def parse_resource_filter(
    host_info: Mapping[str, Sequence[int]], include_str: str = "", exclude_str: str = ""
) -> OrderedDict[str, list[int]]:
    """What a filter leaves of machine -> slots. Raises ValueError for a wrong filter, and when nothing is left."""
    hosts = [Host(name, tuple(slots)) for name, slots in host_info.items()]
    left = select(hosts, include_str or None, exclude_str or None)
    return OrderedDict((host.name, list(host.slots)) for host in left)


def parse_inclusion_exclusion(
    resource_pool: Mapping[str, int], inclusion: str, exclusion: str
) -> OrderedDict[str, list[int]]:
    """As `parse_resource_filter`, from machine -> number of slots."""
    return parse_resource_filter({name: range(count) for name, count in resource_pool.items()}, inclusion, exclusion)


def encode_world_info(world_info: Mapping[str, Sequence[int]]) -> str:
    """Machine -> slots as it travels between processes: JSON in urlsafe base64."""
    return base64.urlsafe_b64encode(json.dumps(world_info).encode()).decode()


def become(asked: Callable[[], tuple[list[str], list[int] | None]]) -> None:
    """Never returns: `trilithon launch` with these words on these devices. Exits with 2 where they are wrong."""
    try:
        words, slots = asked()
    except ConfigError as error:
        print(f"deepspeed: {error}", file=sys.stderr)
        sys.exit(2)
    sys.stdout.flush()
    visible = {} if slots is None else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, slots))}
    run = [sys.executable, "-m", "trilithon.cli.launch", *words]
    os.execve(sys.executable, run, {**os.environ, **environment_file(), **environment(), **visible})


def main(args: Sequence[str] | None = None) -> None:
    """Never returns: the process becomes `trilithon launch`."""
    become(lambda: (native_arguments(list(sys.argv[1:] if args is None else args)), None))


if __name__ == "__main__":
    main()
