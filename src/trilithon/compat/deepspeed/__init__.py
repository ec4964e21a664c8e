"""The public names of DeepSpeed, mapped onto ours: a script written for it runs as it is.

    import trilithon.compat.deepspeed as deepspeed
    engine, optimizer, loader, scheduler = deepspeed.initialize(model=model, config=config)

Adapters only. Names are resolved on first use; one that is not here raises an error that names the way in our own
library. Where releases of DeepSpeed differ, TRILITHON_DEEPSPEED_RELEASE=0.16 chooses the older behaviour.
"""

from __future__ import annotations

from typing import Any

from trilithon.compat.deepspeed.git_version_info import git_branch, git_hash, version
from trilithon.compat.deepspeed.resolve import resolver

__version__ = version
__version_major__, __version_minor__, __version_patch__ = (int(part) for part in version.split("."))
__git_hash__, __git_branch__ = git_hash, git_branch
HAS_TRITON = False  # no kernel of DeepSpeed's is here; ours choose for themselves

_HOMES = {
    "initialize": "runtime.building",
    "tp_model_init": "runtime.building",
    "add_config_arguments": "runtime.building",
    "init_distributed": "comm",
    "DeepSpeedEngine": "runtime.engine",
    "DeepSpeedConfig": "runtime.config",
    "DeepSpeedConfigError": "runtime.config",
    "DeepSpeedOptimizer": "runtime.base_optimizer",
    "ZeROOptimizer": "runtime.base_optimizer",
    "ADAM_OPTIMIZER": "runtime.config",
    "LAMB_OPTIMIZER": "runtime.config",
    "get_accelerator": "accelerator",
    "PipelineEngine": "runtime.pipe.engine",
    "PipelineModule": "runtime.pipe.module",
    "OnDevice": "utils.init_on_device",
    "logger": "utils.logging",
    "log_dist": "utils.logging",
    "checkpointing": "runtime.activation_checkpointing:checkpointing",
    "dist": ":comm",
    "init_inference": "not_carried_over",
    "default_inference_config": "not_carried_over",
    "InferenceEngine": "not_carried_over",
    "DeepSpeedInferenceConfig": "not_carried_over",
    "DeepSpeedHybridEngine": "not_carried_over",
    "DeepSpeedTransformerLayer": "not_carried_over",
    "DeepSpeedTransformerConfig": "not_carried_over",
    "replace_transformer_layer": "not_carried_over",
    "revert_transformer_layer": "not_carried_over",
    "DualPipeVModule": "not_carried_over",
    "DualPipeVEngine": "not_carried_over",
}
_MODULES = (
    *("accelerator", "checkpoint", "comm", "launcher", "module_inject", "moe", "monitor", "ops", "pipe", "runtime"),
    *("sequence", "utils", "zero"),
)
_INSTEAD = {
    "elasticity": "trilithon launch restarts with the ranks that are left; give the batch sizes themselves.",
    "compression": "trilithon.compress.distill has knowledge distillation; quantised training is not in this version.",
    "autotuning": "`trilithon check` and `trilithon doctor` say what a configuration will need.",
    "inference": "Generation goes through the module itself, under trilithon.zero.gathered or engine.uneven().",
    "profiling": "monitor.profile_step measures one step.",
    "io": "trilithon.tiers has the files that state rests in.",
    "model_implementations": "Models stay as they are; there are no replacements of layers.",
    "linear": "peft has LoRA.",
    "datastates": "engine.save(blocking=False) writes checkpoints in the background.",
    "nebula": "engine.save(blocking=False) writes checkpoints in the background.",
}

__getattr__ = resolver(__name__, _HOMES, _MODULES, _INSTEAD)


def __dir__() -> list[Any]:
    return sorted([*globals(), *_HOMES, *_MODULES])
