"""The optimizer and scheduler blocks of DeepSpeed files: types by name, DeepSpeed's defaults, mistakes by name."""

from __future__ import annotations

import pytest

from trilithon.config import (
    Adagrad,
    Adam,
    AdamW,
    Config,
    Lamb,
    Lion,
    OneBitAdam,
    OneBitLamb,
    Sgd,
    ZeroOneAdam,
    examine,
)

BATCH = {"train_micro_batch_size_per_gpu": 1}


def load(block, **kwargs):
    return Config.load({**BATCH, **block}, **kwargs)


def problems_of(block):
    return [str(problem) for problem in examine({**BATCH, **block}).problems]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"type": "Adam", "params": {"lr": 0.1}}, AdamW(lr=0.1, weight_decay=0)),
        ({"type": "adam", "params": {"adam_w_mode": False, "weight_decay": 0.1}}, Adam(weight_decay=0.1)),
        ({"type": "AdamW"}, AdamW(weight_decay=0)),
        ({"type": "AdamW", "params": {"torch_adam": True}}, AdamW(weight_decay=0.01)),
        (
            {"type": "AdamW", "params": {"betas": [0.8, 0.9], "eps": 1e-6}},
            AdamW(betas=(0.8, 0.9), eps=1e-6, weight_decay=0),
        ),
        ({"type": "SGD", "params": {"momentum": 0.9, "nesterov": True}}, Sgd(lr=1e-3, momentum=0.9, nesterov=True)),
        ({"type": "Lion"}, Lion(lr=1e-3, betas=(0.9, 0.999))),
        ({"type": "Adagrad", "params": {"eps": 1e-9}}, Adagrad(eps=1e-9)),
        ({"type": "Lamb", "params": {"max_coeff": 5, "min_coeff": 0.1}}, Lamb(max_ratio=5, min_ratio=0.1)),
        ({"type": "OneBitAdam"}, OneBitAdam(freeze_step=100_000, bias_correction=False, per_tensor_scaling=False)),
        (
            {"type": "onebitadam", "params": {"freeze_step": 400, "cuda_aware": False, "comm_backend_name": "nccl"}},
            OneBitAdam(freeze_step=400, bias_correction=False, per_tensor_scaling=False),
        ),
        (
            {"type": "OneBitLamb", "params": {"max_coeff": 0.3, "coeff_beta": 0.8, "factor_min": 0.6}},
            OneBitLamb(freeze_step=100_000, bias_correction=False, max_ratio=0.3, coeff_beta=0.8, factor_min=0.6),
        ),
        (
            {"type": "ZeroOneAdam", "params": {"var_freeze_step": 9, "local_step_clipper": 4, "max_grad_norm": 0.0}},
            ZeroOneAdam(var_freeze_step=9, local_step_clipper=4, bias_correction=False, per_tensor_scaling=False),
        ),
    ],
)
def test_optimizers_become_ours_with_deepspeeds_defaults(given, expected):
    assert load({"optimizer": given}).optimizer == expected


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"type": "Adm"}, "optimizer.type='Adm': unknown; did you mean Adam?"),
        ({"type": "OneBitAdam", "params": {"amsgrad": True}}, "AMSGrad is not in this version"),
        ({"type": "OneBitAdam", "params": {"eps_inside_sqrt": True}}, "eps is added outside the root"),
        ({"type": "ZeroOneAdam", "params": {"freeze_step": 3}}, "not a parameter of ZeroOneAdam"),
        ({"type": "Muon"}, "not in this version"),
        ({"type": "RMSprop"}, "pass it yourself to initialize(optimizer=...)"),
        ({"type": 3}, "optimizer.type: 3 (a whole number) must be text"),
        ({"params": {"lr": 1}}, "optimizer.type: missing"),
        ({"type": "Adam", "params": 3}, "optimizer.params=3"),
        ({"type": "Adam", "params": {"max_grad_norm": 1}}, "optimizer.params.max_grad_norm=1: clipping"),
        ({"type": "Adam", "params": {"learning_rate": 1}}, "optimizer.params.learning_rate: unknown key"),
        ({"type": "Adam", "params": {"momentum": 1}}, "optimizer.params.momentum: not a parameter of Adam; sgd"),
        ({"type": "Adam", "params": {"amsgrad": True}}, "optimizer.params.amsgrad=True"),
        ({"type": "Adam", "params": {"lr": "x"}}, "optimizer.params.lr='x' (text): must be a number (it becomes"),
        ({"type": "Adam", "parms": {}}, "optimizer.parms: unknown key"),
        (3, "optimizer=3"),
    ],
)
def test_optimizer_mistakes_are_named(given, part):
    found = problems_of({"optimizer": given})
    assert any(part in problem for problem in found), found


@pytest.mark.parametrize(
    ("name", "kind", "params"),
    [
        ("WarmupLR", "warmup_lr", {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 5}),
        ("WarmupDecayLR", "warmup_decay_lr", {"total_num_steps": 50, "warmup_type": "linear"}),
        ("WarmupCosineLR", "warmup_cosine_lr", {"total_num_steps": 50, "cos_min_ratio": 0.1}),
        ("OneCycle", "one_cycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_first_step_size": 10}),
        ("LRRangeTest", "lr_range_test", {"lr_range_test_min_lr": [0.1, 0.2], "lr_range_test_staircase": True}),
    ],
)
def test_schedulers_become_ours_under_the_same_parameter_names(name, kind, params):
    schedule = load({"scheduler": {"type": name, "params": {**params, "last_batch_iteration": -1}}}).lr_schedule
    assert schedule.kind == kind
    for key, value in params.items():
        assert getattr(schedule, key) == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"type": "WarmupLr"}, "scheduler.type='WarmupLr': unknown; did you mean WarmupLR?"),
        ({"type": "StepLR"}, "scheduler.type='StepLR': unknown"),
        ({"params": {}}, "scheduler.type: missing"),
        ({"type": "WarmupDecayLR"}, "scheduler.params.total_num_steps: missing"),
        ({"type": "WarmupLR", "params": {"total_num_steps": 5}}, "not a parameter of WarmupLR; WarmupDecayLR and"),
        ({"type": "WarmupLR", "params": {"warmup_num_steps": 0}}, "scheduler.params.warmup_num_steps=0"),
        ({"type": "WarmupLR", "params": {"warmup_type": "cubic"}}, "scheduler.params.warmup_type='cubic'"),
        ({"type": "WarmupLR", "params": {"kind": "x"}}, "scheduler.params.kind: unknown key"),
    ],
)
def test_scheduler_mistakes_are_named(given, part):
    found = problems_of({"scheduler": given})
    assert any(part in problem for problem in found), found


def test_schedulers_follow_the_release():
    warm = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": -3}}}
    schedule = load(warm, deepspeed_release="0.16").lr_schedule
    assert (schedule.warmup_num_steps, schedule.warmup_max_lr) == (2, 0.001)
    assert load({"scheduler": {"type": "WarmupLR"}}).lr_schedule.warmup_max_lr is None
