"""One switch says by which release of DeepSpeed a file is read; each behaviour differs as the releases do."""

from __future__ import annotations

from pathlib import Path

import pytest

from trilithon.config import Config
from trilithon.config.deepspeed_release import ENVIRONMENT, REMOVED, behaviour_table, deepspeed_release
from trilithon.config.root import examine
from trilithon.errors import ConfigError

BATCH = {"train_micro_batch_size_per_gpu": 1}
NEW, OLD = "0.19", "0.16"


def scheduler(name, **params):
    return {**BATCH, "scheduler": {"type": name, "params": params}}


def load(block, release):
    return Config.load(block, deepspeed_release=release)


def test_argument_before_environment_before_newest(monkeypatch):
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    assert deepspeed_release() == NEW
    assert Config.load(BATCH).deepspeed_release == NEW
    monkeypatch.setenv(ENVIRONMENT, OLD)
    assert deepspeed_release() == OLD
    assert Config.load(BATCH).deepspeed_release == OLD and Config.load(BATCH).clip_norm == 0.0
    assert Config.load(BATCH, deepspeed_release=NEW).deepspeed_release == NEW
    monkeypatch.setenv(ENVIRONMENT, "1.0")
    with pytest.raises(ConfigError, match=r"TRILITHON_DEEPSPEED_RELEASE='1.0': known are 0.19 and 0.16"):
        Config.load(BATCH)
    with pytest.raises(ConfigError, match=r"deepspeed_release='0.7'"):
        Config.load(BATCH, deepspeed_release="0.7")


def test_a_native_configuration_has_no_release_and_a_copy_keeps_it():
    assert Config.load({"clip_norm": 1.0}).deepspeed_release is None
    assert examine({"clip_norm": 1.0}).deepspeed_release is None
    old = load(BATCH, OLD)
    assert Config.load(old, overrides={"seed": 3}).deepspeed_release == OLD


@pytest.mark.parametrize(("release", "clip"), [(NEW, 1.0), (OLD, 0.0)])
def test_clipping(release, clip):
    assert load(BATCH, release).clip_norm == clip
    assert load({**BATCH, "gradient_clipping": 0.5}, release).clip_norm == 0.5


@pytest.mark.parametrize("name", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
@pytest.mark.parametrize("steps", [0, -1])
def test_warmup_over_no_steps(name, steps):
    block = scheduler(name, warmup_num_steps=steps, **({} if name == "WarmupLR" else {"total_num_steps": 9}))
    assert load(block, OLD).lr_schedule.warmup_num_steps == 2
    with pytest.raises(ConfigError, match=rf"scheduler.params.warmup_num_steps={steps}"):
        load(block, NEW)
    kept = scheduler(name, warmup_num_steps=1, **({} if name == "WarmupLR" else {"total_num_steps": 9}))
    assert load(kept, OLD).lr_schedule.warmup_num_steps == load(kept, NEW).lr_schedule.warmup_num_steps == 1


def test_the_rate_after_warmup():
    assert load(scheduler("WarmupLR"), NEW).lr_schedule.warmup_max_lr is None  # that of the parameter group
    assert load(scheduler("WarmupLR"), OLD).lr_schedule.warmup_max_lr == 0.001
    for release in (NEW, OLD):
        decaying = load(scheduler("WarmupDecayLR", total_num_steps=9), release).lr_schedule
        assert decaying.warmup_max_lr == 0.001
        assert load(scheduler("WarmupLR", warmup_max_lr=0.2), release).lr_schedule.warmup_max_lr == 0.2


def test_stairs_of_a_cycle():
    block = scheduler("OneCycle", cycle_min_lr=0.1, cycle_max_lr=0.2, cycle_first_stair_count=4)
    assert load(block, NEW).lr_schedule.cycle_first_stair_count == 4
    assert load(block, OLD).lr_schedule.cycle_first_stair_count == 0
    assert load(block, OLD).lr_schedule.cycle_second_stair_count is None
    block["scheduler"]["params"]["cycle_second_stair_count"] = 3
    assert load(block, OLD).lr_schedule.cycle_second_stair_count == 0


def test_a_cosine_after_its_end():
    block = scheduler("WarmupCosineLR", total_num_steps=9)
    assert load(block, NEW).lr_schedule.after_total == "hold"
    assert load(block, OLD).lr_schedule.after_total == "swing"
    block["scheduler"]["params"]["after_total"] = "swing"
    with pytest.raises(ConfigError, match="unknown key"):  # ours, and not a parameter of DeepSpeed's
        load(block, NEW)


def test_pinned_memory_is_noted_with_the_releases_default():
    block = {**BATCH, "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
    for release, default in ((NEW, "true"), (OLD, "false")):
        (note,) = [note for note in load(block, release).notes if "pin_memory" in note]
        assert f"left out, which means {default} in DeepSpeed {release}; no effect" in note
    block["zero_optimization"]["offload_param"]["pin_memory"] = False
    assert not [note for note in load(block, NEW).notes if "left out" in note]


@pytest.mark.parametrize("key", sorted(REMOVED))
def test_keys_of_removed_features_raise_even_when_they_are_off(key):
    off = {"mics_shard_size": -1, "mics_hierarchical_params_gather": False, "zeropp_loco_param": None}
    block, _, name = key.rpartition(".")
    plain = {"sparse_gradients": False, "graph_harvesting": False, "sparse_attention": None, "compression_training": {}}
    value = off[name] if block else plain.get(name, {"enabled": False})
    given = {**BATCH, block: {name: value}} if block else {**BATCH, name: value}
    with pytest.raises(ConfigError, match=rf"{key}: DeepSpeed 0.19 raises at this key.*deepspeed_release=\"0.16\""):
        load(given, NEW)
    assert any(note.startswith(f"{key}: no effect") for note in load(given, OLD).notes)


def test_the_table_in_the_docs_is_that_of_the_code():
    page = Path(__file__).parents[3] / "docs" / "deepspeed-config.md"
    assert behaviour_table() in page.read_text()
