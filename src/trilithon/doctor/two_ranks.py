"""The body of the two-rank measurement: `python -m trilithon.doctor.two_ranks ANSWER.json` on each rank."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from trilithon.comm.collectives import Group
from trilithon.comm.mesh import init_distributed
from trilithon.contracts import Handle, Tag

NUMEL = 4 * 2**20  # 16 MiB of fp32 in the whole buffer


def main() -> None:
    torch.set_num_threads(1)
    init_distributed("gloo", timeout_s=10.0)
    group = Group(dist.group.WORLD, name="doctor")
    full, shard = torch.ones(NUMEL), torch.ones(NUMEL // group.world_size)
    gather = _best(lambda tag: group.all_gather(full, shard, tag), group, "all_gather")
    reduce = _best(lambda tag: group.reduce_scatter(full, shard, tag), group, "reduce_scatter")
    if not bool((shard == float(group.world_size)).all()):
        raise ArithmeticError(f"reduce-scatter of ones over {group.world_size} ranks gave {shard[0].item()}")
    sent = 4 * NUMEL // group.world_size * (group.world_size - 1)  # bytes per rank and call, either collective
    if group.rank == 0:
        rows = {"all_gather_bytes_per_s": sent / gather, "reduce_scatter_bytes_per_s": sent / reduce, "bytes": sent}
        Path(sys.argv[1]).write_text(json.dumps(rows), encoding="utf-8")
    dist.destroy_process_group()


def _best(call: Callable[[Tag], Handle], group: Group, what: str) -> float:
    best = float("inf")
    for step in range(4):
        tag = Tag(module=f"doctor.{what}", step=step)
        group.barrier(tag)
        start = time.perf_counter()
        call(tag).wait()
        best = min(best, time.perf_counter() - start)
    return best


if __name__ == "__main__":
    main()
