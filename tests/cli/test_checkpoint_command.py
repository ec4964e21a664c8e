from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import trilithon
from trilithon.cli.checkpoint import app
from trilithon.cli.main import app as whole_app
from warm_python import python

GOLDEN = Path(__file__).parents[1] / "data" / "deepspeed"


def call(*arguments):
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


def test_the_subcommands_are_listed_without_importing_torch():
    program = "import sys; from trilithon.cli.main import main\ntry: main(['checkpoint', '--help'])\nfinally: "
    program += "print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("False")
    for name in ("inspect", "verify", "diff", "export", "convert", "prune", "verify-resume"):
        assert f"\n  {name}" in done.stdout


@pytest.mark.parametrize("name", ["inspect", "verify", "diff", "export", "convert", "prune"])
def test_every_subcommand_shows_examples(name):
    done = CliRunner().invoke(whole_app, ["checkpoint", name, "--help"])
    assert done.exit_code == 0 and f"\n    trilithon checkpoint {name} " in done.output


def test_inspect_tells_who_wrote_what():
    done = call("inspect", GOLDEN / "zero3_bf16", "--names")
    assert done.exit_code == 0
    for text in (
        "step 3",
        "DeepSpeed 0.19.8 on 2 ranks, ZeRO stage 3, bf16",
        "tied: head.weight is embed.weight",
        "group 0: 2 parameters, lr=0.01, weight_decay=0.1",
        "client state: epoch, note",
        "11x5",
    ):
        assert text in done.output, done.output


def test_inspect_as_json_is_one_object():
    found = json.loads(call("inspect", GOLDEN / "zero1_fp16", "--json").output)
    assert (found["format"], found["step"], found["world_size"], found["zero_stage"]) == ("deepspeed", 3, 2, 1)
    assert found["parts"]["master"] == {"tensors": 6, "elements": 108, "bytes": 432, "dtypes": ["float32"]}
    assert found["state"]["loss_scale"] == 256.0 and found["state"]["counters"]["steps"] == 3
    assert "tensors" not in found


def test_verify_ends_with_0_1_or_2(tmp_path):
    call("convert", GOLDEN / "zero1_fp32", tmp_path)
    assert call("verify", tmp_path).exit_code == 0
    payload = next(tmp_path.glob("*/data*"))
    raw = bytearray(payload.read_bytes())
    raw[200] ^= 1
    payload.write_bytes(raw)
    damaged = call("verify", tmp_path, "--all")
    assert damaged.exit_code == 1 and payload.name in damaged.output
    assert damaged.output.rstrip().endswith(": 1 problem")
    missing = call("verify", tmp_path / "nothing")
    assert missing.exit_code == 2 and "holds no checkpoint" in missing.output


def test_diff_ends_with_0_1_or_2(tmp_path):
    assert call("diff", GOLDEN / "zero1_fp32", GOLDEN / "zero3_fp32").exit_code == 0  # the same training, cut otherwise
    apart = call("diff", GOLDEN / "zero1_fp32", GOLDEN / "zero3_bf16", "--part", "master")
    assert apart.exit_code == 1 and "master/embed.weight: first at [0, 0]" in apart.output
    found = json.loads(call("diff", GOLDEN / "zero1_fp32", GOLDEN / "zero3_bf16", "--json").output)
    assert {one["part"] for one in found} >= {"master", "exp_avg"}
    assert call("diff", GOLDEN / "zero1_fp32", tmp_path).exit_code == 2
    assert call("diff", GOLDEN / "zero1_fp32").exit_code == 2


def test_export_and_what_it_refuses(tmp_path):
    done = call("export", GOLDEN / "zero2_bf16", tmp_path, "--dtype", "bf16", "--max-shard-size", "0.2KB")
    assert done.exit_code == 0 and "model.safetensors.index.json" in done.output
    weights = {}
    for path in tmp_path.glob("*.safetensors"):
        weights |= load_file(path)
    assert weights["head.weight"].dtype == torch.bfloat16 and weights["seen"].dtype == torch.int64
    done = call("export", GOLDEN / "zero2_bf16", tmp_path / "bin", "--format", "bin", "--trained-only")
    assert done.exit_code == 0 and "pytorch_model.bin" in done.output
    assert torch.load(tmp_path / "bin" / "pytorch_model.bin")["head.weight"].dtype == torch.float32
    wrong = call("export", GOLDEN / "zero2_bf16", tmp_path, "--max-shard-size", "5 potatoes")
    assert wrong.exit_code == 2 and "no size such as 5GB" in wrong.output
    again = subprocess.run(
        [python(), "-m", "trilithon.cli.main", "checkpoint", "export", GOLDEN / "zero2_bf16", tmp_path],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert again.returncode == 1 and again.stderr.startswith("trilithon: ") and "already" in again.stderr


def test_convert_then_prune(tmp_path):
    for name in ("a", "b", "c"):
        assert call("convert", GOLDEN / "zero3_fp32", tmp_path, "--out-tag", name).exit_code == 0
    assert "would go: a, b" in call("prune", tmp_path, "--keep", 1, "--dry-run").output
    assert "removed: a, b" in call("prune", tmp_path, "--keep", 1).output
    assert call("prune", tmp_path, "--keep", 1).output.strip() == "nothing to remove"
    assert call("verify", tmp_path).exit_code == 0
    assert call("prune", tmp_path / "nothing", "--keep", 1).exit_code == 2
    assert call("prune", tmp_path, "--keep", 0).exit_code == 2


def test_a_hostile_file_gives_a_message_and_no_traceback(tmp_path):
    shutil.copytree(GOLDEN / "zero0_fp32", tmp_path / "run")
    path = tmp_path / "run" / "global_step3" / "mp_rank_00_model_states.pt"
    torch.save({"module": {}, "other": Path("x")}, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)
    done = call("verify", tmp_path / "run")
    assert done.exit_code == 1 and "not plain data" in done.output and "Traceback" not in done.output


def test_a_training_run_stands_for_its_checkpoints(tmp_path):
    engine = trilithon.initialize(torch.nn.Linear(2, 1), {"optimizer": "sgd"})
    with engine:
        engine.save(tmp_path / "run" / "checkpoints")
    done = call("inspect", tmp_path / "run")
    assert done.exit_code == 0 and str(tmp_path / "run" / "checkpoints") in done.output.replace("\n", "")
    assert call("verify", tmp_path / "run").exit_code == 0
    assert call("export", tmp_path / "run", tmp_path / "out").exit_code == 0
    assert call("verify", tmp_path).exit_code == 2
