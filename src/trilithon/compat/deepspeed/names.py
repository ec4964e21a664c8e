"""What DeepSpeed's modules hold, by their paths below `deepspeed`. `resolve` makes modules of it, when asked for.

A module told of here needs no file; where there is one, what the file defines comes before what is told here.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Any

ROOT = "trilithon.compat.deepspeed"

# The same module under a second name, and what is below it too.
ALIASES = {
    "dist": "comm",
    "zero": "runtime.zero",
    "pipe": "runtime.pipe",
    "checkpointing": "runtime.activation_checkpointing.checkpointing",
    **dict.fromkeys(("accelerator.abstract_accelerator", "accelerator.real_accelerator"), "accelerator"),
    **dict.fromkeys(("runtime.fp16.fused_optimizer", "runtime.fp16.unfused_optimizer"), "runtime.base_optimizer"),
    "runtime.bf16_optimizer": "runtime.base_optimizer",
}

# Tables of lines: a module ("." is the package itself) and what there is to tell; a line goes on in the indented ones.

# Names that are defined elsewhere: module, home and names. A home that begins with a dot is below this package;
# `name=other` is called other there, and * is any other name of the home.
HOMES = """
. .accelerator get_accelerator
. .comm init_distributed
. .runtime.base_optimizer DeepSpeedOptimizer ZeROOptimizer
. .runtime.building initialize tp_model_init add_config_arguments
. .runtime.config ADAM_OPTIMIZER LAMB_OPTIMIZER DeepSpeedConfig DeepSpeedConfigError
. .runtime.engine DeepSpeedEngine
. .runtime.pipe.engine PipelineEngine
. .runtime.pipe.module PipelineModule
. .runtime.zero.partition_parameters OnDevice
. .utils.logging log_dist logger
checkpoint .checkpoint.constants *
checkpoint .checkpoint.utils clone_tensors_for_torch_save
checkpoint.deepspeed_checkpoint .checkpoint DeepSpeedCheckpoint
checkpoint.universal_checkpoint .checkpoint.utils SubparamShape
comm torch.distributed ReduceOp is_available is_initialized allgather_fn=all_gather_into_tensor
    reduce_scatter_fn=reduce_scatter_tensor *
launcher.launch trilithon.launch.deepspeed main=node_main native_words=node_arguments parse_args=parse_node_args
launcher.runner trilithon.launch.deepspeed DEEPSPEED_ENVIRONMENT_NAME=ENVIRONMENT_FILE DLTS_HOSTFILE=HOST_FILE
    encode_world_info fetch_hostfile=slots_by_host main parse_args parse_inclusion_exclusion=filter_slot_counts
    parse_resource_filter=filter_slots
moe.experts trilithon.parallel.moe.experts Experts
monitor .monitor.monitor MonitorMaster
ops.adagrad .ops.optimizers DeepSpeedCPUAdagrad
ops.adam .ops.optimizers DeepSpeedCPUAdam FusedAdam OnebitAdam ZeroOneAdam
ops.lamb .ops.optimizers FusedLamb OnebitLamb
ops.lion .ops.optimizers DeepSpeedCPULion FusedLion
runtime.pipe .runtime.pipe.module LayerSpec PipelineModule TiedLayerSpec
runtime.pipe .runtime.pipe.topology ProcessTopology
runtime.utils .utils.logging logger see_memory_usage
runtime.zero .runtime.zero.parameter_offload DeepSpeedZeRoOffload unwrap_model_for_generation
runtime.zero .runtime.zero.partition_parameters GatheredParameters Init ZeroParamStatus ZeroParamType
    register_external_parameter unregister_external_parameter
runtime.zero .runtime.zero.tiling TiledLinear TiledLinearReturnBias
runtime.zero.partition_parameters .accelerator get_accelerator
runtime.zero.partition_parameters .runtime.zero.parameter_attributes ZeroParamStatus
runtime.zero.utils .runtime.zero.partition_parameters ZeRORuntimeException
runtime.zero.linear torch.nn LinearModuleForZeroStage3=Linear
runtime.zero.linear torch.nn.functional zero3_linear_wrap=linear
runtime.zero.stage3 .runtime.base_optimizer DeepSpeedZeroOptimizer_Stage3
runtime.zero.stage3 trilithon.config.deepspeed_memory estimate_zero3_model_states_mem_needs model_to_params
    estimate_zero3_model_states_mem_needs_all_cold estimate_zero3_model_states_mem_needs_all_live
