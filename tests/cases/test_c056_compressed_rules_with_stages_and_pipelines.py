"""A compressed rule trains at the stages that the table of the engine lists, and is refused by name at all others."""

import pytest
import torch.distributed as dist

import trilithon
from trilithon.config import Config
from trilithon.engine.capabilities import refusals
from trilithon.errors import ConfigError
from trilithon.testing import ranks
from trilithon.testing.engine_run import train_on_engine
from trilithon.testing.models import TinyGPT
from trilithon.testing.parity import token_batches

RULES = {
    "onebit_adam": {"lr": 3e-3, "freeze_step": 6},
    "onebit_lamb": {"lr": 0.02, "freeze_step": 6},
    "zero_one_adam": {"lr": 3e-3, "var_freeze_step": 6},
    "apmsqueeze": {"lr": 3e-3, "freeze_step": 6},
}
REFUSED = [(kind, stage) for kind in RULES for stage in (1, 2, 3) if stage > 1 or kind == "zero_one_adam"]


@ranks(2)
@pytest.mark.parametrize("kind", RULES)
def test_allowed_stages_train(world_size, kind):
    parent = "lamb" if kind == "onebit_lamb" else "adamw"
    batches = token_batches(1, 12) * 16
    plain = train_on_engine(
        TinyGPT, batches, {"optimizer": {"kind": parent, "lr": RULES[kind]["lr"], "weight_decay": 0.0}}
    )
    for stage in (0, 1):
        if (kind, stage) in REFUSED:
            continue
        run = train_on_engine(TinyGPT, batches, {"zero": {"stage": stage}, "optimizer": {"kind": kind, **RULES[kind]}})
        assert run.losses[:6] == plain.losses[:6]
        learnt = plain.losses[0] - plain.losses[-1]
        assert run.losses[0] - run.losses[-1] > 0.8 * learnt, (stage, run.losses[-1], plain.losses[-1])


@pytest.mark.parametrize(("kind", "stage"), REFUSED)
def test_other_stages_are_refused_before_any_process_group(kind, stage):
    model = TinyGPT()
    with pytest.raises(ConfigError, match=f"optimizer {kind} needs whole .* use zero.stage"):
        trilithon.initialize(model, {"zero": {"stage": stage}, "optimizer": {"kind": kind, **RULES[kind]}})
    assert not dist.is_initialized()


@pytest.mark.parametrize("name", ["OneBitAdam", "OneBitLamb", "ZeroOneAdam"])
def test_deepspeed_files_say_the_same(name):
    file = {"train_batch_size": 4, "optimizer": {"type": name, "params": {"lr": 1e-3}}}
    assert Config.load(file).optimizer is not None
    with pytest.raises(ConfigError, match=r"use zero\.stage"):
        trilithon.initialize(TinyGPT(), {**file, "zero_optimization": {"stage": 2}})
    with pytest.raises(ConfigError, match="it is num_stages of PipelineModule"):
        Config.load({**file, "pipeline": {"stages": 2}})


@pytest.mark.parametrize(("kind", "stage"), [(kind, 0) for kind in RULES])
def test_pipelines_are_refused_by_name(kind, stage):
    settings = {"zero": {"stage": stage}, "mesh": {"pipe": 2}, "optimizer": {"kind": kind, **RULES[kind]}}
    told = [refusal.text for refusal in refusals(Config.load(settings))]
    assert len(told) == 1 and f"optimizer {kind} exchanges gradients" in told[0] and "mesh.pipe=2" in told[0]


@pytest.mark.parametrize("kind", ["onebit_adam", "onebit_lamb", "apmsqueeze"])
def test_state_off_the_device_is_refused(kind):
    config = {"zero": {"stage": 1}, "offload": {"state": "host"}, "optimizer": {"kind": kind, **RULES[kind]}}
    with pytest.raises(ConfigError, match="compressed rules keep their state there"):
        trilithon.initialize(TinyGPT(), config)
    assert not dist.is_initialized()
