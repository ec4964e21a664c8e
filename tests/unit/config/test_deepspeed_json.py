"""DeepSpeed files: every key is mapped, refused with a reason, or noted; nothing disappears silently."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from trilithon.config import Bf16, Config, Fp16, Fp32, examine, explain
from trilithon.config.deepspeed_release import REMOVED
from trilithon.errors import ConfigError

BATCH = {"train_micro_batch_size_per_gpu": 1}


def load(block=None, **kwargs):
    return Config.load({**BATCH, **(block or {})}, **kwargs)


def problems_of(block=None, **kwargs):
    return [str(problem) for problem in examine({**BATCH, **(block or {})}, **kwargs).problems]


def noted(config, key):
    return [note for note in config.notes if note.startswith(f"{key}: ")]


@pytest.mark.parametrize(
    ("block", "form"),
    [
        ({}, "native"),
        ({"seed": 1}, "native"),
        ({"optimizer": {"kind": "adam"}}, "native"),
        ({"optimizer": "adam"}, "native"),
        ({"optimizer": {"type": "Adam"}}, "deepspeed"),
        ({"optimizer": {"params": {}}}, "deepspeed"),
        ({"train_batch_size": 1}, "deepspeed"),
        ({"gradient_clipp1ng": 1}, "deepspeed"),
        ({"clip_nrom": 1}, "native"),
        ({"_zero_optimization": 1}, "native"),
        ({"zero_optimization.stage": 1}, "deepspeed"),
        ({"qqq": 1}, "native"),
    ],
)
def test_the_format_is_recognised_by_its_keys(block, form):
    assert examine(block).format == form


def test_keys_of_both_formats_are_refused_with_the_names_to_use():
    with pytest.raises(ConfigError, match=r"trilithon \(zero\) and keys of DeepSpeed \(gradient_clipping \(clip_norm"):
        Config.load({"zero": {"stage": 1}, "gradient_clipping": 1.0})
    with pytest.raises(ConfigError, match=r"trilithon \(seed\) and keys of DeepSpeed"):
        Config.load({"seed": 1, "train_batch_size": 4, "zero_optimization": {"stage": 1}})


def test_the_keys_of_a_usual_file_become_ours(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(
        json.dumps(
            {
                "train_batch_size": 32,
                "train_micro_batch_size_per_gpu": 4,
                "gradient_clipping": 0.5,
                "steps_per_print": 20,
                "communication_data_type": "float32",
                "data_types": {"grad_accum_dtype": "bfloat16", "param_dtype": "bf16"},
                "bf16": {"enabled": True, "check_grad_overflow": False},
                "zero_optimization": {
                    "stage": 3,
                    "reduce_bucket_size": 5e8,
                    "overlap_comm": False,
                    "stage3_prefetch_bucket_size": 1e6,
                    "stage3_param_persistence_threshold": 100,
                    "stage3_model_persistence_threshold": 9223372036854775807,
                    "stage3_max_live_parameters": 1e9,
                    "leaf_module": {"classes": "Block"},
                },
            }
        )
    )
    config = Config.load(file)
    assert config.batch.resolve(2).accumulation == 4
    assert (config.clip_norm, config.monitor.every) == (0.5, 20)
    assert config.precision == Bf16(non_finite="ignore")
    zero = config.zero
    assert (zero.stage, zero.bucket_numel, zero.overlap) == (3, 500_000_000, False)
    assert (zero.prefetch_numel, zero.persist_below_numel, zero.persist_total_numel) == (10**6, 100, 2**63 - 1)
    assert (zero.max_live_numel, zero.comm_dtype, zero.accumulate_dtype) == (10**9, "fp32", "bf16")
    assert zero.unit_classes == ("Block",)
    origins = {item.key: item for item in explain(config)}
    assert str(origins["zero.bucket_numel"].source) == f"{file}:zero_optimization.reduce_bucket_size"
    assert origins["zero.bucket_numel"].kind == "deepspeed"


@pytest.mark.parametrize("short", ["prefetch_bucket_size", "max_live_parameters", "param_persistence_threshold"])
def test_stage_3_keys_are_known_without_their_prefix_but_not_twice(short):
    assert (
        load({"zero_optimization": {"stage": 3, short: 7}}).zero
        == load({"zero_optimization": {"stage": 3, f"stage3_{short}": 7}}).zero
    )
    found = problems_of({"zero_optimization": {"stage": 3, short: 7, f"stage3_{short}": 8}})
    assert any("sets the same thing" in problem for problem in found)


def test_loss_scale_settings_become_ours():
    block = {"enabled": True, "loss_scale_window": 5, "hysteresis": 3, "min_loss_scale": 2, "initial_scale_power": 32}
    precision = load({"fp16": {**block, "consecutive_hysteresis": True, "auto_cast": False}}).precision
    assert precision == Fp16(
        window=5,
        hysteresis=3,
        min_scale=2,
        initial_scale_power=32,
        max_scale=2.0**127,
        consecutive_hysteresis=True,
        cast_inputs=False,
        give_up_after=1,
    )
    assert load({"fp16": {"enabled": True, "loss_scale": 128}}).precision == Fp16(loss_scale=128)
    assert load({"fp16": {"enabled": True, "loss_scale": 0.0}}).precision == Fp16(give_up_after=1, max_scale=2.0**127)


def test_a_block_that_is_off_has_no_effect_and_says_so():
    config = load({"fp16": {"enabled": False, "loss_scale": 128}, "zero_optimization": {"stage": 1}})
    assert config.precision == Fp32()
    assert noted(config, "fp16.loss_scale") == ["fp16.loss_scale: no effect, because fp16.enabled is not true"]
    assert any("did you mean fp16.loss_scale?" in p for p in problems_of({"fp16": {"enabled": False, "los_scale": 1}}))


def test_two_number_formats_at_once_are_refused():
    on = {"enabled": True}
    assert any("both true" in problem for problem in problems_of({"fp16": on, "bf16": on}))
    assert any("both true" in problem for problem in problems_of({"bf16": on, "bfloat16": on}))
    assert any("in force is fp32" in p for p in problems_of({"data_types": {"param_dtype": "fp16"}}))


@pytest.mark.parametrize(("release", "clip"), [("0.19", 1.0), ("0.16", 0.0)])
def test_absent_clipping_follows_the_release(release, clip):
    config = load(deepspeed_release=release)
    assert config.clip_norm == clip
    origin = next(item for item in explain(config) if item.key == "clip_norm")
    assert origin.kind == "derived"
    assert f"DeepSpeed {release}" in str(origin.source)
    assert load({"gradient_clipping": 0.25}, deepspeed_release=release).clip_norm == 0.25
    assert load({"gradient_clipping": 0}, deepspeed_release=release).clip_norm == 0.0


def test_an_unknown_release_is_refused():
    with pytest.raises(ConfigError, match=r"deepspeed_release='0\.1'"):
        load(deepspeed_release="0.1")


def test_the_global_or_the_micro_batch_is_needed_unless_overridden():
    for block in ({"zero_optimization": {}}, {"gradient_accumulation_steps": 2}):
        with pytest.raises(ConfigError, match="Either train_batch_size or train_micro_batch_size_per_gpu needs to be"):
            Config.load(block)
    config = Config.load({"gradient_accumulation_steps": 2}, overrides={"batch.micro_size": 3})
    assert config.batch.resolve(4).global_size == 24


@pytest.mark.parametrize("value", [math.inf, None])
def test_never_printing_is_quiet(value):
    assert load({"steps_per_print": value}).monitor.quiet
    assert not load({"steps_per_print": 5}).monitor.quiet
    assert any("steps_per_print=0 " in problem for problem in problems_of({"steps_per_print": 0}))


def test_dotted_keys_are_noted_as_idle():
    config = load({"zero_optimization.reduce_bucket_size": 0.9, "zero_optimization": {"stage": 2}})
    assert config.zero.bucket_numel is None
    assert len(noted(config, "zero_optimization.reduce_bucket_size")) == 1
    assert any("unknown key" in problem for problem in problems_of({"zero_optimisation.stage": 2}))


def test_offloaded_state_is_mapped():
    block = {"device": "nvme", "nvme_path": "/disk", "buffer_count": 5, "ratio": 0.5, "pin_memory": True}
    config = load(
        {
            "zero_optimization": {"stage": 2, "offload_optimizer": block},
            "aio": {"block_size": 1048576, "queue_depth": 6, "single_submit": False},
        }
    )
    offload = config.offload
    assert (offload.state, str(offload.path), offload.buffers, offload.ratio) == ("disk", "/disk", 5, 0.5)
    assert (offload.piece_bytes, offload.threads) == (1048576, 6)
    assert noted(config, "zero_optimization.offload_optimizer.pin_memory")
    assert load({"zero_optimization": {"stage": 1, "cpu_offload": True}}).offload.state == "host"
    assert load({"zero_optimization": {"stage": 1, "cpu_offload": False}}).offload.state == "device"
    for device, state in (("cpu", "host"), ("none", "device"), ("NVMe", "disk")):
        found = load({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": device}}})
        assert found.offload.state == state
    assert any(
        "offload.state" in text
        for text in problems_of({"zero_optimization": {"offload_optimizer": {"device": "tape"}}})
    )


def test_old_boolean_form_of_zero():
    assert load({"zero_optimization": True}).zero.stage == 1
    assert load({"zero_optimization": False}).zero.stage == 0
    assert noted(load({"zero_optimization": True}), "zero_optimization")


ON = [
    ("zero_optimization.zero_quantized_weights", True, False),
    ("zero_optimization.zero_hpz_partition_size", 8, 1),
    ("zero_optimization.mics_shard_size", 4, -1),
    ("zero_optimization.zenflow", {"topk_ratio": 0.1}, None),
    ("pipeline.stages", 4, "auto"),
    ("tensor_parallel.partition_config", {"layer_specs": []}, None),
    ("expert_parallel", {"enabled": True}, {"enabled": False}),
    ("elasticity", {"enabled": True, "micro_batch_sizes": [2]}, {"enabled": False}),
    ("curriculum_learning", {"enabled": True}, {"enabled": False, "min_difficulty": 8}),
    ("progressive_layer_drop", {"enabled": True, "theta": 0.5}, {"enabled": False}),
    (
        "compression_training",
        {"sparse_pruning": {"shared_parameters": {"enabled": True}}},
        {"sparse_pruning": {"shared_parameters": {"enabled": False}}},
    ),
    ("data_efficiency", {"enabled": True}, {"enabled": False, "seed": 1}),
    ("wandb", {"enabled": True}, {"enabled": False}),
    ("comet", {"enabled": True}, {"enabled": False}),
    ("amp", {"enabled": True, "opt_level": "O1"}, {"enabled": False}),
    ("torch_autocast", {"enabled": True}, {"enabled": False}),
    ("sparse_attention", {"mode": "fixed"}, None),
    ("sparse_gradients", True, False),
    ("hybrid_engine", {"enabled": True}, {"enabled": False}),
    ("autotuning", {"enabled": True}, {"enabled": False}),
    ("compile", {"deepcompile": True}, {"deepcompile": False}),
    ("gradient_allreduce_op", "sum", "mean"),
    ("managed_gradient_accumulation", False, True),
    ("fp16.fp16_master_weights_and_grads", True, False),
    ("bf16.bf16_master_weights_and_grads", True, False),
]


def nested(key, value):
    first, _, rest = key.partition(".")
    if not rest:
        return {first: value}
    switch = {"enabled": True} if first in ("fp16", "bf16") else {}
    return {first: {**switch, rest: value}}


@pytest.mark.parametrize(("key", "on", "off"), ON, ids=[key for key, _, _ in ON])
def test_what_is_not_in_this_version_is_refused_by_name_and_noted_when_off(key, on, off):
    found = problems_of(nested(key, on))
    assert any(problem.startswith(f"config: {key}") for problem in found), found
    if key in REMOVED:
        assert any("DeepSpeed 0.19 raises at this key" in problem for problem in problems_of(nested(key, off)))
    assert noted(load(nested(key, off), deepspeed_release="0.16"), key)


def test_tensor_and_sequence_degrees_become_axes_of_the_mesh():
    config = load({"tensor_parallel": {"autotp_size": 2, "dtype": "bf16"}, "sequence_parallel_size": 4})
    assert (config.mesh.tensor, config.mesh.sequence) == (2, 4)
    assert noted(config, "tensor_parallel.dtype")
    off = load({"tensor_parallel": {"tp": {"tp_size": 0}}, "sequence_parallel_size": 1})
    assert (off.mesh.tensor, off.mesh.sequence) == (1, 1)


def test_monitors_share_one_folder():
    board = {"enabled": True, "output_path": "out/", "job_name": "a"}
    monitor = load({"tensorboard": board, "csv_monitor": {"enabled": False}}).monitor
    assert (monitor.folder, monitor.tensorboard, monitor.csv) == (Path("out/a"), True, False)
    both = load({"tensorboard": board, "csv_monitor": {**board, "job_name": "b"}})
    assert both.monitor.csv
    assert "out/b" in noted(both, "csv_monitor")[0]
    assert any("tensorboard.job_name=3" in p for p in problems_of({"tensorboard": {**board, "job_name": 3}}))
    assert load({"flops_profiler": {"enabled": True, "profile_step": 7}}).monitor.profile_step == 7
    assert load({"flops_profiler": {"enabled": False, "profile_step": 7}}).monitor.profile_step is None


AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "fp16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
    "pipeline": {"stages": "auto"},
}
VALUES = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "fp16.enabled": True,
    "optimizer.params.lr": 0.25,
    "scheduler.params.total_num_steps": 9,
    "zero_optimization.reduce_bucket_size": 64,
}


def test_auto_values_are_filled_by_the_caller():
    config = Config.load(AUTO, auto=VALUES)
    assert config.batch.resolve(2).micro_size == 4
    assert (config.precision.kind, config.optimizer.lr, config.zero.bucket_numel) == ("fp16", 0.25, 64)
    origin = next(item for item in explain(config) if item.key == "optimizer.lr")
    assert str(origin.source) == "caller's arguments:optimizer.params.lr"
    assert Config.load(AUTO, expected=VALUES) == config


def test_each_leftover_auto_is_named_and_nothing_else_is():
    with pytest.raises(ConfigError) as caught:
        Config.load(AUTO)
    lines = str(caught.value).splitlines()[1:]
    assert sorted(line.split('="auto"')[0].removeprefix("  - config: ") for line in lines) == sorted(VALUES)


def test_values_of_the_wrong_type_are_named_by_the_key_in_the_file():
    cases = {
        "train_micro_batch_size_per_gpu": "8",
        "gradient_clipping": {"a": 1},
        "prescale_gradients": "yes",
        "zero_optimization": 3,
        "fp16": [True],
        "steps_per_print": "often",
        "vocabulary_size": 1.5,
    }
    for key, value in cases.items():
        found = problems_of({key: value})
        assert any(problem.startswith(f"config: {key}=") for problem in found), (key, found)
    found = problems_of({"zero_optimization": {"reduce_bucket_size": 0.5, "contiguous_gradients": 1}})
    assert any("zero_optimization.reduce_bucket_size=0.5" in problem for problem in found)
    assert any("zero_optimization.contiguous_gradients=1: must be true or false" in problem for problem in found)
    assert any("fp16.enabled='yes'" in problem for problem in problems_of({"fp16": {"enabled": "yes"}}))


def test_parameters_off_the_device_are_mapped_and_share_one_folder():
    param, optimizer = {"device": "nvme", "nvme_path": "/x"}, {"device": "nvme", "nvme_path": "/x"}
    zero = {"stage": 3, "offload_param": {**param, "buffer_size": 1e8}, "offload_optimizer": optimizer}
    offload = load({"zero_optimization": zero}).offload
    assert (offload.parameters, offload.state, str(offload.path)) == ("disk", "disk", "/x")
    assert load({"zero_optimization": {"stage": 3, "cpu_offload_params": True}}).offload.parameters == "host"
    assert str(load({"zero_optimization": {"stage": 3, "offload_param": param}}).offload.path) == "/x"
    zero["offload_optimizer"] = {**optimizer, "nvme_path": "/y"}
    assert any("names another folder; keep one" in problem for problem in problems_of({"zero_optimization": zero}))


def test_activation_checkpoints_are_cut_and_laid_side_by_side_as_the_file_says():
    block = {
        "partition_activations": True,
        "contiguous_memory_optimization": True,
        "number_checkpoints": 8,
        "synchronize_checkpoint_boundary": True,
        "profile": True,
        "cpu_checkpointing": False,
    }
    config = load({"activation_checkpointing": block, "tensor_parallel": {"autotp_size": 2}})
    recompute = config.recompute
    assert recompute is not None and (recompute.partition, recompute.contiguous, recompute.number) == (True, True, 8)
    assert (recompute.synchronize, recompute.profile, recompute.tier) == (True, True, "device")
    assert noted(config, "activation_checkpointing.cpu_checkpointing")
    alone = load({"activation_checkpointing": {"number_checkpoints": 8, "profile": True}})
    assert alone.recompute is None and noted(alone, "activation_checkpointing.number_checkpoints")
    ones = load({"activation_checkpointing": {"partition_activations": True}})
    assert any("no effect, because mesh.tensor is 1" in note for note in ones.notes)
    wrong = problems_of({"activation_checkpointing": {**block, "number_checkpoints": 0}})
    assert any("activation_checkpointing.number_checkpoints" in problem for problem in wrong)


def test_activation_checkpoints_on_the_host_are_mapped():
    config = load({"activation_checkpointing": {"cpu_checkpointing": True, "contiguous_memory_optimization": True}})
    assert config.recompute is not None and config.recompute.tier == "host"
    assert any("blocks that stand several times" in note for note in config.notes)
    assert load({"activation_checkpointing": {"cpu_checkpointing": False}}).recompute is None
    assert any(
        "must be true or false" in p for p in problems_of({"activation_checkpointing": {"cpu_checkpointing": 1}})
    )


def test_underscore_keys_are_carried():
    config = load({"_notes": {"anything": [1]}})
    assert config.private == {"_notes": {"anything": [1]}}
    assert config.notes == ()


def test_a_file_as_lightning_and_accelerate_write_it_loads():
    config = Config.load(
        {
            "activation_checkpointing": {
                "partition_activations": False,
                "cpu_checkpointing": False,
                "contiguous_memory_optimization": False,
                "synchronize_checkpoint_boundary": False,
            },
            "aio": {"block_size": 1048576, "queue_depth": 8, "single_submit": False, "thread_count": 1},
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {
                "stage": 2,
                "contiguous_gradients": True,
                "overlap_comm": True,
                "allgather_partitions": True,
                "reduce_scatter": True,
                "allgather_bucket_size": 200_000_000,
                "reduce_bucket_size": 200_000_000,
                "sub_group_size": 1_000_000_000_000,
                "offload_optimizer": {"device": "none", "nvme_path": None},
            },
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,
            "train_micro_batch_size_per_gpu": 1,
            "steps_per_print": math.inf,
            "bf16": {"enabled": True},
            "fp16": {"enabled": False, "auto_cast": True},
        }
    )
    assert (config.zero.stage, config.zero.bucket_numel, config.clip_norm) == (2, 200_000_000, 0.0)
