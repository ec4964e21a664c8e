"""Every way to call initialize, and what is said of calls that mean nothing."""

from __future__ import annotations

import argparse
import base64
import json
from functools import partial

import pytest
import torch
from torch import nn

from trilithon.compat import deepspeed
from trilithon.compat.deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from trilithon.compat.deepspeed.runtime.lr_schedules import WarmupLR
from trilithon.config.deepspeed_tolerant import tolerant
from trilithon.errors import ConfigError

BLOCK = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}}
initialize = partial(deepspeed.initialize, dist_init_required=False)


def close_after(engine: deepspeed.DeepSpeedEngine) -> None:
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
    assert engine.global_steps == 1
    engine.destroy()


@pytest.mark.parametrize("way", ["config", "config_params", "path", "args", "base64", "old args"])
def test_a_configuration_comes_in_every_form(way, tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")  # else it is taken from the arguments, and stays
    path = tmp_path / "ds.json"
    path.write_text("// comments are fine\n" + json.dumps(BLOCK))
    ways = {
        "config": {"config": BLOCK},
        "config_params": {"config_params": BLOCK},
        "path": {"config": str(path)},
        "base64": {"config": base64.urlsafe_b64encode(json.dumps(BLOCK).encode()).decode()},
        "args": {"args": argparse.Namespace(deepspeed_config=str(path), local_rank=0)},
        "old args": {"args": argparse.Namespace(deepspeed_config=None, deepscale_config=str(path))},
    }
    engine, optimizer, _, _ = initialize(model=nn.Linear(4, 2), **ways[way])
    assert type(engine.basic_optimizer).__name__ == "FusedAdam" and optimizer.param_groups[0]["lr"] == 0.1
    assert engine.config == BLOCK
    close_after(engine)


def test_parameters_may_come_in_groups_or_from_a_generator_that_runs_once():
    net = nn.Linear(4, 2)
    net.bias.requires_grad = False
    engine, *_ = initialize(model=net, model_parameters=(p for p in net.parameters() if p.requires_grad), config=BLOCK)
    assert [len(group["params"]) for group in engine.basic_optimizer.param_groups] == [1]
    close_after(engine)
    other = nn.Linear(4, 2)
    groups = [{"params": [other.weight], "lr": 0.3}, {"params": [other.bias]}]
    engine, *_ = initialize(model=other, model_parameters=groups, config=BLOCK)
    assert engine.get_lr() == [0.3, 0.1] and engine.get_mom() == [(0.9, 0.999)] * 2
    close_after(engine)


@pytest.mark.parametrize("stage", [0, 2])
def test_optimizer_and_scheduler_may_be_functions(stage):
    block = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}}
    engine, _, _, scheduler = initialize(
        model=nn.Linear(4, 2),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.5),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1),
        config=block,
    )
    assert isinstance(engine.basic_optimizer, torch.optim.SGD) and scheduler.optimizer is engine.basic_optimizer
    close_after(engine)
    assert engine.get_lr() == pytest.approx([0.05])


def test_the_callers_optimizer_and_scheduler_win_over_those_of_the_configuration():
    net = nn.Linear(4, 2)
    own = torch.optim.SGD(net.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(own, 1)
    block = {**BLOCK, "scheduler": {"type": "WarmupLR"}}
    engine, _, _, returned = initialize(model=net, optimizer=own, lr_scheduler=schedule, config=block)
    assert engine.basic_optimizer is own and returned is schedule
    close_after(engine)


@pytest.mark.parametrize("name", ["RMSprop", "NAdam", "SGD"])
def test_optimizers_and_schedulers_of_torch_are_found_by_name(name):
    block = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": name, "params": {"lr": 0.25}},
        "scheduler": {"type": "ExponentialLR", "params": {"gamma": 0.5}},
    }
    engine, _, _, scheduler = initialize(model=nn.Linear(4, 2), config=block)
    assert type(engine.basic_optimizer) is getattr(torch.optim, name)
    assert isinstance(scheduler, torch.optim.lr_scheduler.ExponentialLR)
    close_after(engine)
    assert engine.get_lr() == [0.125]


@pytest.mark.parametrize(
    ("name", "offload", "kind"),
    [
        ("AdamW", "none", "FusedAdam"),
        ("Adam", "cpu", "DeepSpeedCPUAdam"),
        ("Lion", "cpu", "DeepSpeedCPULion"),
        ("Lamb", "none", "FusedLamb"),
        ("Adagrad", "none", "DeepSpeedCPUAdagrad"),
        ("OneBitAdam", "none", "OnebitAdam"),
    ],
)
def test_the_class_of_a_named_optimizer_tells_where_its_state_rests(name, offload, kind):
    zero = {"stage": 1, "offload_optimizer": {"device": offload, "nvme_path": "none"}}
    block = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": name}, "zero_optimization": zero}
    engine, *_ = initialize(model=nn.Linear(4, 2), config=block)
    assert type(engine.basic_optimizer).__name__ == kind
    close_after(engine)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"config": BLOCK}, "nothing to train; pass a torch module"),
        ({"model": nn.Linear(4, 2)}, "pass config= .* --deepspeed_config FILE"),
        (
            {"model": nn.Linear(4, 2), "config": BLOCK, "args": argparse.Namespace(deepspeed_config="x.json")},
            "given twice: by config= and by --deepspeed_config",
        ),
        ({"model": nn.Linear(4, 2), "config": {"gradient_accumulation_steps": 2}}, "needs to be provided"),
        (
            {
                "model": nn.Linear(4, 2),
                "config": {
                    "train_batch_size": 5, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2
                },
            },
            "^Check batch related parameters",
        ),
        (
            {
                "model": nn.Linear(4, 2),
                "config": {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}},
            },
            "zero stage 2 requires an optimizer",
        ),
    ],
)  # fmt: skip
def test_arguments_that_deepspeed_asserts_are_assertion_errors(arguments, text):
    with pytest.raises(AssertionError, match=text):
        initialize(**arguments)


