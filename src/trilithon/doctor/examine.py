"""Collect every fact, then judge them."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trilithon.doctor import bandwidth as measure
from trilithon.doctor import machine
from trilithon.doctor.findings import Finding, judge
from trilithon.launch.devices import count_accelerators

LIMIT_S = 18.0  # what is left of it is what the two ranks may take; ending them takes up to 2 s more


@dataclass(frozen=True, slots=True)
class Report:
    """`facts` by section, in JSON's types; `findings`, errors first."""

    facts: dict[str, Any]
    findings: tuple[Finding, ...]

    @property
    def can_train(self) -> bool:
        return not any(finding.level == "error" for finding in self.findings)


def examine(*, bandwidth: bool = True) -> Report:
    """Look at this machine, for `LIMIT_S` at most and usually a few seconds. Never raises for what it finds."""
    start = time.monotonic()
    facts: dict[str, Any] = {
        "system": machine.system(),
        "versions": machine.versions(),
        "tools": machine.tools(),
        "memory": machine.host_memory(),
        "shared_memory": machine.space(Path("/dev/shm")) if Path("/dev/shm").is_dir() else None,
        "cache": machine.space(machine.cache_folder(os.environ)),
        "here": machine.space(Path.cwd()),
        "limits": machine.limits(),
        "host_name_resolves": machine.host_name_resolves(),
        "device_files": count_accelerators(),
    }
    try:
        from trilithon.doctor import torch_facts

        facts["torch"] = {
            "backends": torch_facts.backends(),
            "devices": torch_facts.devices(),
            "cpu": torch_facts.cpu(),
            "kernels": torch_facts.kernel_paths(),
        }
    except Exception as error:  # a broken installation raises anything, and the rest of the report helps to mend it
        facts["torch"] = {"trouble": f"{type(error).__name__}: {error}"}
    if bandwidth:
        facts["bandwidth"] = _measure(facts, start + LIMIT_S)
    facts["took_s"] = round(time.monotonic() - start, 2)
    return Report(facts, tuple(judge(facts)))


def _measure(facts: dict[str, Any], deadline: float) -> dict[str, Any]:
    measured: dict[str, Any] = {"disk": measure.disk(machine.cache_folder(os.environ))}
    if "trouble" not in facts["torch"]:
        measured["memory_copy"] = measure.memory_copy()
        if facts["torch"]["backends"]["gloo"]:
            measured["two_ranks"] = measure.two_ranks(max(1.0, deadline - time.monotonic()))
    return measured
