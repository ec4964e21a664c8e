"""What the facts mean: errors make training impossible, warnings make it slow or fragile. Each has a way out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

GIB = 2**30
OLDEST_PYTHON, OLDEST_TORCH = (3, 11), (2, 13)
SMALL_SHM, SMALL_DISK, SMALL_MEMORY, FEW_FILES = 1 * GIB, 5 * GIB, 2 * GIB, 1024


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be."""

    level: Literal["error", "warning"]
    what: str
    way_out: str


def judge(facts: Mapping[str, Any]) -> list[Finding]:
    """Findings in the facts of `examine`, errors first."""
    findings = [*_versions(facts), *_torch(facts), *_resources(facts), *_bandwidth(facts)]
    return sorted(findings, key=lambda finding: finding.level != "error")


def _versions(facts: Mapping[str, Any]) -> Iterator[Finding]:
    python, torch = facts["versions"]["python"], facts["versions"]["torch"]
    if _numbers(python) < OLDEST_PYTHON:
        yield Finding("error", f"Python {python} is older than 3.11", "install Python 3.11 or newer")
    if torch is None:
        yield Finding("error", "torch is not installed", "pip install torch")
    elif _numbers(torch) < OLDEST_TORCH:
        yield Finding("error", f"torch {torch} is older than 2.13", "pip install 'torch>=2.13'")


def _torch(facts: Mapping[str, Any]) -> Iterator[Finding]:
    torch = facts["torch"]
    if "trouble" in torch:
        if facts["versions"]["torch"] is not None:
            yield Finding("error", f"torch cannot be imported: {torch['trouble']}", "reinstall torch")
        return
    if not torch["backends"]["gloo"]:
        yield Finding("warning", "this torch has no gloo, so only one rank can run on CPU", "install a torch with gloo")
    if facts["device_files"] and not torch["devices"]:
        yield Finding(
            "warning",
            f"{facts['device_files']} NVIDIA device files are here, but torch can use none of them",
            "install a torch built for CUDA, update the driver, or look at CUDA_VISIBLE_DEVICES",
        )
    if torch["devices"] and not torch["backends"]["nccl"]:
        yield Finding(
            "warning", "accelerators are here but no NCCL, so ranks talk over gloo", "install a torch with NCCL"
        )
    slower = sorted(
        name for name, path in torch["kernels"].items() if "numba" in path["implementations"] and path["cpu"] != "numba"
    )
    if slower:
        yield Finding(
            "warning",
            f"numba is not installed: {', '.join(slower)} take the plain torch path",
            "pip install 'trilithon[fast]'",
        )


def _resources(facts: Mapping[str, Any]) -> Iterator[Finding]:
    shm, memory = facts["shared_memory"], facts["memory"]
    if shm is None:
        yield Finding("warning", "/dev/shm is not there", "mount a tmpfs on /dev/shm: data-loader workers need it")
    elif (shm["total_bytes"] or 0) < SMALL_SHM:
        yield Finding(
            "warning",
            f"/dev/shm holds only {human_bytes(shm['total_bytes'])}: data-loader workers "
            "end with a bus error when it is full",
            "give the container more: docker run --shm-size=8g",
        )
    room = memory["limit_bytes"] or memory["available_bytes"]
    if room is not None and room < SMALL_MEMORY:
        yield Finding(
            "warning", f"{human_bytes(room)} of host memory to use", "free memory or raise the container's limit"
        )
    for place in ("cache", "here"):
        fact = facts[place]
        if fact["free_bytes"] is not None and fact["free_bytes"] < SMALL_DISK:
            yield Finding(
                "warning",
                f"{human_bytes(fact['free_bytes'])} free in {fact['folder']}",
                "free space before writing checkpoints or offloading",
            )
    if facts["limits"]["open_files"] < FEW_FILES:
        yield Finding(
            "warning", f"only {facts['limits']['open_files']} files may be open at once", "raise it: ulimit -n 4096"
        )
    if not facts["host_name_resolves"]:
        yield Finding(
            "warning",
            "this machine's name does not lead to an address, so gloo may choose a wrong interface",
            "add the name to /etc/hosts, or set GLOO_SOCKET_IFNAME (lo for one machine)",
        )


def _bandwidth(facts: Mapping[str, Any]) -> Iterator[Finding]:
    measured = facts.get("bandwidth", {})
    if "trouble" in measured.get("two_ranks", {}):
        told = measured["two_ranks"]["trouble"].splitlines()
        yield Finding(
            "warning",
            f"two ranks on this machine could not talk: {told[-1]}",
            "look at GLOO_SOCKET_IFNAME and at firewalls on the loopback interface",
        )
    if "trouble" in measured.get("disk", {}):
        yield Finding("warning", f"the disk test failed: {measured['disk']['trouble']}", "set XDG_CACHE_HOME elsewhere")


def human_bytes(count: float | None) -> str:
    """1536 -> '1.5 KiB'."""
    if count is None:
        return "unknown"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+", maxsplit=1)[0].split(".")[:2] if part.isdigit())
