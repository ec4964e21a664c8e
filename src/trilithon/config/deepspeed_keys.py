"""The keys of a DeepSpeed file and what becomes of each (names and defaults of DeepSpeed 0.19)."""

from __future__ import annotations

from trilithon.config.deepspeed_features import (
    AIO,
    CPU_OFFLOAD,
    CPU_OFFLOAD_PARAM,
    FEATURES,
    OFFLOAD_OPTIMIZER,
    OFFLOAD_PARAM,
    ZENFLOW,
)
from trilithon.config.deepspeed_rules import Block, Code, Entry, Idle, Only, To, as_list, dtype

_FLAT = "gradients and parameters of a bucket always lie in one flat buffer"
_ONE_BUCKET = "gathers use the same buckets as reductions (reduce_bucket_size)"
_ONCE = "gradients are divided once, when they are averaged"
_UNITS = "parameters are gathered in units chosen from the module tree; zero.unit_classes names their classes"
_CHECKS = "it switches a diagnosis inside DeepSpeed"
_PORTABLE = "checkpoints are written and read another way, at any stage and number of ranks"
_QUANTISED = "quantised or two-level communication (ZeRO++) is not in this version; set it to false"

_STAGE_3: dict[str, Entry] = {
    "stage3_prefetch_bucket_size": To("zero.prefetch_numel"),
    "stage3_param_persistence_threshold": To("zero.persist_below_numel"),
    "stage3_model_persistence_threshold": To("zero.persist_total_numel"),
    "stage3_max_live_parameters": To("zero.max_live_numel"),
    "stage3_max_reuse_distance": Idle(
        "a unit is freed after its use, and read-ahead follows the recorded order", "count"
    ),
    "stage3_gather_16bit_weights_on_model_save": Idle("state_dict() always returns whole parameters", "flag"),
    "stage3_module_granularity_threshold": Idle(_UNITS, "count"),
    "stage3_use_all_reduce_for_fetch_params": Idle("parameters are gathered by all-gather", "flag"),
    "stage3_allgather_sequential": Idle("parameters are gathered by all-gather", "flag"),
}

ZERO: dict[str, Entry] = {
    "stage": To("zero.stage"),
    "contiguous_gradients": Idle(_FLAT, "flag"),
    "reduce_scatter": Idle("stages 1 to 3 always reduce-scatter", "flag"),
    "reduce_bucket_size": To("zero.bucket_numel"),
    "use_multi_rank_bucket_allreduce": Idle("stages 1 to 3 always reduce-scatter", "flag"),
    "allgather_partitions": Idle("updated parameters are always published by all-gather", "flag"),
    "allgather_bucket_size": Idle(_ONE_BUCKET, "count"),
    "overlap_comm": To("zero.overlap"),
    "compute_grad_norm": Idle("the gradient norm is always computed", "flag"),
    "load_from_fp32_weights": Idle(_PORTABLE, "flag"),
    "elastic_checkpoint": Idle(_PORTABLE, "flag"),
    "offload_param": OFFLOAD_PARAM,
    "offload_optimizer": OFFLOAD_OPTIMIZER,
    "zenflow": ZENFLOW,
    "sub_group_size": Idle("offload.sub_group_numel says how much state is in memory at once, whatever it is", "count"),
    "cpu_offload": CPU_OFFLOAD,
    "cpu_offload_param": CPU_OFFLOAD_PARAM,
    "cpu_offload_params": CPU_OFFLOAD_PARAM,
    "cpu_offload_use_pin_memory": Idle("buffers are locked whenever there is an accelerator", "flag"),
    **_STAGE_3,
    **{name.removeprefix("stage3_"): entry for name, entry in _STAGE_3.items()},
    "stage3_gather_fp16_weights_on_model_save": Idle("state_dict() always returns whole parameters", "flag"),
    "ignore_unused_parameters": Idle("a parameter without gradient always counts as zero", "flag"),
    "legacy_stage1": Only((False, None), "the old form of stage 1 does not exist here; set it to false"),
    "round_robin_gradients": Idle("each unit is split evenly over all ranks", "flag"),
    "parameter_alignment": Idle("slices are always aligned to 64 elements", "flag"),
    "zero_hpz_partition_size": Only((1, None), _QUANTISED.replace("false", "1")),
    "zero_quantized_weights": Only((False, None), _QUANTISED),
    "zero_quantized_gradients": Only((False, None), _QUANTISED),
    "zero_quantized_nontrainable_weights": Only((False, None), _QUANTISED),
    "zeropp_loco_param": Only((None,), _QUANTISED.replace("set it to false", "leave it out")),
    "mics_shard_size": Only(
        (-1, 0, None), "sharding over part of the ranks (MiCS) is not in this version; set it to -1"
    ),
    "mics_hierarchical_params_gather": Only((False, None), "MiCS is not in this version; set it to false"),
    "memory_efficient_linear": Idle("torch's own linear layer is used", "flag"),
    "pipeline_loading_checkpoint": Idle(_PORTABLE, "flag"),
    "override_module_apply": Idle("use trilithon.zero.gathered to change parameters", "flag"),
    "log_trace_cache_warnings": Idle(_CHECKS, "flag"),
    "enable_sanity_checks": Idle(_CHECKS, "flag"),
    "save_muon_momentum_buffer_in_memory": Idle("the Muon optimizer is not in this version", "flag"),
    "leaf_module": Block(
        {
            "classes": To("zero.unit_classes", as_list),
            "names": Only(([], None), "units are named by class; give their classes in leaf_module.classes"),
            "name_suffixes": Only(([], None), "units are named by class; give their classes in leaf_module.classes"),
        }
    ),
}

