"""`deepspeed.checkpointing`: activations that are computed again in backward, on `trilithon.checkpointing`.

Outputs keep their own structure, and nothing is re-entrant: what autograd saved is replaced, and parameters get one
gradient. Random numbers, of torch's generators and of the streams, are drawn alike both times.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trilithon import checkpointing as native
from trilithon.checkpointing import RandomStreams
from trilithon.errors import ProtocolError

_KEYS = {
    "partition_activations": "partition",
    "contiguous_memory_optimization": "contiguous",
    "number_checkpoints": "number",
    "cpu_checkpointing": "host",
    "synchronize_checkpoint_boundary": "synchronize",
    "profile": "profile",
}
_SAID: dict[str, Any] = {"group": None, "layers": 1, "rank": 0}


def configure(
    mpu_: Any, deepspeed_config: Mapping[str, Any] | str | Path | None = None,
    partition_activations: bool | None = None, contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None, checkpoint_in_cpu: bool | None = None, synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:  # fmt: skip
    """How `checkpoint` keeps inputs from now on. Arguments that are not None win over deepspeed_config.

    mpu_: tells the tensor-parallel group over which partition_activations cuts inputs; without one there is nothing to
    cut over, and inputs stay whole. Raises AssertionError for contiguous_checkpointing without partition_activations
    and a number of checkpoints.
    """
    block = _block(deepspeed_config)
    said = {name: block[key] for key, name in _KEYS.items() if block.get(key) is not None}
    given = {
        "partition": partition_activations,
        "contiguous": contiguous_checkpointing,
        "number": num_checkpoints,
        "host": checkpoint_in_cpu,
        "synchronize": synchronize,
        "profile": profile,
    }
    said.update({name: value for name, value in given.items() if value is not None})
    if said.get("contiguous"):
        assert said.get("partition"), "contiguous_checkpointing is only available with partition_activations"
        assert said.get("number") is not None, "contiguous_checkpointing needs the number of checkpoints"
    _SAID["group"], _SAID["rank"] = _tensor_group(mpu_)
    _apply(said)


def _block(config: Mapping[str, Any] | str | Path | None) -> Mapping[str, Any]:
    if isinstance(config, str | Path):
        config = json.loads(Path(config).read_text())
    found = config.get("activation_checkpointing") if isinstance(config, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _tensor_group(mpu: Any) -> tuple[dist.ProcessGroup | None, int]:
    for name in ("tensor_model_parallel", "model_parallel", "slice_parallel"):
        if hasattr(mpu, f"get_{name}_group"):
            rank = getattr(mpu, f"get_{name}_rank", lambda: 0)()
            return getattr(mpu, f"get_{name}_group")(), rank
    return None, 0


def _apply(said: Mapping[str, Any]) -> None:
    settings = {name: value for name, value in said.items() if name != "host" and value is not None}
    settings["tier"] = "host" if said.get("host") else "device"
    if _SAID["group"] is None:
        settings.pop("partition", None)
    native.configure(settings, group=_SAID["group"], num_layers=_SAID["layers"])


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)`, whose activations are computed again in backward."""
    return native.checkpoint(function, *args, **kwargs)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """The same."""
    return native.checkpoint(function, *args)


def is_configured() -> bool:
    """`configure` was called."""
    return native.is_configured()


def reset() -> None:
    """Give buffers back, between training and evaluation, say."""
    native.reset()


def set_num_layers(nlayers: int) -> None:
    """So many inputs are kept at a time, for the size of contiguous buffers."""
    _SAID["layers"] = nlayers
    _again({})


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Cut inputs over the tensor ranks, or leave them whole."""
    _again({"partition": partition_activation})


def _again(changes: Mapping[str, Any]) -> None:
    settings = native.configured()
    said = settings.model_dump(exclude_defaults=True) if settings is not None else {}
    said["host"] = said.pop("tier", "device") == "host"
    _apply({**said, **changes})


def get_cuda_rng_tracker() -> RandomStreams:
    """Streams of random numbers by name, on any device."""
    return native.random_streams()


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Equal random numbers on all tensor ranks, and others on each in `get_cuda_rng_tracker().fork()`."""
    native.seed_streams(seed, int(_SAID["rank"]))


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """A stream cannot get another seed; make one with `get_cuda_rng_tracker().add(name, seed)`."""
    raise ProtocolError("model_parallel_reconfigure_tp_seed: add a stream of its own, get_cuda_rng_tracker().add(...).")


CudaRNGStatesTracker = RandomStreams
