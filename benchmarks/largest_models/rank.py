"""One rank, a process of its own with a hard limit of memory: build the model, train some steps, say how it went.

    python rank.py '{"system": ..., "shape": {...}, "rank": 0, ...}'

The limit is RLIMIT_DATA, set before anything is imported: it counts what the process allocates for itself, heap and
private writable mappings, whether touched or not. Shared libraries' code and the page cache of files are not counted,
and no system here shares memory between its ranks. The last line of standard output is a JSON object.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any


def status(line: str) -> int:
    """Bytes that /proc/self/status gives for VmHWM (peak of resident memory) or VmData."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(found.split()[1]) * 1024 for found in lines if found.startswith(line)), 0)


def run(order: dict[str, Any]) -> dict[str, Any]:
    """Seconds of construction and of each step, losses, and peaks of memory."""
    import torch
    from side_by_side.shape import Shape
    from side_by_side.workload import batch

    from largest_models.systems import MAKERS, join

    torch.set_num_threads(1)
    shape = Shape(**order["shape"])
    began = time.perf_counter()
    join(order["rank"], order["world_size"], order["port"])
    step = MAKERS[order["system"]](shape, Path(order["folder"]))
    built, losses, seconds = time.perf_counter() - began, [], []
    for number in range(order["steps"]):
        began = time.perf_counter()
        losses.append(step(batch(shape, order["rank"], number)))
        seconds.append(round(time.perf_counter() - began, 2))
    return {
        "built_s": round(built, 2),
        "step_s": seconds,
        "losses": losses,
        "peak_resident_mib": status("VmHWM") >> 20,
        "data_mib": status("VmData") >> 20,
    }


def main() -> None:
    order = json.loads(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_DATA, (order["limit_bytes"],) * 2)
    sys.path[:0] = order["path"]
    try:
        answer = run(order)
    except BaseException as error:
        answer = {"error": f"{type(error).__name__}: {error}"[:600]}
    print("\n" + json.dumps(answer), flush=True)
    if "error" in answer:
        os._exit(1)  # peers may be waiting in a collective that this rank will not reach
    import torch.distributed as dist

    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
