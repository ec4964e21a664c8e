"""What a run would be, told without starting anything: settings in force, sizes, and bytes that stay on each rank.

The arithmetic is that of ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054, section 3.1): values, gradients and optimizer
state, each whole or cut over the ranks. Activations, gathered parameters and the program itself come on top.
"""

from __future__ import annotations

import math
from typing import Any

from trilithon.config import ApmSqueeze, Fp32, OneBitAdam, OneBitLamb, ResolvedBatch, ZeroOneAdam, explain
from trilithon.config.compressed import padded_numel
from trilithon.config.mesh import EXPERT_RANKS
from trilithon.config.optimizer import OptimizerConfig
from trilithon.engine.capabilities import require_no_refusals
from trilithon.engine.expert_capabilities import require_mesh_for_experts, require_rule_for_experts
from trilithon.errors import ConfigError
from trilithon.models.settings import GPTConfig
from trilithon.pretrain.parts import parts_by_stage
from trilithon.pretrain.settings import PretrainConfig

_BYTES_VOCABULARY = 257  # 256 values and the end of a document
_MOMENTS = {"adam": 2, "adamw": 2, "lamb": 2, "lion": 1, "adagrad": 1, "sgd": 1}  # fp32 numbers a parameter
_MOMENTS |= {"onebit_adam": 2, "onebit_lamb": 2, "zero_one_adam": 2, "apmsqueeze": 2}  # and what is exchanged


def preview(config: PretrainConfig, ranks: int) -> str:
    """Settings and sizes as lines of text.

    Raises ConfigError for settings that the engine would refuse together, and for a batch that does not split.
    """
    _refuse(config, ranks)
    shape = config.model.shape(config.data.vocab_size or _BYTES_VOCABULARY)
    batch = config.engine.resolve_batch(config.engine.mesh.axes(ranks).size("data"))
    lines = ["# settings", *_settings(config), "", "# sizes", *_sizes(config, shape, batch, ranks)]
    lines += ["", "# bytes that stay on each rank; activations and gathered parameters come on top"]
    if _phases(config)[0]:
        lines.append("# optimizer: in the compressed phase, with the momentum that is sent and the residuals")
    held = mesh_bytes(config, shape, ranks)
    width = max(len(name) for name in held) + 1
    lines += [f"{name:<{width}} {size:>16,}" for name, size in {**held, "together": sum(held.values())}.items()]
    return "\n".join(lines)


def mesh_bytes(config: PretrainConfig, shape: GPTConfig, ranks: int) -> dict[str, int]:
    """By category, what one of `ranks` ranks on the configured mesh holds; of several stages, that which holds most."""
    degree = _expert_degree(config, config.engine.mesh.axes(ranks).size(EXPERT_RANKS))
    stages = []
    for parts in parts_by_stage(shape, config.engine, ranks, degree):
        held = [held_bytes(config, numel, holders) for numel, holders in parts]
        stages.append({name: sum(part[name] for part in held) for name in held[0]})
    return max(stages, key=lambda held: sum(held.values()))


