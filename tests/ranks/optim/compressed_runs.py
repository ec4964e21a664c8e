"""Running compressed rules on the engine, looking inside, and carrying everything over to another engine."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

import trilithon
from trilithon.testing.engine_run import digest_of
from trilithon.testing.models import TinyGPT
from trilithon.testing.parity import rank_part, token_batches

SIGN = {"kind": "onebit_adam", "lr": 3e-3, "freeze_step": 3}
BATCHES = token_batches(12, 12)


def gpt(**options: Any) -> TinyGPT:
    return TinyGPT(layers=1, dim=24, **options)


@contextmanager
def engine_of(optimizer: Any, model: Any = None, *, rows: int = 12, accumulation: int = 1, **config: Any) -> Any:
    sizes = {"global_size": rows * accumulation, "accumulation": accumulation}
    stage = config.pop("stage", 0)
    groups = config.pop("parameters", None)
    settings = {**config, "zero": {"stage": stage}, "batch": sizes, "optimizer": optimizer}
    module = model if model is not None else gpt()
    with trilithon.initialize(module, settings, parameters=groups(module) if groups else None) as engine:
        yield engine


def train(engine: Any, batches: Sequence[Any] = BATCHES) -> list[float]:
    return [engine.train_step([rank_part(b, engine.rank, engine.world_size) for b in micro]) for micro in batches]


def weights(engine: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in engine.full_parameters()}


def everyones(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def same_everywhere(tensors: Sequence[Tensor]) -> bool:
    return len(set(everyones(digest_of(tensors)))) == 1


def held(engine: Any) -> list[Tensor]:
    """The parameters as this rank holds them, without any collective."""
    return [parameter.detach() for parameter in engine.module.parameters()]


def fields(engine: Any) -> dict[str, Tensor]:
    """Whole state by "field/name", masters included."""
    kinds: set[str] = set()
    for part in engine._sharding.slices():
        with engine._update.state(part) as state:
            kinds |= set(state)
    kinds = set().union(*everyones(kinds))
    return {f"{kind}/{name}": value for kind in sorted(kinds) for name, value in engine.view(kind)}


def snapshot(engine: Any) -> dict[str, Any]:
    """All that a checkpoint keeps of an engine, whole, and every rank's own state."""
    engine.drain()
    update = engine._update
    return copy.deepcopy(
        {
            "fields": fields(engine),
            "steps": engine.steps,
            "rule": update.state_dict(),
            "ranks": everyones({name: value.clone() for name, value in update.rank_state().items()}),
        }
    )


def restore(engine: Any, saved: Mapping[str, Any]) -> None:
    """Continue from a snapshot, of any number of ranks."""
    update, ranks = engine._update, saved["ranks"]
    update.load_state_dict(saved["rule"])
    for part in engine._sharding.slices():
        with update.state(part, write=True) as state:
            for kind, here in state.items():
                for shard in part.shards:
                    whole = saved["fields"][f"{kind}/{shard.name}"].reshape(-1)
                    here[shard.offset : shard.offset + shard.numel] = whole[shard.start : shard.start + shard.numel]
            if part.low is not None:
                part.low.copy_(part.master)
    if len(ranks) == engine.world_size:
        update.load_rank_state(ranks[engine.rank])
    else:
        for name in ranks[0]:
            update.load_rank_state({}, [{name: rank[name]} for rank in ranks])
    engine._sharding.publish()
    engine.steps = saved["steps"]
