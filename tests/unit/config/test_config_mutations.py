"""Damaged configurations: each of many random mutations is accepted, or refused by an error that names the key."""

from __future__ import annotations

import copy
import math
import random

import pytest

from trilithon.config import Config, explain
from trilithon.config.deepspeed_keys import TABLE
from trilithon.config.deepspeed_rules import table_keys
from trilithon.config.naming import every_key
from trilithon.errors import ConfigError

NATIVE = {
    "seed": 1,
    "batch": {"global_size": 32, "micro_size": 4},
    "precision": {"kind": "fp16", "window": 100, "hysteresis": 2},
    "zero": {"stage": 3, "bucket_numel": 1000, "overlap": True, "unit_classes": ["Block"], "comm_dtype": "bf16"},
    "comm": {"wait_limit_s": 10.0, "backend": "gloo"},
    "optimizer": {"kind": "adamw", "lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1},
    "lr_schedule": {"kind": "cosine", "total_steps": 100, "warmup_steps": 10},
    "clip_norm": 1.0,
    "monitor": {"folder": "runs", "every": 5, "csv": True},
}
DEEPSPEED = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 1.0,
    "steps_per_print": 10,
    "prescale_gradients": False,
    "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": 5e8,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "stage3_prefetch_bucket_size": 1000,
        "offload_optimizer": {"device": "none", "pin_memory": True},
    },
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.999], "weight_decay": 0.01}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 100, "warmup_num_steps": 10}},
    "tensorboard": {"enabled": True, "output_path": "out", "job_name": "job"},
    "activation_checkpointing": {"partition_activations": False},
}
JUNK = [
    *(None, True, False, 0, -1, 1, 2.5, -0.0, 1e308, 2**31, 2**63, 10**400, 10**5000, math.inf, -math.inf, math.nan),
    *("", "auto", "null", "x" * 500, "\0", "zero", [], {}, [[]], [None], {"a": {"b": [{}]}}, {"kind": "adam"}),
    *(
        {"enabled": "yes"},
        {"kind": []},
        {None: 1},
        {10**5000: 1},
        [math.nan, "x"],
        ("a",),
        b"bytes",
        object(),
        {1, 2},
        3 + 4j,
    ),
]


def blocks_of(tree):
    """Every block of a nested dict, itself first."""
    yield tree
    for value in tree.values():
        if isinstance(value, dict):
            yield from blocks_of(value)


def misspelt(name, rng):
    position = rng.randrange(len(name))
    change = rng.choice(["drop", "double", "swap", "replace"])
    if change == "drop" and len(name) > 1:
        return name[:position] + name[position + 1 :]
    if change == "double":
        return name[:position] + name[position] + name[position:]
    if change == "swap" and position + 1 < len(name):
        return name[:position] + name[position + 1] + name[position] + name[position + 2 :]
    return name[:position] + "q" + name[position + 1 :]


def mutate(tree, rng):
    """A damaged copy, what was done, and the name of the key that it was done to."""
    tree = copy.deepcopy(tree)
    block = rng.choice([block for block in blocks_of(tree) if any(isinstance(name, str) and name for name in block)])
    name = rng.choice([name for name in block if isinstance(name, str) and name])
    action = rng.choice(["rename", "junk", "drop", "move", "add"])
    if action == "rename":
        new = misspelt(name, rng)
        block[new] = block.pop(name)
        return tree, action, new
    if action == "junk":
        block[name] = rng.choice(JUNK)
        return tree, action, name
    if action == "drop":
        del block[name]
        return tree, action, name
    if action == "move":
        other = rng.choice(list(blocks_of(tree)))
        other[name] = copy.deepcopy(block[name]) if other is not block else block[name]
        return tree, action, name
    new = rng.choice(["extra", "Stage", "kind ", "zero.stage", "träge", "x" * 300, "a.b.c", None, 10**5000])
    block[new] = rng.choice(JUNK)
    return tree, action, new


@pytest.mark.parametrize("valid", [NATIVE, DEEPSPEED], ids=["native", "deepspeed"])
def test_damaged_configurations_are_accepted_or_refused_by_name(valid):
    rng = random.Random(20)
    known = {name for name, _ in [*every_key(Config), *table_keys(TABLE)]}
    assert isinstance(Config.load(valid), Config)
    outcomes = {"accepted": 0, "refused": 0}
    for count in range(500):
        tree, action, name = mutate(valid, rng)
        for _ in range(count % 3):  # further damage, which may undo or hide the first
            tree, _, _ = mutate(tree, rng)
            action = "several"
        before = copy.copy(tree)
        try:
            config = Config.load(tree)
        except ConfigError as error:
            outcomes["refused"] += 1
            text = str(error)
            assert text.strip()
            if action in ("rename", "junk"):
                assert name[:40] in text, (action, name, text)
        else:
            outcomes["accepted"] += 1
            assert explain(config)
            assert action != "rename" or name in known or name.startswith("_"), (name, "was silently accepted")
        assert tree == before or action == "junk"
    assert min(outcomes.values()) > 20, outcomes


@pytest.mark.parametrize("valid", [NATIVE, DEEPSPEED], ids=["native", "deepspeed"])
def test_damaged_overrides_and_caller_values_are_accepted_or_refused(valid):
    rng = random.Random(21)
    places = [place for _, place in [*every_key(Config), *table_keys(TABLE)]]
    for _ in range(200):
        key, value = rng.choice(places), rng.choice(JUNK)
        argument = rng.choice(["overrides", "auto", "expected"])
        try:
            Config.load(valid, **{argument: {key: value}})
        except ConfigError as error:
            assert str(error)
