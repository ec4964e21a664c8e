"""`trilithon check` and the command line around it, run as a user would."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

import trilithon
from trilithon import __version__
from trilithon.cli import main as command_line
from trilithon.config.schema import json_schema
from trilithon.errors import CheckpointError, ConfigError


def call(capsys, *arguments):
    """(exit status, stdout, stderr) of one command in this process."""
    with pytest.raises(SystemExit) as caught:
        command_line.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return caught.value.code, out, err


@pytest.fixture
def ds_file(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text('{"train_batch_size": 24, "zero_optimization": {"stage": 2, "contiguous_gradients": true}}')
    return file


def test_a_good_file_is_explained(capsys, ds_file):
    status, out, err = call(capsys, "check", ds_file, "--world-size", 4)
    assert (status, err) == (0, "")
    rows = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert rows["zero.stage"].split()[1:] == ["2", f"{ds_file}:zero_optimization.stage"]
    assert rows["zero.overlap"].split()[1:] == ["true", "default"]
    assert "derived: gradient_clipping is absent" in rows["clip_norm"]
    assert "zero_optimization.contiguous_gradients: no effect" in out
    assert "Batch on 4 data-parallel ranks: global size 24 = 6 (micro) x 1 (accumulation) x 4" in out


def test_all_problems_are_listed_on_stderr_with_status_1(capsys, tmp_path):
    file = tmp_path / "bad.json"
    file.write_text('{"zero": {"stge": 1}, "clip_norm": "x"}')
    status, out, err = call(capsys, "check", file)
    assert (status, out) == (1, "")
    assert f"{file}: zero.stge: unknown key; did you mean zero.stage?" in err
    assert f"{file}: clip_norm='x' (text): must be a number" in err
    assert err.endswith("2 problems found.\n")


def test_batch_sizes_that_do_not_fit_the_world_are_a_problem(capsys, ds_file):
    status, _, err = call(capsys, "check", ds_file, "--world-size", 5)
    assert status == 1
    assert "5 data-parallel ranks" in err
    assert "nearest sizes that work: 20 and 25" in err
    status, _, err = call(capsys, "check", ds_file, "--world-size", 0)
    assert status == 2 and "greater than or equal to 1" in err


def test_findings_as_json(capsys, ds_file, tmp_path):
    status, out, _ = call(
        capsys, "check", ds_file, "-n", 4, "--json", "--set", "zero.stage=3", "--set", "precision=bf16"
    )
    found = json.loads(out)
    assert (status, found["ok"], found["format"], found["problems"]) == (0, True, "deepspeed", [])
    assert (found["config"]["zero"]["stage"], found["config"]["precision"]["kind"]) == (3, "bf16")
    assert found["origins"]["zero.stage"] == {"kind": "override", "source": "override"}
    assert found["batch"]["micro_size"] == 6
    (tmp_path / "bad.json").write_text('{"seed": -1}')
    status, out, _ = call(capsys, "check", tmp_path / "bad.json", "--json")
    found = json.loads(out)
    assert (status, found["ok"], found["config"], [item["key"] for item in found["problems"]]) == (
        1,
        False,
        None,
        ["seed"],
    )


def test_the_release_and_auto_values_are_options(capsys, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text('{"train_batch_size": "auto"}')
    assert call(capsys, "check", file)[0] == 1
    status, out, _ = call(
        capsys, "check", file, "--auto", "train_batch_size=8", "--deepspeed-release", "0.16", "--json"
    )
    assert (status, json.loads(out)["config"]["clip_norm"]) == (0, 0.0)
    assert call(capsys, "check", file, "--deepspeed-release", "0.1")[0] == 2
    assert call(capsys, "check", file, "--auto", "train_batch_size")[0] == 2


@pytest.mark.parametrize("content", [None, "{", '{"seed": 1, "seed": 2}'])
def test_a_file_that_cannot_be_read_is_one_clean_message(capsys, tmp_path, content):
    file = tmp_path / "broken.json"
    if content is not None:
        file.write_text(content)
    status, _, err = call(capsys, "check", file)
    assert status == 1
    assert err.count(str(file)) == 1
    assert "Traceback" not in err


def test_the_schema_is_printed_and_describes_every_key(capsys):
    status, out, _ = call(capsys, "check", "--schema")
    schema = json.loads(out)
    assert (status, schema) == (0, json_schema())
    assert schema["additionalProperties"] is False
    assert {"type": "string", "enum": ["fp32", "bf16", "fp16"]} in schema["properties"]["precision"]["anyOf"]
    for block in [schema, *schema["$defs"].values()]:
        for name, entry in block["properties"].items():
            assert name == "kind" or entry.get("description"), name


def test_usage_mistakes_have_status_2(capsys):
    for arguments in (["check"], ["chek"], ["check", "--nope"], ["check", "a", "--world-size", "x"]):
        status, _, err = call(capsys, *arguments)
        assert status == 2, arguments
        assert "Usage:" in err


def test_version_and_help(capsys):
    assert call(capsys, "--version")[:2] == (0, f"trilithon {__version__}\n")
    status, out, _ = call(capsys, "--help")
    assert status == 0
    assert "check" in out
    status, out, _ = call(capsys, "check", "--help")
    assert status == 0
    assert "trilithon check ds_config.json --world-size 8" in out


def test_commands_whose_file_is_missing_are_not_listed(capsys, monkeypatch):
    absent = command_line.Entry("trilithon.cli.no_such_file:run", "Not there.")
    monkeypatch.setitem(command_line.COMMANDS, "absent", absent)
    assert "absent" not in call(capsys, "--help")[1]
    assert call(capsys, "absent")[0] == 2


def _fail() -> None:
    """Stands for a command that meets one of our errors."""
    raise CheckpointError("the shard of rank 3 is missing. Copy it back.")


def _interrupt() -> None:
    """Stands for a command stopped with Ctrl-C."""
    raise KeyboardInterrupt


@pytest.fixture
def extra_commands(monkeypatch):
    module = type(sys)("trilithon.cli.extra_for_test")
    module.__spec__ = command_line.find_spec("trilithon.cli.check")
    module.fail, module.interrupt = _fail, _interrupt
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("fail", "interrupt"):
        entry = command_line.Entry(f"{module.__name__}:{name}", "For this test.")
        monkeypatch.setitem(command_line.COMMANDS, name, entry)
    monkeypatch.delenv("TRILITHON_TRACEBACK", raising=False)


@pytest.mark.usefixtures("extra_commands")
def test_our_errors_are_one_message_and_a_traceback_on_request(capsys, monkeypatch):
    message = "trilithon: the shard of rank 3 is missing. Copy it back.\n"
    assert call(capsys, "fail") == (1, "", message)
    monkeypatch.setenv("TRILITHON_TRACEBACK", "0")
    assert call(capsys, "fail") == (1, "", message)
    status, _, err = call(capsys, "--traceback", "fail")
    assert status == 1
    assert "Traceback" in err
    assert "CheckpointError: the shard" in err


@pytest.mark.usefixtures("extra_commands")
def test_an_interrupted_command_has_status_130(capsys):
    assert call(capsys, "interrupt")[0] == 130


def test_ctrl_c_from_outside_has_status_130_and_no_traceback(tmp_path):
    pipe = tmp_path / "never_written"
    os.mkfifo(pipe)
    writer = None
    process = subprocess.Popen(
        [sys.executable, "-m", "trilithon.cli.main", "check", str(pipe)], stderr=subprocess.PIPE, text=True
    )
    try:
        limit = time.monotonic() + 30
        while writer is None and time.monotonic() < limit:  # a pipe opens for writing once the command reads it
            time.sleep(0.05)
            with contextlib.suppress(OSError):
                writer = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        assert writer is not None, "the command never opened its file"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    finally:
        process.kill()
        if writer is not None:
            os.close(writer)
    assert process.returncode == 130
    assert "Traceback" not in err


REFUSED = [
    ({"optimizer": "zero_one_adam", "zero": {"stage": 1}}, "optimizer.kind", "use zero.stage=0"),
    ({"optimizer": "onebit_adam", "zero": {"stage": 2}}, "optimizer.kind", "use zero.stage 0 or 1"),
    ({"optimizer": "onebit_lamb", "zero": {"stage": 1}, "offload": {"state": "host"}}, "offload.state", '"device"'),
    ({"optimizer": "adamw", "offload": {"state": "host"}}, "offload.state", "set zero.stage to 1, 2 or 3"),
    ({"offload": {"state": "host"}}, "offload.state", "set zero.stage to 1, 2 or 3"),
    ({"zero": {"stage": 1}, "offload": {"state": "disk"}}, "offload.state", "name one in offload.path"),
    ({"zero": {"stage": 3}, "offload": {"gradients": "disk"}}, "offload.gradients", "name one in offload.path"),
    ({"zero": {"stage": 1}, "offload": {"parameters": "host"}}, "offload.parameters", "set zero.stage to 3"),
    ({"zero": {"stage": 1}, "offload": {"delayed_update": True}}, "offload.delayed_update", "set offload.state"),
    ({"optimizer": "apmsqueeze", "mesh": {"tensor": 2}}, "optimizer.kind", "such as adamw"),
    ({"optimizer": "onebit_adam", "mesh": {"sequence": 2, "data": 3}}, "optimizer.kind", "such as adamw"),
    ({"mesh": {"pipe": 2}, "zero": {"stage": 3}}, "mesh.pipe", "Use zero.stage 0, 1 or 2 inside the stages"),
    ({"zero": {"stage": 3, "tile_above_numel": 9}, "mesh": {"tensor": 2}}, "zero.tile_above_numel", "one of the two"),
]


@pytest.mark.parametrize(("settings", "key", "way_out"), REFUSED)
def test_what_initialize_refuses_is_a_problem(capsys, tmp_path, settings, key, way_out):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(settings))
    status, out, err = call(capsys, "check", file, "--json")
    found = json.loads(out)
    assert (status, found["ok"], err) == (1, False, "")
    assert [problem["key"] for problem in found["problems"]] == [key]
    assert way_out in found["problems"][0]["text"]
    status, _, err = call(capsys, "check", file)
    assert status == 1 and way_out in err and err.endswith("1 problem found.\n")


@pytest.mark.parametrize("settings", [settings for settings, _, _ in REFUSED if "mesh" not in settings])
def test_initialize_refuses_it_too(settings):
    optimizer = None if "optimizer" in settings else torch.optim.AdamW
    with pytest.raises(ConfigError, match="do not go together"):
        trilithon.initialize(torch.nn.Linear(2, 2), settings, optimizer)


def test_every_conflict_of_a_deepspeed_file_is_told_with_the_key_that_makes_it(capsys, tmp_path):
    zero = {"stage": 2, "offload_optimizer": {"device": "nvme"}}
    settings = {"train_batch_size": 8, "optimizer": {"type": "OneBitAdam"}, "zero_optimization": zero}
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(settings))
    status, _, err = call(capsys, "check", file)
    assert status == 1 and err.endswith("3 problems found.\n"), err
    assert "optimizer onebit_adam needs whole local gradients until the update" in err
    assert f"optimizer.kind comes from {file}:optimizer.type" in err
    assert f"offload.state comes from {file}:zero_optimization.offload_optimizer.device" in err
    assert "name one in offload.path" in err


def test_conflicts_are_found_without_torch(tmp_path):
    file = tmp_path / "config.json"
    file.write_text('{"optimizer": "zero_one_adam", "zero": {"stage": 1}}')
    code = (
        "import sys\nfrom trilithon.cli.main import main\n"
        f"try:\n    main(['check', {str(file)!r}])\nexcept SystemExit as stop:\n    assert stop.code == 1, stop.code\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "use zero.stage=0" in done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["check", "--help"], ["check", "--schema"]])
def test_help_answers_without_torch(arguments):
    code = (
        "import sys\nfrom trilithon.cli.main import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit as stop:\n    assert not stop.code, stop.code\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_the_mesh_is_drawn_without_a_file_and_batches_follow_its_data_axis(capsys, tmp_path):
    status, out, err = call(capsys, "check", "--world-size", 8, "--mesh", "--set", "mesh.tensor=4")
    assert (status, err) == (0, "")
    assert "8 ranks = 1 pipe x 2 data x 1 sequence x 4 tensor" in out
    assert "groups of tensor                  [0, 1, 2, 3] [4, 5, 6, 7]" in out
    file = tmp_path / "mesh.json"
    file.write_text('{"mesh": {"tensor": 2}, "batch": {"global_size": 8}}')
    status, out, _ = call(capsys, "check", file, "--world-size", 8, "--json")
    found = json.loads(out)
    assert found["mesh"] == {"pipe": 1, "data": 4, "sequence": 1, "tensor": 2}
    assert found["batch"]["micro_size"] == 2


def test_the_drawn_stages_are_the_outermost_axis(capsys):
    asked = ("check", "--world-size", 8, "--mesh", "--set", "mesh.pipe=2", "--set", "mesh.tensor=2")
    status, out, err = call(capsys, *asked)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.split()[:1] == ["rank"])
    assert lines[start].split() == ["rank", "pipe", "data", "sequence", "tensor"]
    places = [tuple(map(int, line.split())) for line in lines[start + 1 : start + 9]]
    assert places == [(rank, rank // 4, rank // 2 % 2, 0, rank % 2) for rank in range(8)]
    groups = {line.split("  ")[0]: line.split("  ", 1)[1].strip() for line in lines if "[" in line}
    assert groups["groups of pipe"] == "[0, 4] [1, 5] [2, 6] [3, 7]"  # the same slice of each stage
    assert groups["groups of data"] == groups["ZeRO cuts over data x sequence"] == "[0, 2] [1, 3] [4, 6] [5, 7]"
    assert groups["one norm, one skip decision over"] == "[0, 1, 2, 3, 4, 5, 6, 7]"


def test_a_mesh_that_does_not_fit_is_a_problem_with_a_way_out(capsys):
    status, _, err = call(capsys, "check", "--world-size", 6, "--mesh", "--set", "mesh.tensor=4")
    assert status == 1 and "Start 4 or 8 ranks" in err
    status, _, err = call(capsys, "check", "--mesh")
    assert status == 2 and "--world-size" in err
