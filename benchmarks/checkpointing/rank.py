"""One rank of one system, in a process of its own: it waits for orders and answers with seconds.

An order is (what, folder). All ranks of a system meet before the clock starts; what counts is the slowest rank.
"""

from __future__ import annotations

import os
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


def serve(orders: Connection, system: str, layers: int, *, rank: int, world_size: int, port: int) -> None:
    """Answer orders until None comes. A failure is an answer {"error": traceback}, and the last one."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo", DS_ACCELERATOR="cpu",
    )  # fmt: skip
    try:
        import torch
        import torch.distributed as dist

        from checkpointing.systems import MAKERS

        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        subject = MAKERS[system](rank, world_size, layers)
        orders.send({})
        while (order := orders.recv()) is not None:
            what, folder = order
            dist.barrier()
            orders.send(_carry_out(subject, what, Path(folder)))
        dist.destroy_process_group()
    except Exception:
        orders.send({"error": traceback.format_exc()})


def _carry_out(subject: Any, what: str, folder: Path) -> dict[str, float | None]:
    began = time.perf_counter()
    if what != "async":
        getattr(subject, what)(folder)
        return {"seconds": time.perf_counter() - began}
    wait = subject.save_async(folder)
    blocked = time.perf_counter() - began
    if wait is None:
        return {"blocked": None, "seconds": None}
    wait()
    return {"blocked": blocked, "seconds": time.perf_counter() - began}