runtime.zero.stage_1_and_2 .runtime.base_optimizer DeepSpeedZeroOptimizer
runtime.zero.stage_1_and_2 trilithon.config.deepspeed_memory estimate_zero2_model_states_mem_needs
    estimate_zero2_model_states_mem_needs_all_cold estimate_zero2_model_states_mem_needs_all_live
runtime.dataloader trilithon.data DeepSpeedDataLoader=EpochLoader RepeatingLoader
utils trilithon.data RepeatingLoader
utils .runtime.zero.partition_parameters OnDevice
utils.init_on_device .runtime.zero.partition_parameters OnDevice
utils .utils.logging log_dist log_dist_once logger set_log_level_from_string
utils .utils.nvtx instrument_w_nvtx
utils .utils.tensor_fragment fragment_address safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state
    safe_get_local_fp32_param safe_get_local_grad safe_get_local_optimizer_state safe_set_full_fp32_param
    safe_set_full_grad safe_set_full_optimizer_state safe_set_local_fp32_param safe_set_local_grad
    safe_set_local_optimizer_state safe_update_full_grad_vectorized
utils .utils.z3_leaf_module get_z3_leaf_modules set_z3_leaf_module set_z3_leaf_modules set_z3_leaf_modules_by_name
    set_z3_leaf_modules_by_suffix unset_z3_leaf_modules z3_leaf_module z3_leaf_parameter
"""

# Names that can be imported and compared with, and raise when they are used: module, names and the way out.
REFUSED = """
. init_inference default_inference_config InferenceEngine DeepSpeedInferenceConfig DeepSpeedHybridEngine: Inference is
    not in this version: call model.generate under trilithon.zero.gathered(model.parameters()), or engine.eval_step
    inside engine.uneven().
. DeepSpeedTransformerLayer DeepSpeedTransformerConfig replace_transformer_layer revert_transformer_layer: Models keep
    their own layers; torch.compile makes them fast.
. DualPipeVModule DualPipeVEngine: trilithon.PipelineModule with pipeline.schedule chooses among schedules.
checkpoint DeepSpeedCheckpoint: Open a checkpoint, ours or DeepSpeed's, with trilithon.checkpoint.open_checkpoint.
checkpoint.universal_checkpoint enable_universal_checkpoint: engine.load_checkpoint takes any checkpoint.
comm log_summary: engine.native.ledger has the bytes of an engine's collectives; monitor.profile_step measures times.
launcher.multinode_runner MultiNodeRunner PDSHRunner OpenMPIRunner MPICHRunner IMPIRunner SlurmRunner MVAPICHRunner:
    Hosts are started over ssh (`deepspeed --hostfile F`), or by srun, whose environment is read.
module_inject LinearAllreduce LinearLayer replace_transformer_layer revert_transformer_layer set_autotp_mode: Set
    mesh.tensor and `tensor` in the configuration: matrices are cut by a plan, or by the model's own tp_plan.
moe.sharded_moe TopKGate: Use deepspeed.moe.layer.MoE, whose gate is `layer.gate`.
ops.muon Muon MuonWithAuxAdam: Pass torch.optim.Muon to initialize at zero stage 0, where every rank holds whole
    matrices.
runtime.pipe.schedule PipeSchedule TrainSchedule InferenceSchedule DataParallelSchedule PipeInstruction:
    trilithon.parallel.pipeline.make_orders gives every stage's order; pipeline.schedule chooses one.
runtime.sequence_parallel.ulysses_sp UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter: Set mesh.sequence in a native
    configuration and use trilithon.initialize: attention layers are found by itself.
runtime.zero MiCS_Init: Build the model under deepspeed.zero.Init.
runtime.zero.tiling TiledLinearReturnBias: Use deepspeed.zero.TiledLinear, or
    trilithon.zero.tile(model, above_numel=...).
