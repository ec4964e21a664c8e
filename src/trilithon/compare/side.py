"""One side of a comparison: `python -m trilithon.compare.side JOB.json` on each of its ranks.

The job says which script, which configuration (none: plain PyTorch) and which variants: the model as it is, and copies
whose weights were moved by one rounding, which show what rounding alone does to the result.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trilithon.compare.plain import PlainSide
from trilithon.compare.record import StepRecord
from trilithon.compare.script import Script
from trilithon.config import Config
from trilithon.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True)
class Job:
    """What `run.compare` asks of a side. All in JSON's types."""

    script: str
    config: str | None  # None: plain
    like: str | None  # plain only: the configuration whose update it imitates
    steps: int
    nproc: int
    seed: int
    variants: list[float]  # relative perturbation of the weights; 0 leaves them
    folder: str
    lr: list[list[float]] | None = None  # plain only: rates to use, per step and group


def main() -> None:
    torch.set_num_threads(1)
    try:
        run_job(Path(sys.argv[1]))
    except (ConfigError, DataError) as error:  # they say what is wrong with the script: a traceback would hide it
        sys.exit(str(error))
    if dist.is_initialized():
        dist.destroy_process_group()


def run_job(path: Path) -> None:
    """Do what the job in `path` says, on every rank of its side; rank 0 writes the records."""
    job = Job(**json.loads(path.read_text(encoding="utf-8")))
    script = Script.load(Path(job.script))
    for index, amount in enumerate(job.variants):
        model = script.model(job.seed)
        perturb_(model, amount, seed=index)
        records = _plain(job, script, model) if job.config is None else _engine(job, script, model)
        for step, record in enumerate(records, start=1):
            if not dist.is_initialized() or dist.get_rank() == 0:
                record.write(Path(job.folder, f"variant-{index}"), step)


@torch.no_grad()
def perturb_(model: nn.Module, amount: float, seed: int) -> None:
    """Multiply every weight by 1 + amount or 1 - amount, at random but the same on every rank."""
    if amount == 0:
        return
    generator = torch.Generator().manual_seed(1000 + seed)
    for parameter in model.parameters():
        signs = torch.randint(0, 2, parameter.shape, generator=generator).to(parameter) * 2 - 1
        parameter.mul_(1 + amount * signs)


def _plain(job: Job, script: Script, model: nn.Module) -> Iterator[StepRecord]:
    like = Config() if job.like is None else Config.load(job.like)
    side = PlainSide(script, model, like, job.nproc)
    for step in range(job.steps):
        yield side.step(None if job.lr is None else job.lr[step])


def _engine(job: Job, script: Script, model: nn.Module) -> Iterator[StepRecord]:
    import trilithon

    assert job.config is not None
    config = Config.load(job.config)
    optimizer = None if script.optimizer is None else script.optimizer(model.parameters())
    with trilithon.initialize(model, config=config, optimizer=optimizer) as engine:
        accumulation = config.batch.resolve(engine.world_size).accumulation
        feed = script.feed(engine.rank, engine.world_size)
        for _ in range(job.steps):
            losses = []
            for batch in islice(feed, accumulation):
                loss = script.loss(engine, batch)
                engine.backward(loss)
                losses.append(float(loss.detach()))
            rates = list(engine.lr)
            gradients = _whole(engine.view("grad", "*"))
            changed = engine.step()
            yield StepRecord(
                loss=_mean_over_ranks(sum(losses) / len(losses)),
                changed=changed,
                lr=rates,
                gradients=gradients,
                parameters=_whole(engine.full_parameters()),
            )


def _whole(pairs: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Consumed on every rank (it is collective); kept where records are written."""
    keep = not dist.is_initialized() or dist.get_rank() == 0
    kept: dict[str, Tensor] = {}
    for name, tensor in pairs:
        if keep:
            kept[name] = tensor.detach().to("cpu", torch.float32, copy=True)
    return kept


def _mean_over_ranks(value: float) -> float:
    if not dist.is_initialized():
        return value
    total: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(total, value)
    return float(sum(total) / len(total))


if __name__ == "__main__":
    main()
