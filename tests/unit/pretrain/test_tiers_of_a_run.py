"""`trilithon train` with state on other tiers: options, the display, the same result, and no file left."""

import io

import pytest
from typer.testing import CliRunner

from trilithon.cli import train
from trilithon.cli.main import app
from trilithon.errors import ConfigError
from trilithon.pretrain import load_pretrain, run
from trilithon.pretrain.progress import StepView, flat_memory, make_display


def test_the_options_reach_the_configuration(monkeypatch):
    seen = []
    monkeypatch.setattr(train, "_train", lambda config, nproc: seen.append(config.engine) or 0)
    options = ["--state-tier", "disk", "--param-tier", "host", "--tier-path", "fast", "--recompute"]
    done = CliRunner().invoke(app, ["train", "--data", "x", "--zero-stage", "3", *options])
    assert done.exit_code == 0, done.output
    CliRunner().invoke(app, ["train", "--data", "x", "--activation-tier", "host"])
    CliRunner().invoke(app, ["train", "--data", "x"])
    cut = ["--tp", "2", "--recompute", "selective", "--partition-activations", "--contiguous-activations"]
    CliRunner().invoke(app, ["train", "--data", "x", *cut])
    recompute = seen[3].recompute
    assert (recompute.policy, recompute.partition, recompute.contiguous) == ("selective", True, True)
    offload = seen[0].offload
    assert (offload.state, offload.parameters, str(offload.path)) == ("disk", "host", "fast")
    assert seen[0].recompute.policy == "full" and seen[1].recompute.tier == "host" and seen[2].recompute is None


def test_a_folder_is_asked_for_before_any_text_is_read():
    with pytest.raises(ConfigError, match="pass --tier-path with a folder on a local disk"):
        load_pretrain(overrides={"data.paths": ["nowhere"], "offload.state": "disk"})


def test_memory_is_shown_by_category_and_tier():
    memory = flat_memory({"device": {"parameters": 2048, "gradients": 0}, "disk": {"parameters": 4096}})
    assert memory == {"parameters": 2048, "gradients": 0, "disk/parameters": 4096}
    stream = io.StringIO()
    make_display(1, every=1, rank=0, quiet=False, stream=stream).step(StepView(1, 1.0, 1.0, 1.0, 1.0, memory))
    assert "mem parameters 2.0 KiB  disk parameters 4.0 KiB" in stream.getvalue()


def test_a_run_on_disk_ends_like_one_on_the_device(tmp_path):
    (tmp_path / "text.txt").write_text("the cat sat on the mat. the dog sat on the log.\n" * 100)
    losses = {}
    for tier in ("device", "disk"):
        overrides = {
            "data.paths": [str(tmp_path / "text.txt")],
            "data.cache": str(tmp_path / "cache"),
            "run.out": str(tmp_path / tier),
            "run.steps": 3,
            "run.eval_batches": 1,
            "run.sample_tokens": 2,
            "model.preset": "nano",
            "model.context": 16,
            "batch.micro_size": 2,
            "monitor.quiet": True,
            "zero.stage": 3,
            "offload.state": tier,
            "offload.parameters": tier,
            "offload.path": str(tmp_path / "tiers"),
            "recompute.tier": "host" if tier == "disk" else "device",
        }
        report = run(load_pretrain(overrides=overrides))
        losses[tier] = (report.train_loss, report.validation_loss)
    assert losses["device"] == losses["disk"]
    assert report.memory["disk/parameters"] > 0 and not (tmp_path / "tiers").exists()
