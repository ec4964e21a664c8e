"""`deepspeed.runtime.constants`: the names of keys that programs import."""

from __future__ import annotations

ROUTE_TRAIN, ROUTE_EVAL, ROUTE_PREDICT, ROUTE_ENCODE = "train", "eval", "predict", "encode"
TRAIN_BATCH_SIZE = "train_batch_size"
TRAIN_MICRO_BATCH_SIZE_PER_GPU = "train_micro_batch_size_per_gpu"
GRADIENT_ACCUMULATION_STEPS = "gradient_accumulation_steps"
GRADIENT_CLIPPING = "gradient_clipping"
OPTIMIZER, SCHEDULER, TYPE = "optimizer", "scheduler", "type"
OPTIMIZER_PARAMS = SCHEDULER_PARAMS = "params"
FP16, BFLOAT16, BFLOAT16_OLD = "fp16", "bf16", "bfloat16"
FP16_ENABLED = BFLOAT16_ENABLED = "enabled"
STEPS_PER_PRINT, WALL_CLOCK_BREAKDOWN = "steps_per_print", "wall_clock_breakdown"
ZERO_OPTIMIZATION = "zero_optimization"
GLOBAL_RANK = "global_rank"
PLD_THETA, PLD_GAMMA = "theta", "gamma"
CHECKPOINT, LOAD_UNIVERSAL_CHECKPOINT = "checkpoint", "load_universal"
