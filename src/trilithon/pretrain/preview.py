"""What a run would be, told without starting anything: settings in force, sizes, and bytes that stay on each rank.

The arithmetic is that of ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054, section 3.1): values, gradients and optimizer
state, each whole or cut over the ranks. Activations, gathered parameters and the program itself come on top.
"""

from __future__ import annotations

from typing import Any

from trilithon.config import Fp32, ResolvedBatch, explain
from trilithon.config.optimizer import OptimizerConfig
from trilithon.models.settings import GPTConfig
from trilithon.pretrain.settings import PretrainConfig

_BYTES_VOCABULARY = 257  # 256 values and the end of a document
_MOMENTS = {"adam": 2, "adamw": 2, "lamb": 2, "lion": 1, "adagrad": 1, "sgd": 1}  # fp32 numbers a parameter


def preview(config: PretrainConfig, ranks: int) -> str:
    """Settings and sizes as lines of text. Raises ConfigError for a batch that does not split over the ranks."""
    shape = config.model.shape(config.data.vocab_size or _BYTES_VOCABULARY)
    batch = config.engine.resolve_batch(ranks)
    lines = ["# settings", *_settings(config), "", "# sizes", *_sizes(config, shape, batch)]
    lines += ["", "# bytes that stay on each rank; activations and gathered parameters come on top"]
    held = held_bytes(config, shape.num_parameters(), ranks)
    width = max(len(name) for name in held) + 1
    lines += [f"{name:<{width}} {size:>16,}" for name, size in {**held, "together": sum(held.values())}.items()]
    return "\n".join(lines)


def held_bytes(config: PretrainConfig, num_parameters: int, ranks: int) -> dict[str, int]:
    """By category, without padding, in the words of `engine.memory()`, wherever it rests."""
    stage, low = config.engine.zero.stage, not isinstance(config.engine.precision, Fp32)
    own = -(-num_parameters // ranks)
    value = 2 if low else 4
    gradient = 4 if low and (config.engine.batch.accumulation or 1) > 1 else value
    return {
        "parameters": value * (own if stage == 3 else num_parameters),
        "gradients": gradient * (own if stage >= 2 else num_parameters),
        "master": 4 * (own if stage >= 1 else num_parameters) if low else 0,
        "optimizer": 4 * _moments(config.engine.optimizer) * (own if stage >= 1 else num_parameters),
    }


def checkpoint_bytes(config: PretrainConfig, num_parameters: int) -> int:
    """Of one checkpoint, whatever the number of ranks: weights and optimizer state, each once."""
    return num_parameters * (4 + 4 * _moments(config.engine.optimizer))  # 16-bit values follow from the fp32 ones


def _moments(optimizer: OptimizerConfig | None) -> int:
    if optimizer is None or (optimizer.kind == "sgd" and not optimizer.momentum):
        return 0
    return _MOMENTS[optimizer.kind]


def _settings(config: PretrainConfig) -> list[str]:
    own = [
        f"{block}.{name} = {value!r}"
        for block in ("data", "model", "run")
        for name, value in getattr(config, block).model_dump(mode="json").items()
        if value is not None
    ]
    return own + [f"{item.key} = {item.value!r}" for item in explain(config.engine) if item.value is not None]


def _sizes(config: PretrainConfig, shape: GPTConfig, batch: ResolvedBatch) -> list[str]:
    count, steps = shape.num_parameters(), config.run.steps
    tokens = batch.global_size * shape.context
    rows: dict[str, Any] = {
        "parameters": f"{count:,}",
        "a step": f"{batch.global_size} sequences of {shape.context} tokens: {batch.accumulation} micro-batches of "
        f"{batch.micro_size} on each of {batch.data_parallel_size} ranks",
        "steps": f"{steps:,}, {steps * tokens:,} tokens",
        "arithmetic": f"{shape.training_flops_per_token() * tokens * steps:.3g} floating-point operations",
        "checkpoint": f"about {checkpoint_bytes(config, count):,} bytes",
    }
    return [f"{name}: {value}" for name, value in rows.items()]
