"""DeepSpeed's JSON files as they are published: everything that the client knows is left to it as "auto"."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from launching import OTHER_PYTHON

_ADAM = {"torch_adam": True} if OTHER_PYTHON else {}  # DeepSpeed itself would compile its own first


def zero(stage: int, **more: Any) -> dict[str, Any]:
    """The sections of the stages as found in the clients' documentation; thresholds small, as the models are."""
    section: dict[str, Any] = {"stage": stage}
    if stage in (1, 2):
        section |= {
            "allgather_partitions": True,
            "allgather_bucket_size": 2e8,
            "overlap_comm": True,
            "reduce_scatter": True,
            "reduce_bucket_size": 2e8,
            "contiguous_gradients": True,
        }
    if stage == 3:
        section |= {
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 1e9,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    return section | more


def for_a_client(stage: int, *, optimizer: bool = True, **more: Any) -> dict[str, Any]:
    """With `optimizer`, the file brings AdamW and WarmupDecayLR; without, the client brings its own."""
    config: dict[str, Any] = {
        "bf16": {"enabled": "auto"},
        "zero_optimization": zero(stage),
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "steps_per_print": 2000,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "wall_clock_breakdown": False,
    }
    if optimizer:
        adamw = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", **_ADAM}
        decay = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto")
        config |= {
            "optimizer": {"type": "AdamW", "params": adamw},
            "scheduler": {"type": "WarmupDecayLR", "params": decay},
        }
    return config | more


def for_a_loop(stage: int, world: int, accumulation: int, *, micro: int = 2, **more: Any) -> dict[str, Any]:
    """For scripts that call DeepSpeed themselves: nothing is "auto"."""
    section = {key: value for key, value in zero(stage).items() if value != "auto"}
    adamw = {"lr": 1e-2, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01, **_ADAM}
    config: dict[str, Any] = {
        "train_batch_size": micro * world * accumulation,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "steps_per_print": 10,
        "optimizer": {"type": "AdamW", "params": adamw},
        "zero_optimization": section,
    }
    return config | more


def write(folder: Path, config: dict[str, Any], name: str = "ds.json") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(json.dumps(config, indent=2))
    return path