sequence.layer DistributedAttention single_all_to_all: Set mesh.sequence in the configuration: attention layers are
    found and their heads are exchanged.
utils.numa get_numactl_cmd: Bind ranks with numactl, taskset or srun yourself.
"""

# What is said of names that are not here at all, in the same way; * is any other name of a module.
INSTEAD = """
. elasticity: trilithon launch restarts with the ranks that are left; give the batch sizes themselves.
. compression: trilithon.compress.distill has knowledge distillation; quantised training is not in this version.
. autotuning: `trilithon check` and `trilithon doctor` say what a configuration will need.
. inference: Generation goes through the module itself, under trilithon.zero.gathered or engine.uneven().
. profiling: monitor.profile_step measures one step.
. io: trilithon.tiers has the files that state rests in.
. model_implementations: Models stay as they are; there are no replacements of layers.
. linear: peft has LoRA.
. datastates nebula: engine.save(blocking=False) writes checkpoints in the background.
moe.utils split_params_grads_into_shared_and_expert_params: Split parameters, and read their `grad`.
monitor wandb comet: monitor.csv and monitor.tensorboard are there.
ops aio: offload.path in the configuration names where state rests on disk; trilithon.tiers has the files.
ops transformer: Models keep their own layers; torch.compile makes them fast.
ops sparse_attention: torch.nn.attention.flex_attention has block-sparse attention.
ops quantizer fp_quantizer: Quantisation is not in this version.
ops.op_builder *: No kernel of that name is used.
runtime compiler: engine.compile() calls torch.compile on the module.
runtime data_pipeline: trilithon.data has loaders and samplers; curricula are not in this version.
runtime hybrid_engine: Generation goes through the module itself, under trilithon.zero.gathered or engine.uneven().
runtime quantize: Quantised training is not in this version.
runtime eigenvalue progressive_layer_drop: It is not in this version.
runtime state_dict_factory: trilithon.checkpoint.open_checkpoint reads checkpoints of any layout.
runtime sparse_tensor: Gradients are dense here; embeddings with sparse=True are made dense as they arrive.
runtime swap_tensor: offload.state and offload.parameters in the configuration say what rests on disk.
runtime.engine.DeepSpeedEngine scale allreduce_gradients: engine.backward(loss) scales it and averages over ranks.
runtime.engine.DeepSpeedEngine coalesce_grad_reduction: Backwards inside engine.native.no_sync() are reduced once.
runtime.engine.DeepSpeedEngine offload_states reload_states: offload.state in the configuration says where state rests.
runtime.engine.DeepSpeedEngine set_custom_curriculum_learning_schedule set_data_post_process_func random_ltd_initialize:
    Curricula are not in this version; change batches in the loader.
runtime.engine.DeepSpeedEngine timers flops_profiler: monitor.profile_step measures one step.
runtime.engine.DeepSpeedEngine amp_enabled dump_state fp16_auto_cast get_data_types use_node_local_storage
    zero_cpu_offload zero_offload_optimizer zero_offload_param: engine.config is what was written, and
    engine.native.config what became of it.
runtime.config_utils dict_raise_error_on_duplicate_keys: trilithon.config.sources refuses keys that are twice.
runtime.zero.utils is_zero3_model: trilithon.zero.is_cut(parameter) says it of one parameter.
runtime.fp16 onebit: OneBitAdam, ZeroOneAdam and OneBitLamb are chosen by name in the configuration.
utils.logging print_rank_0 warning_once: utils.logging has log_dist(message, ranks=[0]) and log_dist_once.
utils.nvtx range_push range_pop: torch.cuda.nvtx has them.
utils.torch register_grad_hook: parameter.register_post_accumulate_grad_hook(hook) is torch's own.
runtime.utils clip_grad_norm_: gradient_clipping in the configuration clips; engine.get_global_grad_norm() has the norm.
runtime.utils get_grad_norm: engine.get_global_grad_norm() has the norm.
runtime.utils partition_balanced partition_uniform: trilithon.PipelineModule(partition_method=...) balances layers.
"""

# Constants of text: module, and NAME=text or, where it is its own small letters, NAME.
TEXTS = """
checkpoint.constants UNIVERSAL_CHECKPOINT_INFO UNIVERSAL_CHECKPOINT_VERSION_KEY=universal_checkpoint_version
    VOCABULARY_PARAMETER_PATTERNS PIPELINE_REPLICATED_PARAMETER_PATTERNS PARAMETER_TO_AVERAGE_PATTERNS
    TP_REPLICATED_PARAMETER_PATTERNS PARAMETER_WITH_ROW_PARALLELISM_PATTERNS PARAMETER_WITH_SUB_PARAMS
    PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0