FP16: dict[str, Entry] = {
    "enabled": Code(),
    "loss_scale": To("precision.loss_scale"),
    "initial_scale_power": To("precision.initial_scale_power"),
    "loss_scale_window": To("precision.window"),
    "hysteresis": To("precision.hysteresis"),
    "consecutive_hysteresis": To("precision.consecutive_hysteresis"),
    "min_loss_scale": To("precision.min_scale"),
    "auto_cast": To("precision.cast_inputs"),
    "fp16_master_weights_and_grads": Only((False, None), "master weights are always fp32; set it to false"),
}

BF16: dict[str, Entry] = {
    "enabled": Code(),
    "immediate_grad_update": Idle("gradients are added up as they arrive", "flag"),
    "check_grad_overflow": To(
        "precision.non_finite", lambda on: {True: "skip", False: "ignore"}.get(on, on) if isinstance(on, bool) else on
    ),
    "auto_cast": To("precision.cast_inputs"),
    "bf16_master_weights_and_grads": Only((False, None), "master weights are always fp32; set it to false"),
    "bf16_optimizer_states": Only((False, None), "optimizer state is always fp32; set it to false"),
}

CHECKPOINT: dict[str, Entry] = {
    "tag_validation": Idle(_PORTABLE, "text"),
    "load_universal": Idle("engine.load recognises the universal layout by itself", "flag"),
    "use_node_local_storage": Only(
        (False, None), "checkpoints on the disks of several machines are not in this version; set it to false"
    ),
    "parallel_write": Block({"pipeline_stage": Only((False, None), "there are no pipeline stages; set it to false")}),
    "checkpoint_serialization": Idle(_PORTABLE, "flag"),
    "writer": Only((None,), "checkpoint writers cannot be chosen in this version; leave it out"),
}

_TIMED = "time, memory and bytes are measured on the step that monitor.profile_step names"
_COUNTED = "the bytes of every collective are always counted (engine.ledger)"
MONITORS: dict[str, Entry] = {
    "tensorboard": Block({"enabled": Code(), "output_path": Code(), "job_name": Code()}),
    "csv_monitor": Block({"enabled": Code(), "output_path": Code(), "job_name": Code()}),
    "flops_profiler": Block(
        {
            "enabled": Code(),
            "profile_step": To("monitor.profile_step"),
            **{
                name: Idle("the profile has one form")
                for name in ("recompute_fwd_factor", "module_depth", "top_modules", "detailed", "output_file")
            },
        },
        switch="enabled",
    ),
    "comms_logger": Block({name: Idle(_COUNTED) for name in ("enabled", "verbose", "prof_all", "debug", "prof_ops")}),
    "timers": Block({"throughput": Block({name: Idle(_TIMED, "flag") for name in ("enabled", "synchronized")})}),
    "wall_clock_breakdown": Idle(_TIMED, "flag"),
    "memory_breakdown": Idle(_TIMED, "flag"),
    "dump_state": Idle("`trilithon check` prints the settings in force", "flag"),
}

TABLE: dict[str, Entry] = {
    "train_batch_size": To("batch.global_size"),
    "train_micro_batch_size_per_gpu": To("batch.micro_size"),
    "gradient_accumulation_steps": To("batch.accumulation"),
    "gradient_clipping": To("clip_norm"),
    "use_data_before_expert_parallelism": To("moe.data_before_experts"),
    "steps_per_print": Code(),
    "prescale_gradients": Idle(_ONCE, "flag"),
    "gradient_predivide_factor": Idle(_ONCE, "real"),
    "gradient_allreduce_op": Only(
        ("mean", None), "gradients are averaged; multiply the loss instead of asking for a sum"
    ),
    "communication_data_type": To("zero.comm_dtype", dtype),
    "seq_parallel_communication_data_type": Idle("sequences are not cut over ranks"),
    "disable_allgather": Idle("updated parameters are always published by all-gather", "flag"),
    "allgather_size": Idle(_ONE_BUCKET, "count"),
    "zero_allow_untested_optimizer": Idle("an optimizer that does not fit is refused by name", "flag"),
    "zero_force_ds_cpu_optimizer": Idle("an optimizer whose state cannot be offloaded is refused by name", "flag"),
    "dataloader_drop_last": Idle("the caller makes the data loader", "flag"),
    "managed_gradient_accumulation": Only((True, None), "the engine counts micro-batches itself; set it to true"),
    "disable_python_gc": Idle("Python's garbage collector is left alone", "flag"),
    "log_level": Idle("the level is that of Python's logger `trilithon`"),
    "vocabulary_size": Idle("it only gives a warning in DeepSpeed", "count"),
    "data_parallel_size": Idle("it follows from the process group", "count"),
    "fp16": Block(FP16, switch="enabled"),
    "bf16": Block(BF16, switch="enabled"),
    "bfloat16": Block(BF16, switch="enabled"),
    "data_types": Block(
        {
            "grad_accum_dtype": To("zero.accumulate_dtype", dtype),
            "param_dtype": Code(),
            "buffer_dtype": Only((None,), "buffers keep the number format they have; leave it out"),
            "keep_in_fp32_modules": Only(
                ("auto", [], None), "buffers keep their format, parameters share one; leave it out"
            ),
        }
    ),
    "zero_optimization": Block(ZERO),
    "optimizer": Code(),
    "scheduler": Code(),
    "aio": AIO,
    "checkpoint": Block(CHECKPOINT),
    "inference": Idle("it is read by transformers, not by the training engine", "block"),
    **MONITORS,
    **FEATURES,
}

# Keys whose value "auto" means something of its own.
AUTO_IS_A_VALUE = {"pipeline.stages", "data_types.keep_in_fp32_modules"}
