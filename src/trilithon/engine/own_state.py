"""This rank's part of the optimizer's state, as one dictionary: what an optimizer's `state_dict` is where it is cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from trilithon.errors import CheckpointError, ProtocolError

if TYPE_CHECKING:
    from trilithon.engine.engine import Engine


def own_state(engine: Engine) -> dict[str, Any]:
    """{"slices": {key: {"master": [n] f32, "exp_avg": [n], ...}}, "update", "groups", "scaler", "ranks"}, copied."""
    update = _update(engine)
    slices = {}
    for part in engine._sharding.slices():
        with update.state(part) as state:
            slices[part.key] = {name: value.detach().to("cpu", copy=True) for name, value in state.items()}
    return {
        "slices": slices,
        "update": update.state_dict(),
        "groups": [{key: value for key, value in group.items() if key != "params"} for group in engine._groups],
        "scaler": engine._precision.state_dict(),
        "ranks": engine.world_size,
    }


@torch.no_grad()
def load_own_state(engine: Engine, saved: Mapping[str, Any]) -> None:
    """Collective. Raises CheckpointError, before anything is changed, for what another number of ranks has saved."""
    update, parts = _update(engine), engine._sharding.slices()
    if saved.get("ranks") != engine.world_size or set(saved.get("slices", ())) != {part.key for part in parts}:
        raise CheckpointError(
            f"the state was taken on {saved.get('ranks')} ranks and cut otherwise than on these {engine.world_size}. "
            "Save with engine.save, which any number of ranks can load."
        )
    update.load_state_dict(saved["update"])
    for part in parts:
        with update.state(part, write=True) as state:
            for name, value in state.items():
                value.copy_(saved["slices"][part.key][name])
            if part.low is not None:
                part.low.copy_(state["master"])
    for group, settings in zip(engine._groups, saved["groups"], strict=True):
        for key, value in settings.items():
            group[key] = value
    engine._precision.load_state_dict(saved["scaler"])
    engine._sharding.publish()


def _update(engine: Engine) -> Any:
    if engine._update is None:
        raise ProtocolError("this engine has no optimizer: pass one to initialize(), or set config.optimizer.")
    return engine._update
