"""Write the golden DeepSpeed checkpoints with experts and of pipelines. Needs DeepSpeed 0.19.8; see README.md.

As `generate.py`, each case is what `save_checkpoint` wrote, and `expected.safetensors`: whole fp32 values and optimizer
states under DeepSpeed's names with experts counted over all ranks, and the values after `STEPS_AFTER` more steps.
"""

from __future__ import annotations

import re
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import golden_parallel_models as golden
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from safetensors.torch import save_file

ADAM = {"type": "AdamW", "params": {"lr": 0.02, "betas": [0.9, 0.95], "eps": 1e-8, "torch_adam": True}}
TAG = f"global_step{golden.STEPS_SAVED}"
BF16 = {"bf16": {"enabled": True}}

EXPERT_CASES: dict[str, tuple[int, list[int], dict[str, Any]]] = {  # folder: ranks, ep_size of each layer, settings
    "moe_zero0_fp32": (2, [2], {}),
    "moe_zero1_fp32": (2, [2], {"zero_optimization": {"stage": 1}}),
    "moe_zero2_bf16": (2, [1], {"zero_optimization": {"stage": 2}, **BF16}),
    "moe_zero2_fp32_four_ranks": (4, [2, 4], {"zero_optimization": {"stage": 2}}),
}
PIPE_CASES: dict[str, tuple[int, bool, dict[str, Any]]] = {  # folder: ranks, tied head, settings
    "pipe_zero0_fp32": (2, False, {}),
    "pipe_zero1_fp32": (2, True, {"zero_optimization": {"stage": 1}}),
    "pipe_zero1_bf16_four_ranks": (4, False, {"zero_optimization": {"stage": 1}, **BF16}),
}


def gathered(mine: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The union over all ranks."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, {name: value.detach().cpu().clone() for name, value in mine.items()})
    return {name: value for one in every for name, value in one.items()}


def parts_of(optimizer: Any, index: int, key: str | None) -> list[torch.Tensor]:
    """This flat group's partitions, of the ranks that share it, in their order."""
    partition = optimizer.single_partition_of_fp32_groups[index]
    mine = partition if key is None else optimizer.optimizer.state[partition][key]
    group = optimizer.real_dp_process_group[index]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine.detach().clone(), group=group)
    return found


def state(engine: Any, key: str | None, rename: Any) -> dict[str, torch.Tensor]:
    """Whole fp32 values (key None) or states, under names that hold for all ranks."""
    optimizer, found = engine.optimizer, {}
    names = {id(param): rename(name) for name, param in engine.module.named_parameters()}
    if not hasattr(optimizer, "single_partition_of_fp32_groups"):
        for name, param in engine.module.named_parameters():
            found[rename(name)] = param if key is None else optimizer.state[param][key]
        return gathered(found)
    for index in range(len(optimizer.single_partition_of_fp32_groups)):
        flat, at = torch.cat(parts_of(optimizer, index, key)), 0
        for param in optimizer.round_robin_bit16_groups[index]:
            found[names[id(param)]] = flat[at : at + param.numel()].view(param.shape)
            at += param.numel()
    return gathered(found)


def record(engine: Any, rename: Any, folder: Path, go_on: Any) -> None:
    tensors = {f"master.{name}": value for name, value in state(engine, None, rename).items()}
    for key in ("exp_avg", "exp_avg_sq"):
        tensors |= {f"{key}.{name}": value for name, value in state(engine, key, rename).items()}
    engine.save_checkpoint(str(folder), tag=TAG, client_state={"note": "golden"})
    go_on()
    tensors |= {f"continued.{name}": value for name, value in state(engine, None, rename).items()}
    dist.barrier()
    if dist.get_rank() == 0:
        for script in folder.glob("*.py"):
            script.unlink()
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "expected.safetensors")
        (folder / "expected.safetensors").chmod(0o644)
    dist.barrier()


