"""`deepspeed.checkpointing`: activations that are computed again in backward, on `trilithon.checkpointing`.

Outputs keep their own structure, and nothing is re-entrant: what autograd saved is replaced, and parameters get one
gradient. Random numbers, of torch's generators and of the streams, are drawn alike both times.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trilithon import checkpointing as native
from trilithon.errors import ProtocolError

# DeepSpeed's key in a file, its argument of `configure`, and ours in `recompute`
_SETTINGS = (
    ("partition_activations", "partition_activations", "partition"),
    ("contiguous_memory_optimization", "contiguous_checkpointing", "contiguous"),
    ("number_checkpoints", "num_checkpoints", "number"),
    ("cpu_checkpointing", "checkpoint_in_cpu", "host"),
    ("synchronize_checkpoint_boundary", "synchronize", "synchronize"),
    ("profile", "profile", "profile"),
)
_SAID: dict[str, Any] = {"group": None, "layers": 1, "rank": 0}

checkpoint = non_reentrant_checkpoint = native.checkpoint
is_configured, reset = native.is_configured, native.reset
get_cuda_rng_tracker, CudaRNGStatesTracker = native.random_streams, native.RandomStreams


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
    given: dict[str, Any] = dict(locals())
    if isinstance(deepspeed_config, str | Path):
        deepspeed_config = json.loads(Path(deepspeed_config).read_text())
    block = deepspeed_config.get("activation_checkpointing") if isinstance(deepspeed_config, Mapping) else None
    told = block if isinstance(block, Mapping) else {}
    said = {ours: given[name] if given[name] is not None else told.get(key) for key, name, ours in _SETTINGS}
    if said["contiguous"]:
        assert said["partition"], "contiguous_checkpointing is only available with partition_activations"
        assert said["number"] is not None, "contiguous_checkpointing needs the number of checkpoints"
    _SAID["group"], _SAID["rank"] = None, 0
    for name in ("slice_parallel", "model_parallel", "tensor_model_parallel"):  # the last one that is there counts
        if hasattr(mpu_, f"get_{name}_group"):
            _SAID["group"] = getattr(mpu_, f"get_{name}_group")()
            _SAID["rank"] = getattr(mpu_, f"get_{name}_rank", lambda: 0)()
    _apply(said)


def _apply(said: Mapping[str, Any]) -> None:
    settings = {name: value for name, value in said.items() if name != "host" and value is not None}
    settings["tier"] = "host" if said.get("host") else "device"
    if _SAID["group"] is None:
        settings.pop("partition", None)
    native.configure(settings, group=_SAID["group"], num_layers=_SAID["layers"])


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
    _apply({**said, "host": said.pop("tier", "device") == "host", **changes})


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Equal random numbers on all tensor ranks, and others on each in `get_cuda_rng_tracker().fork()`."""
    native.seed_streams(seed, int(_SAID["rank"]))


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """A stream cannot get another seed; make one with `get_cuda_rng_tracker().add(name, seed)`."""
    raise ProtocolError("model_parallel_reconfigure_tp_seed: add a stream of its own, get_cuda_rng_tracker().add(...).")
