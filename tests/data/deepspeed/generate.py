"""Write the golden DeepSpeed checkpoints of this folder. Needs DeepSpeed 0.19.8; see README.md for the commands.

Each case is a folder with what `save_checkpoint` wrote (its copied scripts removed) and `expected.safetensors`: the
whole fp32 values and optimizer states as DeepSpeed's own accessors report them on the live engine, the model's buffers
and frozen parameters, and the fp32 values after `STEPS_AFTER` more steps.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from golden_model import STEPS_AFTER, STEPS_SAVED, batch, build_model, groups
from safetensors.torch import save_file

ADAM = {"type": "AdamW", "params": {"lr": 0.02, "betas": [0.9, 0.95], "eps": 1e-8, "torch_adam": True}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}}
TAG = f"global_step{STEPS_SAVED}"

FEW = {"stage3_param_persistence_threshold": 0}
CASES: dict[str, tuple[int, dict[str, Any]]] = {  # folder: ranks, settings
    "zero0_fp32": (2, {"zero_optimization": {"stage": 0}}),
    "zero1_fp32": (2, {"zero_optimization": {"stage": 1}}),
    "zero1_fp16": (
        2,
        {
            "zero_optimization": {"stage": 1},
            "fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 1000, "hysteresis": 2},
        },
    ),
    "zero1_bf16_fp32_gradients": (
        2,
        {
            "zero_optimization": {"stage": 1},
            "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": "fp32"},
        },
    ),
    "zero2_bf16": (2, {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}),
    "zero2_fp32_round_robin": (2, {"zero_optimization": {"stage": 2, "round_robin_gradients": True}}),
    "zero2_fp32_four_ranks": (4, {"zero_optimization": {"stage": 2}}),
    "zero3_fp32": (2, {"zero_optimization": {"stage": 3, **FEW}}),
    "zero3_fp32_three_ranks": (3, {"zero_optimization": {"stage": 3, **FEW}}),
    "zero3_bf16": (2, {"zero_optimization": {"stage": 3, "sub_group_size": 20, **FEW}, "bf16": {"enabled": True}}),
}


def train(engine: Any, first: int, steps: int) -> None:
    for step in range(first, first + steps):
        engine.backward(engine(*batch(step, dist.get_rank())))
        engine.step()


def flat_values(engine: Any, key: str | None) -> dict[str, torch.Tensor]:
    """Stages 1 and 2: every rank's flat partition, joined and cut along the parameters of the live optimizer.

    Not through DeepSpeed's accessors: under round_robin_gradients they exchange parameters (their mapping is in another
    order than the flat tensors), and optimizer state of all groups but the first is not linked.
    """
    optimizer, names = engine.optimizer, {id(param): name for name, param in engine.module.named_parameters()}
    found = {}
    for index, partition in enumerate(optimizer.single_partition_of_fp32_groups):
        mine = partition if key is None else optimizer.optimizer.state[partition][key]
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, mine.detach().clone())
        flat, at = torch.cat(parts), 0
        for param in optimizer.round_robin_bit16_groups[index]:
            found[names[id(param)]] = flat[at : at + param.numel()].view(param.shape)
            at += param.numel()
    return found


def state(engine: Any, key: str | None) -> dict[str, torch.Tensor]:
    """Whole fp32 values (key None) or optimizer states of all trained parameters."""
    if hasattr(engine.optimizer, "round_robin_bit16_groups"):
        return flat_values(engine, key)
    trained = [(name, param) for name, param in engine.module.named_parameters() if param.requires_grad]
    if not hasattr(engine.optimizer, "fp32_partitioned_groups_flat") and not hasattr(engine.optimizer, "bf16_groups"):
        own = {name: param if key is None else engine.optimizer.state[param][key] for name, param in trained}
        return {name: value.detach().clone() for name, value in own.items()}
    if key is None:
        return {name: safe_get_full_fp32_param(param) for name, param in trained}
    return {name: safe_get_full_optimizer_state(param, key) for name, param in trained}


def expected(engine: Any) -> dict[str, torch.Tensor]:
    found = {f"master.{name}": value for name, value in state(engine, None).items()}
    for key in ("exp_avg", "exp_avg_sq"):
        found |= {f"{key}.{name}": value for name, value in state(engine, key).items()}
    for name, param in engine.module.named_parameters():
        if not param.requires_grad:
            with deepspeed.zero.GatheredParameters([param]):
                found[f"frozen.{name}"] = param.detach().clone()
    return found | {f"buffer.{name}": engine.module.get_buffer(name).clone() for name in ("seen", "mean")}


def write(settings: dict[str, Any], folder: Path) -> None:
    model = build_model()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": ADAM,
        "scheduler": WARMUP,
        "gradient_clipping": 0.0,
        **settings,
    }
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=groups(model), config=config)
    train(engine, 0, STEPS_SAVED)
    tensors = expected(engine)
    engine.save_checkpoint(str(folder), tag=TAG, client_state={"note": "golden", "epoch": 2})
    train(engine, STEPS_SAVED, STEPS_AFTER)
    tensors |= {f"continued.{name}": value for name, value in state(engine, None).items()}
    dist.barrier()
    if dist.get_rank() == 0:
        for script in folder.glob("*.py"):
            script.unlink()
        tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        save_file(tensors, folder / "expected.safetensors")
        (folder / "expected.safetensors").chmod(0o644)
    dist.barrier()
    engine.destroy()


def main() -> None:
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    here = Path(__file__).parent
    for case, (world_size, settings) in CASES.items():
        if world_size != dist.get_world_size():
            continue
        folder = here / case
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
        dist.barrier()
        write(settings, folder)


if __name__ == "__main__":
    main()