def held_bytes(config: PretrainConfig, num_parameters: int, ranks: int) -> dict[str, int]:
    """By category, of parameters that `ranks` ranks hold alike, without padding, wherever it rests.

    Categories are those of `engine.memory()`.
    """
    stage, low = config.engine.zero.stage, not isinstance(config.engine.precision, Fp32)
    own = -(-num_parameters // ranks)
    value = 2 if low else 4
    gradient = 4 if low and (config.engine.batch.accumulation or 1) > 1 else value
    return {
        "parameters": value * (own if stage == 3 else num_parameters),
        "gradients": gradient * (own if stage >= 2 else num_parameters),
        "master": 4 * (own if stage >= 1 else num_parameters) if low else 0,
        "optimizer": 4 * _optimizer_numbers(config, num_parameters, ranks),
    }


def checkpoint_bytes(config: PretrainConfig, num_parameters: int, ranks: int = 1) -> int:
    """Of one checkpoint: weights and optimizer state, each once, and what each rank has not yet sent."""
    size = num_parameters * (4 + 4 * _moments(config.engine.optimizer))  # 16-bit values follow from the fp32 ones
    if _phases(config)[0]:
        size += 4 * ranks * _residual_numbers(num_parameters, ranks)
        size += 4 * num_parameters * (_kind(config) == "onebit_lamb")
    return size


def _refuse(config: PretrainConfig, ranks: int) -> None:
    """As `trilithon.initialize` would, once the model is there."""
    require_no_refusals(config.engine)
    axes = config.engine.mesh.axes(ranks)
    tensor, sequence = axes.size("tensor"), axes.size("sequence")
    num_heads = config.model.shape(_BYTES_VOCABULARY).num_heads
    if num_heads % (tensor * sequence):
        raise ConfigError(
            f"num_heads={num_heads} does not split over mesh.tensor={tensor} x mesh.sequence={sequence} ranks. Choose "
            "degrees whose product divides it, or another --heads."
        )
    if config.model.experts:
        require_mesh_for_experts(config.engine, axes)
    degree = _expert_degree(config, axes.size(EXPERT_RANKS))
    if degree > 1 and config.engine.optimizer is not None:
        require_rule_for_experts(config.engine.optimizer.kind, [degree])


def _expert_degree(config: PretrainConfig, holders: int) -> int:
    """Over how many ranks the experts of a layer are spread; 1 without experts."""
    model = config.model
    return (model.ep_size or math.gcd(model.experts, holders)) if model.experts else 1


def _kind(config: PretrainConfig) -> str | None:
    return config.engine.optimizer.kind if config.engine.optimizer is not None else None


def _moments(optimizer: OptimizerConfig | None) -> int:
    if optimizer is None or (optimizer.kind == "sgd" and not optimizer.momentum):
        return 0
    return _MOMENTS[optimizer.kind]


def _optimizer_numbers(config: PretrainConfig, num_parameters: int, ranks: int) -> int:
    """fp32 numbers that one rank's update rule holds when it holds most."""
    own = -(-num_parameters // ranks) if config.engine.zero.stage >= 1 else num_parameters
    numbers = _moments(config.engine.optimizer) * own
    compressed, apart = _phases(config)
    if compressed:
        numbers += padded_numel(num_parameters, ranks) + _residual_numbers(num_parameters, ranks)
        numbers += own * (_kind(config) == "onebit_lamb")  # a second moment that goes on beside the frozen one
    return numbers + own * apart  # the weights at which ranks last agreed


def _residual_numbers(num_parameters: int, ranks: int) -> int:
    """What one rank keeps of what compression lost, as a sender and as the server of its chunk; alone it loses none."""
    padded = padded_numel(num_parameters, ranks)
    return padded + padded // ranks if ranks > 1 else 0


def _phases(config: PretrainConfig) -> tuple[bool, bool]:
    """(anything is sent compressed within the run's steps, ranks move apart); "auto" is taken to freeze in time."""
    rule, steps = config.engine.optimizer, config.run.steps
    match rule:
        case OneBitAdam() | OneBitLamb() | ApmSqueeze():
            return rule.freeze_step == "auto" or steps > rule.freeze_step, False
        case ZeroOneAdam():
            full = max(rule.var_update_scaler, rule.full_precision_warmup)
            return steps > min(full, rule.var_freeze_step), steps > rule.var_freeze_step
    return False, False


def _settings(config: PretrainConfig) -> list[str]:
    own = [
        f"{block}.{name} = {value!r}"
        for block in ("data", "model", "run")
        for name, value in getattr(config, block).model_dump(mode="json").items()
        if value is not None
    ]
    return own + [f"{item.key} = {item.value!r}" for item in explain(config.engine) if item.value is not None]


def _sizes(config: PretrainConfig, shape: GPTConfig, batch: ResolvedBatch, ranks: int) -> list[str]:
    count, steps = shape.num_parameters(), config.run.steps
    tokens = batch.global_size * shape.context
    rows: dict[str, Any] = {
        "parameters": f"{count:,}",
        "a step": f"{batch.global_size} sequences of {shape.context} tokens: {batch.accumulation} micro-batches of "
        f"{batch.micro_size} on each of {batch.data_parallel_size} ranks",
        "steps": f"{steps:,}, {steps * tokens:,} tokens",
        "arithmetic": f"{shape.training_flops_per_token() * tokens * steps:.3g} floating-point operations",
        "checkpoint": f"about {checkpoint_bytes(config, count, ranks):,} bytes",
    }
    return [f"{name}: {value}" for name, value in rows.items()]