# -------------------------------------------------------------------------------------------------------------- experts
def of_all_ranks(name: str, degrees: list[int]) -> str:
    """A rank's own name of an expert's parameter -> the one with the expert's number among all."""
    match = re.match(r"moes\.(\d+)\.(.*deepspeed_experts)\.(\d+)\.(.*)", name)
    if match is None:
        return name
    degree = degrees[int(match[1])]
    here = golden.EXPERTS // degree
    return f"moes.{match[1]}.{match[2]}.{dist.get_rank() % degree * here + int(match[3])}.{match[4]}"


def write_experts(degrees: list[int], settings: dict[str, Any], folder: Path) -> None:
    def layer(degree: int) -> MoE:
        return MoE(
            golden.WIDTH, golden.Expert(), golden.EXPERTS, ep_size=degree, k=1, capacity_factor=float(golden.EXPERTS),
            min_capacity=1, use_rts=False,
        )  # fmt: skip

    model = golden.ExpertsModel([partial(layer, degree) for degree in degrees])
    rename = partial(of_all_ranks, degrees=degrees)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(golden.value_of(rename(name), param.shape))
    group = {"params": list(model.parameters()), "name": "all", "lr": 0.02, "weight_decay": 0.1}
    groups = split_params_into_different_moe_groups_for_optimizer(group)
    config = {"train_micro_batch_size_per_gpu": golden.ROWS, "gradient_clipping": 0.0, "optimizer": ADAM, **settings}
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=groups, config=config)

    def train(first: int, steps: int) -> None:
        for step in range(first, first + steps):
            engine.backward(engine(*golden.batch(step, dist.get_rank())))
            engine.step()

    train(0, golden.STEPS_SAVED)
    record(engine, rename, folder, lambda: train(golden.STEPS_SAVED, golden.STEPS_AFTER))
    engine.destroy()


# ------------------------------------------------------------------------------------------------------------ pipelines
def write_pipeline(tied: bool, settings: dict[str, Any], folder: Path) -> None:
    middle = [LayerSpec(golden.Middle) for _ in range(2)]
    if tied:
        ends = [
            TiedLayerSpec("embed", golden.Embed),
            TiedLayerSpec("embed", golden.Embed, forward_fn=golden.project),
        ]
    else:
        ends = [LayerSpec(golden.Embed), LayerSpec(torch.nn.Linear, golden.WIDTH, golden.VOCABULARY)]
    layers = [ends[0], *middle, ends[1]]
    model = PipelineModule(layers, num_stages=2, loss_fn=golden.loss_of, partition_method="uniform")
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(golden.value_of(name, param.shape))
    config = {
        "train_micro_batch_size_per_gpu": golden.ROWS,
        "gradient_accumulation_steps": golden.MICRO_BATCHES,
        "gradient_clipping": 0.0,
        "optimizer": ADAM,
        **settings,
    }
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    replica = engine.grid.get_data_parallel_rank()

    def train(first: int, steps: int) -> None:
        for step in range(first, first + steps):
            engine.train_batch(iter([golden.batch(step, replica, micro) for micro in range(golden.MICRO_BATCHES)]))

    train(0, golden.STEPS_SAVED)
    record(engine, lambda name: name, folder, lambda: train(golden.STEPS_SAVED, golden.STEPS_AFTER))
    engine.destroy()


def main(wanted: list[str]) -> None:
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    here = Path(__file__).parent
    cases = {name: (ranks, partial(write_experts, *rest)) for name, (ranks, *rest) in EXPERT_CASES.items()}
    cases |= {name: (ranks, partial(write_pipeline, *rest)) for name, (ranks, *rest) in PIPE_CASES.items()}
    for name, (ranks, write) in cases.items():
        if ranks != dist.get_world_size() or (wanted and name not in wanted):
            continue
        if dist.get_rank() == 0:
            shutil.rmtree(here / name, ignore_errors=True)
        dist.barrier()
        write(here / name)


if __name__ == "__main__":
    main(sys.argv[1:])
