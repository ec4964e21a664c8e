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

checkpoint = non_reentrant_checkpoint = native.checkpoint
is_configured, reset = native.is_configured, native.reset
get_cuda_rng_tracker, CudaRNGStatesTracker = native.random_streams, native.RandomStreams
model_parallel_cuda_manual_seed = native.seed_streams


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
    group = None
    for name in ("slice_parallel", "model_parallel", "tensor_model_parallel"):  # the last one that is there counts
        group = getattr(mpu_, f"get_{name}_group", lambda found=group: found)()
    settings = {name: value for name, value in said.items() if value is not None}
    settings["tier"] = "host" if settings.pop("host", False) else "device"
    native.configure({**settings, "partition": bool(said["partition"]) and group is not None}, group=group)


def set_num_layers(nlayers: int) -> None:
    """So many inputs are kept at a time, for the size of contiguous buffers."""
    native.reconfigure(num_layers=nlayers)


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Cut inputs over the tensor ranks, or leave them whole."""
    native.reconfigure({"partition": partition_activation and native.tensor_ranks()[1] > 1})


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """A stream cannot get another seed; make one with `get_cuda_rng_tracker().add(name, seed)`."""
    raise ProtocolError("model_parallel_reconfigure_tp_seed: add a stream of its own, get_cuda_rng_tracker().add(...).")
