"""Which devices the processes of one machine use: accelerators present, CUDA_VISIBLE_DEVICES, filters, and conflicts.

A device index of a filter is the index CUDA gives the device when nothing is hidden. CUDA_VISIBLE_DEVICES is taken at
its word, also where no accelerator is found; what contradicts it is an error, never silently replaced.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trilithon.errors import ConfigError

CPU = "cpu"
VISIBLE = "CUDA_VISIBLE_DEVICES"

DeviceKind = Literal["auto", "cuda", "cpu"]


@dataclass(frozen=True, slots=True)
class LocalMachine:
    """This machine, as far as a plan needs it."""

    names: frozenset[str]
    accelerators: int
    cores: int


@dataclass(frozen=True, slots=True)
class Assignment:
    """One device per process, and the CUDA_VISIBLE_DEVICES to set (None leaves it as it is)."""

    devices: tuple[str, ...]
    visible: str | None


def this_machine() -> LocalMachine:
    """Names, accelerators and usable cores of this machine; asks the operating system only, no driver."""
    host = socket.gethostname()
    names = {"localhost", "127.0.0.1", "::1", host, host.split(".")[0]}
    return LocalMachine(frozenset(names), count_accelerators(), len(os.sched_getaffinity(0)))


def count_accelerators(folder: Path = Path("/dev")) -> int:
    """NVIDIA devices this machine (or container) was given, from their device files; no driver call, no context."""
    try:
        return sum(1 for entry in os.listdir(folder) if re.fullmatch(r"nvidia\d+", entry))
    except OSError:
        return 0


def visible_devices(environment: Mapping[str, str]) -> tuple[str, ...] | None:
    """CUDA_VISIBLE_DEVICES as entries; None when unset. As for CUDA, the list ends at the first -1.

    Raises ConfigError for empty entries and duplicates, with which CUDA would show other devices than written.
    """
    text = environment.get(VISIBLE)
    if text is None:
        return None
    if not text.strip():
        return ()
    entries = [entry.strip() for entry in text.split(",")]
    if "-1" in entries:
        entries = entries[: entries.index("-1")]
    if any(not entry for entry in entries) or len(set(entries)) != len(entries):
        raise ConfigError(f"{VISIBLE}={text!r} has an empty or repeated entry. Write each device once, as 0,1.")
    return tuple(entries)


def assign(
    host: str,
    *,
    count: int | None,
    indices: Sequence[int] | None,
    kind: DeviceKind,
    environment: Mapping[str, str],
    machine: LocalMachine,
) -> Assignment:
    """Devices for the processes on this machine.

    `indices` are devices a filter chose; otherwise `count` processes take the first visible devices (None: as many as
    are visible, or one process on a machine without accelerators). Raises ConfigError where the request does not fit
    what is there or visible.
    """
    if kind == "cpu":
        return Assignment((CPU,) * (len(indices) if indices is not None else count or 1), "")
    shown = visible_devices(environment)
    if indices is not None and not (kind == "cuda" and shown is None and machine.accelerators == 0):
        return _chosen(host, [str(index) for index in indices], shown, machine)
    there = shown if shown is not None else tuple(str(index) for index in range(machine.accelerators))
    if not there:
        if kind == "cuda":
            why = f"{VISIBLE}={environment[VISIBLE]!r} hides every device" if shown == () else "none was found"
            raise ConfigError(f"--device cuda on {host}, but {why}. Use --device cpu, or give it an accelerator.")
        return Assignment((CPU,) * (count or 1), None)
    if count is not None and count > len(there):
        because = f"{VISIBLE}={environment[VISIBLE]} shows" if shown is not None else "there are"
        raise ConfigError(
            f"{count} processes on {host}, but {because} {len(there)} device{'s' * (len(there) != 1)}. "
            f"Use {len(there)}, or --device cpu to run without accelerators."
        )
    taken = there[: count or len(there)]
    return Assignment(taken, ",".join(taken) if shown is not None else None)


def filter_base(environment: Mapping[str, str], machine: LocalMachine) -> tuple[int, ...]:
    """Device indices of this machine that a filter may choose from. Raises ConfigError if there are none to name."""
    shown = visible_devices(environment)
    if shown is None:
        if machine.accelerators == 0:
            raise ConfigError(
                "--include and --exclude choose accelerators by index, and this machine has none. Use --nproc N."
            )
        return tuple(range(machine.accelerators))
    if not shown:
        raise ConfigError(f"--include or --exclude with {VISIBLE}={environment[VISIBLE]!r}, which hides every device.")
    if not all(entry.isdigit() for entry in shown):
        raise ConfigError(
            f"--include and --exclude name devices by index, but {VISIBLE}={environment[VISIBLE]} names them "
            f"otherwise. Keep one of the two."
        )
    return tuple(sorted(int(entry) for entry in shown))


def check_filter(option: str, named: Sequence[int], environment: Mapping[str, str]) -> None:
    """Raises ConfigError when a filter names a device of this machine that CUDA_VISIBLE_DEVICES hides."""
    shown = visible_devices(environment)
    hidden = [index for index in named if shown is not None and str(index) not in shown]
    if hidden:
        raise ConfigError(
            f"{option} names device {hidden[0]}, but {VISIBLE}={environment[VISIBLE]} hides it. "
            f"Unset {VISIBLE} or leave the device out."
        )


def _chosen(host: str, chosen: list[str], shown: tuple[str, ...] | None, machine: LocalMachine) -> Assignment:
    if shown is not None:
        hidden = [device for device in chosen if device not in shown]
        if hidden:
            raise ConfigError(
                f"device {hidden[0]} of {host} was chosen, but {VISIBLE}={','.join(shown)} hides it. "
                f"Unset {VISIBLE} or choose among {', '.join(shown) or 'none'}."
            )
    elif machine.accelerators == 0:
        return Assignment((CPU,) * len(chosen), None)
    else:
        absent = [device for device in chosen if int(device) >= machine.accelerators]
        if absent:
            raise ConfigError(
                f"device {absent[0]} of {host} was chosen, but it has {machine.accelerators}. "
                f"Choose among 0 to {machine.accelerators - 1}."
            )
    return Assignment(tuple(chosen), ",".join(chosen))
