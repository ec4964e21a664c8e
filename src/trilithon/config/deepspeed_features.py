"""DeepSpeed features that this version does not have, with the keys they use: refused when on, noted when off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trilithon.config.deepspeed_rules import (
    Block,
    Code,
    Entry,
    Feature,
    Idle,
    Only,
    To,
    any_enabled,
    enabled,
    present,
    same,
)


def _named(*names: str) -> dict[str, Entry]:
    """Keys that matter only for their spelling, because the feature they belong to is off or refused."""
    return {name: Idle("the feature is off") for name in names}


def _ranks(value: Any) -> Any:
    """0 is another way to say that nothing is cut."""
    return 1 if same(value, 0) else value


def _deep_compile(value: Any) -> bool:
    return value.get("deepcompile", False) is not False if isinstance(value, Mapping) else present(value)


_TIERS = {"none": "device", "cpu": "host", "nvme": "disk"}


def _tier(value: Any) -> Any:
    """DeepSpeed's names of tiers -> ours."""
    if value is None:
        return "device"
    return _TIERS.get(value.lower(), value) if isinstance(value, str) else value


def _host_if(value: Any) -> Any:
    return {True: "host", False: "device", None: "device"}.get(value, value) if not isinstance(value, list) else value


_OVERLAPPED = "reading, updating and writing always overlap as far as offload.buffers allows"
OFFLOAD_OPTIMIZER = Block(
    {
        "device": To("offload.state", _tier),
        "nvme_path": To("offload.path"),
        "buffer_count": To("offload.buffers"),
        "ratio": To("offload.ratio"),
        "pin_memory": Idle("buffers are locked whenever there is an accelerator that copies from them", "flag"),
        "pipeline": Idle(_OVERLAPPED, "flag"),
        "pipeline_read": Idle(_OVERLAPPED, "flag"),
        "pipeline_write": Idle(_OVERLAPPED, "flag"),
        "fast_init": Idle("initial state is always written slice by slice", "flag"),
        "super_offload": Only((False, None), "SuperOffload is not in this version; set it to false"),
        "cpuadam_cores_perc": Idle("the update uses torch's threads (OMP_NUM_THREADS)", "real"),
    }
)
CPU_OFFLOAD = To("offload.state", _host_if)
AIO = Block(
    {
        "block_size": To("offload.piece_bytes"),
        "queue_depth": To("offload.threads"),
        "intra_op_parallelism": Idle("offload.threads says how many requests are in flight", "count"),
        "thread_count": Idle("offload.threads says how many requests are in flight", "count"),
        "single_submit": Idle("each request is one system call", "flag"),
        "overlap_events": Idle("requests are submitted as others end", "flag"),
        "use_gds": Only((False, None), "reading from disk straight to a GPU is not in this version; set it to false"),
    }
)
OFFLOAD_PARAM = Block(
    {
        "device": To("offload.parameters", _tier),
        "nvme_path": Code(),
        "buffer_count": Idle("offload.buffers says how many slices have room, for each kind of state", "count"),
        "buffer_size": Idle("buffers are as large as the longest slice", "count"),
        "max_in_cpu": Idle("what is read ahead is bounded by offload.buffers", "count"),
        "pin_memory": Idle("buffers are locked whenever there is an accelerator that copies from them", "flag"),
    }
)
CPU_OFFLOAD_PARAM = To("offload.parameters", _host_if)
ZENFLOW = Feature(
    "ZenFlow",
    present,
    "leave the block out",
    _named(
        *("topk_ratio", "select_strategy", "select_interval", "update_interval", "overlap_step", "offload"),
        *("auto_ratio", "full_warm_up_rounds", "pt_reserved_cores_perc"),
    ),
)

ACTIVATION_CHECKPOINTING = Block(
    {
        "partition_activations": Code(),
        "cpu_checkpointing": Code(),
        "contiguous_memory_optimization": Code(),
        "contiguous_checkpointing": Code(),
        "number_checkpoints": Code(),
        "synchronize_checkpoint_boundary": Code(),
        "profile": Code(),
    }
)

_PIPELINE = "it is an argument of PipelineModule; leave the key out"
PIPELINE = Block(
    {
        "stages": Only(("auto", 1, None), "it is num_stages of PipelineModule; leave the key out"),
        "partition": Only(("best", None), _PIPELINE),
        "seed_layers": Only((False, None), _PIPELINE),
        "activation_checkpoint_interval": To("pipeline.recompute_interval"),
        "pipe_partitioned": Only((True, None), _PIPELINE),
        "grad_partitioned": Only((True, None), _PIPELINE),
        "use_reentrant": Only((True, False, None), _PIPELINE),
    }
)

