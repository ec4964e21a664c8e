"""Holds schedules and dynamic loss scales against DeepSpeed's own objects, step by step, for random settings.

Needs DeepSpeed 0.19.8; see README.md for the command. Prints each difference, and ends with 1 if there is one.
"""

from __future__ import annotations

import os
import random
import sys
from typing import Any

import deepspeed
import torch
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

from trilithon.config import Config
from trilithon.errors import NonFiniteError
from trilithon.optim.learning_rate import configured
from trilithon.optim.loss_scale import DynamicScale

WARM = {"warmup_num_steps": (1, 2, 3, 7), "warmup_type": ("log", "linear")}
BOUNDS = {"warmup_min_lr": (0.0, 0.01), "warmup_max_lr": (0.05, 0.3)}
SCHEDULES: dict[str, tuple[dict[str, tuple[Any, ...]], dict[str, tuple[Any, ...]]]] = {  # name: may, must be given
    "WarmupLR": ({**WARM, **BOUNDS}, {}),
    "WarmupDecayLR": ({**WARM, **BOUNDS}, {"total_num_steps": (1, 5, 12)}),
    "WarmupCosineLR": (
        {**WARM, "warmup_min_ratio": (0.0, 0.25), "cos_min_ratio": (0.1, 0.0)},
        {"total_num_steps": (1, 6, 12)},
    ),
    "LRRangeTest": (
        {
            "lr_range_test_min_lr": (0.01, 0.5),
            "lr_range_test_step_size": (1, 4),
            "lr_range_test_step_rate": (0.5, 2.0),
            "lr_range_test_staircase": (True, False),
        },
        {},
    ),
    "OneCycle": (
        {
            "cycle_second_step_size": (2, 5),
            "cycle_first_stair_count": (0, 2, 3),
            "cycle_second_stair_count": (0, 4),
            "decay_step_size": (0, 3),
            "decay_lr_rate": (0.0, 0.5),
            "cycle_min_mom": (0.7,),
            "cycle_max_mom": (0.95,),
            "decay_mom_rate": (0.0, 0.01),
        },
        {"cycle_first_step_size": (1, 4, 7), "cycle_min_lr": (0.01,), "cycle_max_lr": (0.2,)},
    ),
}


def schedule_differs(name: str, params: dict[str, Any]) -> bool:
    rate, betas = 0.7, (0.9, 0.999)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=rate, betas=betas)
    theirs = getattr(lr_schedules, name)(optimizer, **params)
    section = Config.load({"train_batch_size": 1, "scheduler": {"type": name, "params": params}}).lr_schedule
    assert section is not None
    plan = configured(section, {"lr": rate, "betas": betas}, 0, 1)
    for update in range(30):
        group, mine = optimizer.param_groups[0], {"betas": betas, **plan(update)}
        apart = [abs(group["lr"] - mine["lr"]), *(abs(a - b) for a, b in zip(group["betas"], mine["betas"]))]
        if max(apart) > 1e-12:
            print(f"{name} {params} before update {update}: {group['lr']} {group['betas']}, here {mine}")
            return True
        theirs.step()
    return False


def scale_differs(draw: random.Random) -> bool:
    window, hysteresis, consecutive = draw.randint(1, 7), draw.randint(1, 4), draw.random() < 0.5
    low, initial = draw.choice((1.0, 64.0)), 2.0 ** draw.randint(6, 12)
    theirs = DynamicLossScaler(initial, window, low, hysteresis, consecutive, raise_error_at_min_scale=True)
    mine = DynamicScale(
        initial, window=window, hysteresis=hysteresis, consecutive_hysteresis=consecutive, min_scale=low,
        max_scale=2.0**127, give_up_after=1,
    )  # fmt: skip
    often = draw.choice((0.1, 0.5))
    for step in range(200):
        overflow, stopped = draw.random() < often, [False, False]
        try:
            theirs.update_scale(overflow)
        except Exception:
            stopped[0] = True
        try:
            mine.accept(not overflow)
        except NonFiniteError:
            stopped[1] = True
        if stopped[0] != stopped[1] or (not stopped[0] and theirs.cur_scale != mine.scale):
            print(f"scale after step {step}: {theirs.cur_scale}, here {mine.scale}; stopped {stopped}")
            return True
        if stopped[0] or theirs.cur_scale >= 2.0**127:  # beyond is infinity in fp32, and DeepSpeed goes on
            return False
    return False


def main() -> int:
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ.setdefault("MASTER_PORT", "29771")
    deepspeed.init_distributed("gloo", verbose=False)
    different = runs = 0
    for seed in range(200):
        draw = random.Random(seed)
        for name, (may, must) in SCHEDULES.items():
            given = {key: draw.choice(values) for key, values in may.items() if draw.random() < 0.75}
            given |= {key: draw.choice(values) for key, values in must.items()}
            different, runs = different + schedule_differs(name, given), runs + 1
        different, runs = different + scale_differs(draw), runs + 1
    print(f"{runs} runs, {different} different")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
