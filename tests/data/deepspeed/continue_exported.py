"""Shows that DeepSpeed goes on from what this library exported. Needs DeepSpeed 0.19.8; see README.md for the command.

The golden model is trained here for three steps and saved, and exported for each stage of DeepSpeed; both then take
the same two steps. One line for each case: the losses of both, and the largest difference of a master weight. Ends with
1 when a difference is more than rounding explains.
"""

from __future__ import annotations

import copy
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param
from golden_model import ROWS, STEPS_AFTER, STEPS_SAVED, batch, build_model, groups

import trilithon
from trilithon.checkpoint import export_deepspeed

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
}
LIMITS = {"fp32": 1e-6, "bf16": 2e-4, "fp16": 2e-4}  # two steps of AdamW at a rate of 0.02; rounding of forward differs
CASES = [  # universal at stage 3: 0.19.8 gives all groups the settings of the first one, of its own files as well
    *[(precision, stage, False) for precision in PRECISIONS for stage in (1, 2, 3)],
    ("fp32", 1, True),
    ("bf16", 2, True),
]


def settings(precision: str, stage: int, *, own_adam: bool) -> dict[str, Any]:
    params = {"lr": 0.02, "betas": [0.9, 0.95], "eps": 1e-8, "torch_adam": not own_adam}
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": params},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "sub_group_size": 40},
        **copy.deepcopy(PRECISIONS[precision]),
    }


def mean(loss: torch.Tensor) -> float:
    total = loss.detach().float().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def steps(engine: Any, first: int, count: int) -> list[float]:
    """The mean loss of each of some steps; both engines have this loop."""
    losses = []
    for step in range(first, first + count):
        loss = engine(*batch(step, dist.get_rank()))
        losses.append(mean(loss))
        engine.backward(loss)
        engine.step()
    return losses


def ours(precision: str, folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train, save, go on: the losses after the save, and the masters at the end."""
    model = build_model()
    config = {**settings(precision, 2, own_adam=False), "zero_optimization": {"stage": 2}}
    engine = trilithon.initialize(model, config, parameters=groups(model))
    steps(engine, 0, STEPS_SAVED)
    engine.save(folder, client_state={"epoch": 2})
    losses = steps(engine, STEPS_SAVED, STEPS_AFTER)
    engine.save(folder, "after")
    engine.close()
    with trilithon.checkpoint.open_checkpoint(folder, "after") as saved:
        return losses, {one.name: saved.read("master", one.name).view(one.shape) for one in saved.entries("master")}


def theirs(
    precision: str, stage: int, folder: Path, *, universal: bool, own_adam: bool
) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = build_model()
    for param in model.parameters():
        if param.requires_grad or not universal:  # DeepSpeed leaves frozen parameters alone when it loads that layout
            torch.nn.init.constant_(param, 0.25)  # what is not loaded shows
    config = settings(precision, stage, own_adam=own_adam)
    if universal:
        config["checkpoint"] = {"load_universal": True}
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=groups(model), config=config)
    path, client_state = engine.load_checkpoint(str(folder))
    assert path is not None and client_state["epoch"] == 2 and engine.global_steps == STEPS_SAVED
    losses = steps(engine, STEPS_SAVED, STEPS_AFTER)
    trained = [(name, param) for name, param in engine.module.named_parameters() if param.requires_grad]
    masters = {name: safe_get_full_fp32_param(param).cpu().clone() for name, param in trained}
    engine.destroy()
    return losses, masters


def main(own_adam: bool) -> int:
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    shared = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared)
    root, failed = Path(str(shared[0])), 0
    for precision in PRECISIONS:
        expected, masters = ours(precision, root / precision)
        for kind, stage, universal in [case for case in CASES if case[0] == precision]:
            out = root / f"{kind}-{stage}-{universal}"
            if dist.get_rank() == 0:
                export_deepspeed(
                    root / precision, out, tag=f"step-{STEPS_SAVED:08d}", zero_stage=stage, ranks=dist.get_world_size(),
                    universal=universal, sub_group_numel=40,
                )  # fmt: skip
            dist.barrier()
            losses, found = theirs(kind, stage, out, universal=universal, own_adam=own_adam)
            apart = max(float((found[name] - value).abs().max()) for name, value in masters.items())
            good = apart <= LIMITS[precision]
            failed += not good
            if dist.get_rank() == 0:
                name = f"{kind} stage {stage}{' universal' if universal else ''}"
                print(
                    f"{name:<24} ours {expected} theirs {losses} masters apart {apart:.2g}{'' if good else '  TOO FAR'}"
                )
    if dist.get_rank() == 0:
        shutil.rmtree(root)
    return int(failed > 0)


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    sys.exit(main("--own-adam" in sys.argv))
