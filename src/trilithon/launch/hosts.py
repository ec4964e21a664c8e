"""Host files and the filters that choose hosts and slots from them.

A host file names one machine a line with the number of processes it takes; `#` starts a comment:

    worker-1 slots=4
    [fe80::1] slots=2     # an IPv6 address, with or without brackets

A filter is `NAME[:SLOT[,SLOT...]]`, several joined by `@`: `worker-1:0,2@worker-2`. Every fault of a file is reported
at once, each with file name and line number.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trilithon.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?\Z")


@dataclass(frozen=True, slots=True)
class Host:
    """One machine and the slots (device indices) processes may take on it, in ascending order."""

    name: str
    slots: tuple[int, ...]
    line: int | None = None  # where the host file names it


def read_host_file(path: Path | str) -> list[Host]:
    """The hosts a file names, in its order. Raises ConfigError if it is missing, unreadable, empty or malformed."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"host file {path} does not exist. Write one line `name slots=N` per machine.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"host file {path} is not UTF-8 text (byte {error.start}). Save it as plain text.") from None
    except OSError as error:
        raise ConfigError(f"host file {path} cannot be read: {error.strerror}. Name a readable file.") from None
    return parse_host_file(text, str(path))


def parse_host_file(text: str, source: str) -> list[Host]:
    """The hosts `text` names; `source` is the file name shown in errors. Raises ConfigError that lists every fault."""
    hosts: dict[str, Host] = {}
    faults: list[str] = []
    for number, raw in enumerate(text.splitlines(), start=1):
        fields = raw.split("#", 1)[0].split()
        if not fields:
            continue
        try:
            host = _host(fields, number)
            if host.name in hosts:
                raise ValueError(f"{host.name} is already on line {hosts[host.name].line}; merge the two lines")
            hosts[host.name] = host
        except ValueError as fault:
            faults.append(f"{source}, line {number}: {fault}")
    if faults:
        raise ConfigError("\n".join(faults))
    if not hosts:
        raise ConfigError(f"{source}: names no host. Write one line `name slots=N` per machine.")
    return list(hosts.values())


def parse_filter(text: str, option: str) -> dict[str, tuple[int, ...] | None]:
    """`worker-1:0,2@worker-2` -> {"worker-1": (0, 2), "worker-2": None}; None stands for every slot.

    An IPv6 address needs brackets here. `option` is the flag shown in errors. Raises ConfigError.
    """
    chosen: dict[str, tuple[int, ...] | None] = {}
    for part in text.split("@"):
        matched = re.fullmatch(r"\s*(\[[^\]]+\]|[^:\s]+)\s*(?::(.*))?", part)
        if matched is None:
            raise ConfigError(f"{option} {text!r}: {part!r} is not NAME or NAME:SLOT,SLOT. Write host-1:0,2@host-2.")
        try:
            name = host_name(matched[1])
            slots = None if matched[2] is None else _slot_list(matched[2])
        except ValueError as fault:
            raise ConfigError(f"{option} {text!r}: {fault}.") from None
        if name in chosen:
            raise ConfigError(f"{option} {text!r}: {name} appears twice. List its slots once, as {name}:0,1.")
        chosen[name] = slots
    return chosen


def select(hosts: Sequence[Host], include: str | None, exclude: str | None) -> list[Host]:
    """The hosts and slots that a filter leaves, in the order of `hosts`.

    Raises ConfigError when both filters are given, when one names a host or slot that is not there, or when nothing
    is left.
    """
    if include is not None and exclude is not None:
        raise ConfigError(
            f"--include {include!r} and --exclude {exclude!r} were both given. Keep one of them: "
            "--include names what runs, --exclude names what does not."
        )
    text = include if include is not None else exclude
    if text is None:
        return list(hosts)
    option = "--include" if include is not None else "--exclude"
    wanted = parse_filter(text, option)
    _check_known(hosts, wanted, option, text)
    left: list[Host] = []
    for host in hosts:
        named = wanted.get(host.name, ()) if host.name in wanted else ()
        named = host.slots if named is None else named
        slots = tuple(s for s in host.slots if (s in named) == (include is not None))
        if slots:
            left.append(Host(host.name, slots, host.line))
    if not left:
        raise ConfigError(f"{option} {text!r} leaves no slot to run on. Hosts and slots: {_listing(hosts)}.")
    return left


def host_name(text: str) -> str:
    """A host name or IP address without brackets. Raises ValueError with the reason."""
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if ":" in bare or bare is not text:
        try:
            return str(ipaddress.IPv6Address(bare))
        except ValueError:
            raise ValueError(f"{text!r} is not an IPv6 address, and host names hold no colon or bracket") from None
    if not _NAME.match(bare):
        raise ValueError(f"{text!r} is not a host name (letters, digits, dot, dash and underscore)")
    return bare


def _host(fields: Sequence[str], line: int) -> Host:
    if fields[0].startswith("slots="):
        raise ValueError(f"the host name is missing before {fields[0]!r}; write `name {fields[0]}`")
    name = host_name(fields[0])
    if len(fields) == 1:
        raise ValueError(f"slots are missing for {name}; write `{name} slots=N`")
    if len(fields) > 2:
        raise ValueError(f"unexpected {' '.join(fields[2:])!r} after {fields[1]!r}; a line is `name slots=N` only")
    matched = re.fullmatch(r"slots=(.*)", fields[1])
    if matched is None:
        raise ValueError(f"{fields[1]!r} is not slots=N; write `{name} slots=N`")
    if not re.fullmatch(r"[0-9]+", matched[1]):
        raise ValueError(f"slots={matched[1]} is not a whole number; write `{name} slots=N` with N of at least 1")
    count = int(matched[1])
    if count < 1:
        raise ValueError(f"slots=0 gives {name} nothing to run; write at least 1 or delete the line")
    if count > 1024:
        raise ValueError(f"slots={count} on {name} is beyond 1024 processes a machine; correct the number")
    return Host(name, tuple(range(count)), line)


def _slot_list(text: str) -> tuple[int, ...]:
    slots: list[int] = []
    for item in text.split(","):
        if not re.fullmatch(r"\s*[0-9]+\s*", item):
            raise ValueError(f"{item.strip()!r} is not a slot number; write slots as 0,2")
        if int(item) in slots:
            raise ValueError(f"slot {int(item)} appears twice; list each slot once")
        slots.append(int(item))
    return tuple(sorted(slots))


def _check_known(hosts: Sequence[Host], wanted: dict[str, tuple[int, ...] | None], option: str, text: str) -> None:
    known = {host.name: host for host in hosts}
    for name, slots in wanted.items():
        if name not in known:
            raise ConfigError(
                f"{option} {text!r} names {name}, which is not there. Hosts and slots: {_listing(hosts)}."
            )
        absent = [s for s in slots or () if s not in known[name].slots]
        if absent:
            raise ConfigError(
                f"{option} {text!r} names slot {absent[0]} of {name}, which is not there. "
                f"Hosts and slots: {_listing(hosts)}."
            )


def _listing(hosts: Sequence[Host]) -> str:
    return ", ".join(f"{host.name}:{','.join(map(str, host.slots))}" for host in hosts)
