"""A DeepSpeed block as DeepSpeed itself takes it: programs send keys that it skips, and values that it drops.

`Config.load` refuses what it does not know, which is right for a file that a person wrote. A program that fills in a
block for DeepSpeed relies on the tolerance: unknown keys at the top level and in the untyped sections are skipped, and
"auto" in a typed section means that its default applies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trilithon.config.deepspeed_keys import AUTO_IS_A_VALUE, TABLE
from trilithon.config.deepspeed_rules import Block, Entry, Feature

_TYPED = (
    *("zero_optimization", "fp16", "bf16", "bfloat16", "tensorboard", "wandb", "csv_monitor", "comet", "comms_logger"),
    *("hybrid_engine", "compile", "timers", "tensor_parallel", "weight_quantization"),
)
_UNTYPED = (
    *("aio", "flops_profiler", "autotuning", "pipeline", "checkpoint", "data_types"),
    *("data_efficiency", "expert_parallel"),
)
# What does not reach the engine: checkpoints of every layout are recognised when they are loaded, and which activations
# are kept, and where, is between the model and the functions that it calls.
_ELSEWHERE = ("checkpoint.load_universal", "activation_checkpointing")


def tolerant(raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """(the block without what DeepSpeed skips or drops, the dotted keys that were left out). `raw` is not changed."""
    left_out: list[str] = []
    block: dict[str, Any] = {}
    for name, value in raw.items():
        if not isinstance(name, str) or name in _ELSEWHERE or (name not in TABLE and not name.startswith("_")):
            left_out.append(str(name))
        elif name in _UNTYPED and isinstance(value, Mapping):
            block[name] = _known(name, value, TABLE[name], left_out)
        elif name in _TYPED and isinstance(value, Mapping):
            block[name] = _without_auto(value, f"{name}.", left_out)
        else:
            block[name] = value
    for name in ("offload_param", "offload_optimizer"):
        _unused_folder(block.get("zero_optimization"), name, left_out)
    for name in ("fp16", "bf16", "bfloat16"):  # inputs stay as they are unless the file says otherwise
        if isinstance(block.get(name), dict) and block[name].get("enabled") is True:
            block[name].setdefault("auto_cast", False)
    return block, left_out


def _known(name: str, value: Mapping[Any, Any], entry: Entry, left_out: list[str]) -> dict[str, Any]:
    keys = entry.keys if isinstance(entry, Block | Feature) else None
    dropped = [key for key in value if (keys is not None and key not in keys) or f"{name}.{key}" in _ELSEWHERE]
    left_out += [f"{name}.{key}" for key in dropped]
    return {key: below for key, below in value.items() if key not in dropped}


def _without_auto(value: Mapping[str, Any], prefix: str, left_out: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, below in value.items():
        if isinstance(below, Mapping):
            found[key] = _without_auto(below, f"{prefix}{key}.", left_out)
        elif isinstance(below, str) and below == "auto" and f"{prefix}{key}" not in AUTO_IS_A_VALUE:
            left_out.append(f"{prefix}{key}")
        else:
            found[key] = below
    return found


def _unused_folder(zero: Any, name: str, left_out: list[str]) -> None:
    """Programs send a path, or "none", whether anything goes to disk or not."""
    offload = zero.get(name) if isinstance(zero, dict) else None
    if isinstance(offload, dict) and offload.get("device") != "nvme" and "nvme_path" in offload:
        del offload["nvme_path"]
        left_out.append(f"zero_optimization.{name}.nvme_path")
