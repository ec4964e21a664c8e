"""The process table of a plan, as text for people and as records for programs."""

from __future__ import annotations

import shlex
from typing import Any

from trilithon.launch.plan import Plan

_SHOWN = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")


def process_records(plan: Plan) -> list[dict[str, Any]]:
    """One record per process, in order of rank."""
    return [
        {
            "host": row.host,
            "rank": row.rank,
            "local_rank": row.local_rank,
            "device": row.device,
            "environment": row.environment,
            "command": list(row.command),
        }
        for row in plan.processes()
    ]


def process_table(plan: Plan) -> str:
    """One line per process, then what all of them share."""
    rows = [("host", "rank", "local rank", "device", "environment")]
    for row in plan.processes():
        shown = " ".join(f"{name}={row.environment[name]}" for name in _SHOWN if name in row.environment)
        rows.append((row.host, str(row.rank), str(row.local_rank), row.device, shown or "-"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    port = "a free port" if plan.master_port is None else str(plan.master_port)
    here = "" if plan.node_rank is None or len(plan.nodes) == 1 else f", this machine is node {plan.node_rank}"
    lines += [
        f"world size {plan.world_size} on {len(plan.nodes)} node{'s' * (len(plan.nodes) > 1)}{here}; "
        f"meeting at {plan.master_addr}, {port}; restarts {plan.max_restarts}",
        f"command: {shlex.join(plan.command.words())}",
    ]
    return "\n".join(lines)