def test_a_torch_scheduler_needs_the_optimizer_that_it_drives():
    net = nn.Linear(4, 2)
    schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(net.parameters(), lr=1), 1)
    with pytest.raises(AssertionError, match="without the optimizer that it drives"):
        initialize(model=net, lr_scheduler=schedule, config=BLOCK)


@pytest.mark.parametrize(
    ("block", "text"),
    [
        ({"zero_optimization": {"stage": 1, "foo": 1}}, "zero_optimization.foo"),
        ({"optimizer": {"type": "Foo"}}, "optimizer.type='Foo'"),
        ({"optimizer": {"type": "Muon"}}, "not in this version"),
        ({"gradient_clipping": "auto"}, "gradient_clipping"),
        ({"elasticity": {"enabled": False}}, "elasticity"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "both true"),
    ],
)
def test_a_configuration_that_cannot_be_carried_out_is_refused_by_name(block, text):
    with pytest.raises(DeepSpeedConfigError, match=text) as caught:
        initialize(model=nn.Linear(4, 2), config={**BLOCK, **block})
    assert isinstance(caught.value, ConfigError) and isinstance(caught.value, ValueError)


def test_what_is_neither_a_dict_nor_a_path_is_a_value_error():
    with pytest.raises(ValueError, match="got 5"):
        initialize(model=nn.Linear(4, 2), config=5)


def test_a_mpu_that_cuts_the_model_is_refused_and_one_that_does_not_is_kept():
    class Grid:
        def __init__(self, size: int) -> None:
            self.size = size

        def get_model_parallel_world_size(self) -> int:
            return self.size

    with pytest.raises(AssertionError, match=r"mpu cuts the model.*mesh\.tensor"):
        initialize(model=nn.Linear(4, 2), config=BLOCK, mpu=Grid(2))
    alone = Grid(1)
    engine, *_ = initialize(model=nn.Linear(4, 2), config=BLOCK, mpu=alone)
    assert engine.mpu is alone
    close_after(engine)


def test_what_programs_send_along_is_tolerated_and_the_dict_is_left_as_it_was():
    """Dotted and unknown keys, "auto" in typed sections, keys of untyped sections, infinity: see accelerate and trl."""
    block = {
        **BLOCK,
        "steps_per_print": float("inf"),
        "msamp": {"enabled": False, "opt_level": "O1"},
        "zero_optimization.reduce_bucket_size": 0.5,
        "something_of_the_programs_own": {"a": 1},
        "zero_optimization": {
            "stage": 2,
            "reduce_bucket_size": "auto",
            "offload_optimizer": {"device": "none", "nvme_path": None},
            "offload_param": {"device": "none", "nvme_path": "/nowhere"},
            "stage3_max_live_parameters": 1e9,
        },
        "bf16": {"enabled": "auto"},
        "aio": {"thread_count": 1, "block_size": 1048576},
        "checkpoint": {"load_universal": True, "unknown": 1},
        "activation_checkpointing": {"partition_activations": True},
    }
    before = json.dumps(block)
    engine, *_ = initialize(model=nn.Linear(4, 2), config=block)
    assert json.dumps(block) == before and engine.zero_optimization_stage() == 2 and engine.load_universal_checkpoint()
    assert engine.steps_per_print() == float("inf")
    close_after(engine)
    _, left_out = tolerant(block)
    assert set(left_out) == {
        "zero_optimization.reduce_bucket_size", "something_of_the_programs_own", "bf16.enabled",
        "checkpoint.load_universal", "checkpoint.unknown", "activation_checkpointing",
        "zero_optimization.offload_optimizer.nvme_path", "zero_optimization.offload_param.nvme_path",
    }  # fmt: skip


def test_the_release_decides_the_default_of_clipping_and_a_key_of_the_block_decides_the_release(monkeypatch):
    assert DeepSpeedConfig(BLOCK).gradient_clipping == 1.0
    assert DeepSpeedConfig({**BLOCK, "_deepspeed_release": "0.16"}).gradient_clipping == 0.0
    monkeypatch.setenv("TRILITHON_DEEPSPEED_RELEASE", "0.16")
    old = DeepSpeedConfig(BLOCK)
    assert (old.release, old.gradient_clipping) == ("0.16", 0.0)


def test_a_configured_schedule_is_an_object_over_the_groups():
    block = {**BLOCK, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.4, "warmup_num_steps": 2}}}
    engine, _, _, scheduler = initialize(model=nn.Linear(4, 2), config=block)
    assert isinstance(scheduler, WarmupLR) and engine.lr_scheduler is scheduler and engine.get_lr() == [0.0]
    assert (engine.scheduler_name(), engine.optimizer_name()) == ("WarmupLR", "FusedAdam")
    close_after(engine)


def test_a_parser_gets_the_flags():
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", "a.json"])
    assert args.deepspeed and args.deepspeed_config == "a.json"