launcher.constants PDSH_LAUNCHER=pdsh OPENMPI_LAUNCHER=openmpi MPICH_LAUNCHER=mpich IMPI_LAUNCHER=impi
    SLURM_LAUNCHER=slurm MVAPICH_LAUNCHER=mvapich
runtime.constants ROUTE_TRAIN=train ROUTE_EVAL=eval ROUTE_PREDICT=predict ROUTE_ENCODE=encode GRADIENT_CLIPPING
    TRAIN_BATCH_SIZE TRAIN_MICRO_BATCH_SIZE_PER_GPU GRADIENT_ACCUMULATION_STEPS OPTIMIZER SCHEDULER TYPE
    OPTIMIZER_PARAMS=params SCHEDULER_PARAMS=params FP16 BFLOAT16=bf16 BFLOAT16_OLD=bfloat16 FP16_ENABLED=enabled
    BFLOAT16_ENABLED=enabled STEPS_PER_PRINT WALL_CLOCK_BREAKDOWN ZERO_OPTIMIZATION GLOBAL_RANK PLD_THETA=theta
    PLD_GAMMA=gamma CHECKPOINT LOAD_UNIVERSAL_CHECKPOINT=load_universal
runtime.fp16.loss_scaler INITIAL_LOSS_SCALE=init_scale SCALE_WINDOW DELAYED_SHIFT CONSECUTIVE_HYSTERESIS
    MIN_LOSS_SCALE=min_scale
runtime.lr_schedules LR_SCHEDULE LR_RANGE_TEST=LRRangeTest ONE_CYCLE=OneCycle WARMUP_LR=WarmupLR WARMUP_MIN_LR
    WARMUP_DECAY_LR=WarmupDecayLR WARMUP_COSINE_LR=WarmupCosineLR WARMUP_MAX_LR WARMUP_NUM_STEPS WARMUP_TYPE
    TOTAL_NUM_STEPS WARMUP_LOG_RATE=log WARMUP_LINEAR_RATE=linear
"""

_BUILDS = ("cpu_adam", "cpu_adagrad", "cpu_lion", "fused_adam", "fused_lamb", "fused_lion", "async_io")
_LACKS = ("sparse_attn", "transformer", "transformer_inference", "quantizer", "gds")
_STATES = "optim_states hp_params lp_params lp_grads contiguous_grad_buffer"
_STAGES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3, "max_stage": 3}
_OFFLOAD = f"{ROOT}.runtime.zero.offload_config"

# Other constants, and enumerations.
VALUES: dict[str, dict[str, Any]] = {
    "checkpoint.constants": {"UNIVERSAL_CHECKPOINT_VERSION_VALUE": 0.4},
    "launcher.constants": {"PDSH_MAX_FAN_OUT": 1024},
    "ops": {
        "__compatible_ops__": dict.fromkeys(_BUILDS, True) | dict.fromkeys(_LACKS, False),
        "__installed_ops__": dict.fromkeys(_BUILDS + _LACKS, False),  # nothing has to be built beforehand
    },
    "runtime.zero.config": {"ZeroStageEnum": IntEnum("ZeroStageEnum", _STAGES, module=f"{ROOT}.runtime.zero.config")},
    "runtime.zero.offload_config": {
        "OffloadDeviceEnum": StrEnum("OffloadDeviceEnum", "none cpu nvme", module=_OFFLOAD),
        "OffloadStateTypeEnum": StrEnum("OffloadStateTypeEnum", _STATES, module=_OFFLOAD),
    },
}
