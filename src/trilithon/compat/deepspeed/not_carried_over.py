"""Names at the top of DeepSpeed's package that belong to what is not in this version."""

from __future__ import annotations

from trilithon.compat.deepspeed.refused import refused

_GENERATE = (
    "Inference is not in this version: call model.generate under trilithon.zero.gathered(model.parameters()), or "
    "engine.eval_step inside engine.uneven()."
)
_KERNELS = "Models keep their own layers; torch.compile makes them fast."

init_inference = refused("init_inference", _GENERATE)
default_inference_config = refused("default_inference_config", _GENERATE)
InferenceEngine = refused("InferenceEngine", _GENERATE)
DeepSpeedInferenceConfig = refused("DeepSpeedInferenceConfig", _GENERATE)
DeepSpeedHybridEngine = refused("DeepSpeedHybridEngine", _GENERATE)
DeepSpeedTransformerLayer = refused("DeepSpeedTransformerLayer", _KERNELS)
DeepSpeedTransformerConfig = refused("DeepSpeedTransformerConfig", _KERNELS)
replace_transformer_layer = refused("replace_transformer_layer", _KERNELS)
revert_transformer_layer = refused("revert_transformer_layer", _KERNELS)
DualPipeVModule = refused("DualPipeVModule", "trilithon.PipelineModule with pipeline.schedule chooses among schedules.")
DualPipeVEngine = refused("DualPipeVEngine", "trilithon.PipelineModule with pipeline.schedule chooses among schedules.")
