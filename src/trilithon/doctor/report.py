"""The report as text for people and as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from trilithon.doctor.examine import Report
from trilithon.doctor.findings import human_bytes

_COMPILERS = ("c++", "g++", "gcc", "clang", "nvcc")


def as_json(report: Report) -> str:
    """One JSON object: the facts by section, `findings`, `can_train`."""
    findings = [{"level": f.level, "what": f.what, "way_out": f.way_out} for f in report.findings]
    return json.dumps({**report.facts, "findings": findings, "can_train": report.can_train}, indent=1)


def as_text(report: Report) -> str:
    """One fact a line, then the findings with their ways out."""
    rows = list(_rows(report.facts))
    width = max(len(name) for name, _ in rows)
    lines = [f"{name.ljust(width)}  {value}" for name, value in rows]
    lines.append("")
    for finding in report.findings:
        lines.append(f"{finding.level}: {finding.what}. Way out: {finding.way_out}.")
    if not report.findings:
        lines.append("nothing to complain about")
    lines.append("training is possible" if report.can_train else "training is NOT possible until the errors are mended")
    return "\n".join(lines)


def _rows(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, version in facts["versions"].items():
        yield name, version or "not installed"
    compilers = [name for name in _COMPILERS if facts["tools"][name]]
    yield "compiler", f"{', '.join(compilers) or 'none'} (not needed)"
    yield "machine", f"{facts['system']['platform']}, {facts['system']['cores']} cores"
    memory = facts["memory"]
    limit = "" if memory["limit_bytes"] is None else f", container limit {human_bytes(memory['limit_bytes'])}"
    available = f"{human_bytes(memory['available_bytes'])} of {human_bytes(memory['total_bytes'])} available"
    yield "host memory", available + limit
    shm = facts["shared_memory"]
    yield "/dev/shm", "absent" if shm is None else f"{human_bytes(shm['free_bytes'])} free"
    yield "cache folder", f"{facts['cache']['folder']}, {human_bytes(facts['cache']['free_bytes'])} free"
    yield "current folder", f"{human_bytes(facts['here']['free_bytes'])} free"
    yield from _torch_rows(facts["torch"])
    yield from _bandwidth_rows(facts.get("bandwidth", {}))


def _torch_rows(torch: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if "trouble" in torch:
        yield "torch", torch["trouble"]
        return
    yield "backends", ", ".join(name for name, there in torch["backends"].items() if there) or "none"
    yield "processor", f"{torch['cpu']['vector_instructions']}, {torch['cpu']['threads']} threads"
    for device in torch["devices"]:
        room = f"{human_bytes(device['free_bytes'])} of {human_bytes(device['total_bytes'])} free"
        yield f"cuda:{device['index']}", f"{device['name']}, {room}"
    if not torch["devices"]:
        yield "accelerators", "none"
    for name, path in torch["kernels"].items():
        yield f"kernel {name}", f"{path['cpu']} on CPU (of {', '.join(path['implementations'])})"


def _bandwidth_rows(measured: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if "memory_copy" in measured:
        yield "memory copy", f"{_rate(measured['memory_copy']['bytes_per_s'])}"
    ranks = measured.get("two_ranks", {})
    if "all_gather_bytes_per_s" in ranks:
        yield "two ranks, all-gather", f"{_rate(ranks['all_gather_bytes_per_s'])} sent per rank"
        yield "two ranks, reduce-scatter", f"{_rate(ranks['reduce_scatter_bytes_per_s'])} sent per rank"
    disk = measured.get("disk", {})
    if "write_bytes_per_s" in disk:
        yield "disk", f"writes {_rate(disk['write_bytes_per_s'])}, reads {_rate(disk['read_bytes_per_s'])}"


def _rate(bytes_per_s: float) -> str:
    return f"{human_bytes(bytes_per_s)}/s"
