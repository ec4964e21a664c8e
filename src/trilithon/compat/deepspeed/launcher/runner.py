"""`deepspeed.launcher.runner`: how programs read host files and filters, and the command."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path

from trilithon.launch import Host, read_host_file, select
from trilithon.launch.deepspeed import main


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


if __name__ == "__main__":
    main()
