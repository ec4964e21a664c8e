"""`deepspeed.runtime`: engine, configuration, schedules, loaders."""

from __future__ import annotations

from trilithon.compat.deepspeed.resolve import resolver

_MODULES = (
    *("activation_checkpointing", "base_optimizer", "bf16_optimizer", "config", "config_utils", "constants"),
    *("dataloader", "engine", "fp16", "lr_schedules", "pipe", "sequence_parallel", "utils", "zero"),
)
_INSTEAD = {
    "compiler": "engine.compile() calls torch.compile on the module.",
    "data_pipeline": "trilithon.data has loaders and samplers; curricula are not in this version.",
    "hybrid_engine": "Generation goes through the module itself, under trilithon.zero.gathered or engine.uneven().",
    "quantize": "Quantised training is not in this version.",
    "eigenvalue": "It is not in this version.",
    "progressive_layer_drop": "It is not in this version.",
    "state_dict_factory": "trilithon.checkpoint.open_checkpoint reads checkpoints of any layout.",
    "sparse_tensor": "Gradients are dense here; embeddings with sparse=True are made dense as they arrive.",
    "swap_tensor": "offload.state and offload.parameters in the configuration say what rests on disk.",
}

__getattr__ = resolver(__name__, {}, _MODULES, _INSTEAD)
