"""One host's part: trains the systems of an order in turn and, on rank 0, prints what each took, one JSON line each.

python -m slow_links.rank ORDER        (started by benchmarks/slow_link.py, on every host)
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slow_links.hosts import sent_on_the_wire
from slow_links.systems import Trainer, make, rule_of
from trilithon.models import GPTConfig

_CYCLE = {"zero_one_adam": 4}  # steps after which its communication repeats


def main() -> None:
    order = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=order["limit_s"]))
    if order["total_steps"]:
        whole_runs(order)
    else:
        turns(order)
    dist.barrier()


def turns(order: dict[str, Any]) -> None:
    """All systems stay alive and are stepped in turn, after their warm-up."""
    shape = GPTConfig(**order["shape"])
    trainers: dict[str, Trainer] = {}
    for name in order["systems"]:
        trainers[name] = make(name, shape, order["rows"])
        for step in range(order["warm_up"]):
            trainers[name].step(tokens(order, step))
    for turn in range(order["rounds"]):
        for name, trainer in trainers.items():
            steps = max(order["steps"], _CYCLE.get(name, 1))
            measured = measure(trainer, order, range(turn * steps, (turn + 1) * steps))
            say({"system": name, "turn": turn, **{key: value / steps for key, value in measured.items() if value}})
    for trainer in trainers.values():
        trainer.close()


def whole_runs(order: dict[str, Any]) -> None:
    """Each system from its first step to its last, warm-up included."""
    total = order["total_steps"]
    for name in order["systems"]:
        section = rule_of(name, max(round(order["shares"].get(name, 0.0) * total), 1))
        trainer = make(name, GPTConfig(**order["shape"]), order["rows"], section)
        measured = measure(trainer, order, range(total))
        say({"system": name, "warm_up_share": order["shares"].get(name), **measured})
        trainer.close()


def measure(trainer: Trainer, order: dict[str, Any], steps: range) -> dict[str, float | None]:
    """Seconds, bytes on the wire and bytes of the ledger of these steps."""
    dist.barrier()
    wire, ledger, begin = sent_on_the_wire(), trainer.ledger(), time.perf_counter()
    for step in steps:
        trainer.step(tokens(order, step))
    seconds = time.perf_counter() - begin
    dist.barrier()
    counted = trainer.ledger()
    return {
        "seconds": seconds,
        "wire_bytes": sent_on_the_wire() - wire,
        "ledger_bytes": counted - ledger if counted is not None and ledger is not None else None,
    }


def tokens(order: dict[str, Any], step: int) -> Tensor:
    """This rank's batch; all systems see the same."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    size = (order["rows"], order["shape"]["context"] + 1)
    return torch.randint(0, order["shape"]["vocab_size"], size, generator=generator)


def say(row: dict[str, Any]) -> None:
    if dist.get_rank() == 0:
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