_PLAN = "the plan is found from the model, or given as tensor.plan"
TENSOR_PARALLEL = Block(
    {
        "autotp_size": To("mesh.tensor", _ranks),
        "tp": Block({"tp_size": To("mesh.tensor", _ranks), "tp_grain_size": Idle("vocabularies are padded as needed")}),
        "enabled": Idle("the number of ranks says it", "flag"),
        "dtype": Idle("training computes in the enabled number format"),
        "tp_overlap_comm": Idle("the exchange of an input's gradient always overlaps with that of the weight", "flag"),
        "preset_model": Idle(_PLAN),
        "partition_config": Only((None, {}), _PLAN + "; leave the key out"),
        "injection_policy_tuple": Only((None,), _PLAN + "; leave the key out"),
        "vocab_parallel_lm_head": Idle("the model's loss decides whether logits stay cut", "flag"),
        "vocab_parallel_ce_backend": Idle("there is one implementation"),
        "keep_module_on_host": Idle("parameters are cut one at a time", "flag"),
        "replace_with_kernel_inject": Idle("it belongs to inference", "flag"),
    }
)

_ENABLED = 'set "enabled" to false or leave the block out'
FEATURES: dict[str, Entry] = {
    "activation_checkpointing": ACTIVATION_CHECKPOINTING,
    "pipeline": PIPELINE,
    "tensor_parallel": TENSOR_PARALLEL,
    "expert_parallel": Feature(
        "converting a model's experts through the configuration",
        enabled,
        f"{_ENABLED}; trilithon.moe.convert(model, ep_size=...) does it in the program",
    ),
    "data_efficiency": Feature(
        "the data-efficiency pipeline (curriculum, dynamic batching, random layer-token dropping)",
        any_enabled,
        _ENABLED,
        _named("enabled", "seed", "data_sampling", "data_routing"),
    ),
    "curriculum_learning": Feature(
        "curriculum learning",
        enabled,
        _ENABLED,
        _named(
            *("enabled", "curriculum_type", "min_difficulty", "max_difficulty", "schedule_type", "schedule_config"),
        ),
    ),
    "progressive_layer_drop": Feature(
        "progressive layer dropping", enabled, _ENABLED, _named("enabled", "theta", "gamma")
    ),
    "compression_training": Feature(
        "compression during training",
        any_enabled,
        "leave the block out",
        _named(
            *("layer_reduction", "weight_quantization", "activation_quantization", "sparse_pruning", "row_pruning"),
            *("head_pruning", "channel_pruning"),
        ),
    ),
    "elasticity": Feature(
        "choosing batch sizes from a range of world sizes",
        enabled,
        _ENABLED + ", and give two of the three batch sizes",
        _named(
            *("enabled", "max_train_batch_size", "micro_batch_sizes", "min_gpus", "max_gpus", "min_time"),
            *("prefer_larger_batch", "prefer_larger_batch_size", "ignore_non_elastic_batch_info", "version"),
            *("num_gpus_per_node", "model_parallel_size"),
        ),
    ),
    "autotuning": Feature("autotuning", enabled, _ENABLED),
    "wandb": Feature(
        "logging to Weights & Biases",
        enabled,
        _ENABLED + "; csv_monitor and tensorboard are there",
        _named("enabled", "group", "team", "project"),
    ),
    "comet": Feature(
        "logging to Comet",
        enabled,
        _ENABLED + "; csv_monitor and tensorboard are there",
        _named(
            *("enabled", "samples_log_interval", "project", "workspace", "api_key", "experiment_name"),
            *("experiment_key", "online", "mode"),
        ),
    ),
    "hybrid_engine": Feature(
        "the hybrid engine for training and generation",
        enabled,
        _ENABLED,
        _named(
            *("enabled", "max_out_tokens", "inference_tp_size", "release_inference_cache", "pin_parameters"),
            *("tp_gather_partition_size", "enable_cuda_graph"),
        ),
    ),
    "compile": Feature("compiling the schedule of collectives", _deep_compile, "set deepcompile to false"),
    "torch_autocast": Feature(
        "autocasting instead of casting the model",
        enabled,
        _ENABLED + "; fp16 and bf16 cast the model",
        _named("enabled", "dtype", "lower_precision_safe_modules"),
    ),
    "amp": Feature("Apex AMP", enabled, _ENABLED + "; fp16 and bf16 cast the model"),
    "msamp": Feature("MS-AMP (fp8)", enabled, _ENABLED, _named("enabled", "opt_level")),
    "nebula": Feature("the Nebula checkpoint service", enabled, _ENABLED),
    "eigenvalue": Feature("eigenvalues of the Hessian", enabled, _ENABLED),
    "quantize_training": Feature("quantisation during training (MoQ)", enabled, _ENABLED),
    "sparse_attention": Feature("sparse attention", present, "leave the block out"),
    "weight_quantization": Feature("weight quantisation", present, "leave the block out"),
    "sparse_gradients": Feature("sparse gradients", present, "set it to false; embeddings then have dense gradients"),
    "graph_harvesting": Feature("graph harvesting", present, "set it to false"),
    "datastates_ckpt": Feature("the DataStates checkpoint engine", present, "leave it out"),
    "sequence_parallel_size": To("mesh.sequence", _ranks),
}
