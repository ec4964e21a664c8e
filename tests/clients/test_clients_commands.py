"""Scripts started the way users start them: by the runner, by launchers, and with the shim installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import ds_files
import pytest
from launching import SCRIPTS, environment
from published import Published

SHIM = os.environ.get("CLIENTS_SHIM")  # the folder that ./shim was installed into, for `make test-clients`
SHIM_FIRST = os.pathsep.join(filter(None, (SHIM, os.environ.get("PYTHONPATH"))))
PYTHON = sys.executable


def run(command: list[str], folder: Path, **env: str) -> None:
    done = subprocess.run(
        command, cwd=folder, env=environment(**env), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"


def losses_of(folder: Path) -> list[float]:
    losses: list[float] = json.loads((folder / "report.json").read_text())["losses"]
    return losses


def script(published: Published, folder: Path, world: int) -> list[str]:
    config = ds_files.write(folder, ds_files.for_a_loop(2, world, 2 // world))
    arguments = ["--tokenizer", published.llama, "--text", published.text, "--output_dir", folder]
    arguments += ["--deepspeed", "--deepspeed_config", config]
    return [str(SCRIPTS / "deepspeed_train.py"), *map(str, arguments)]


def test_every_way_to_start_trains_the_same(published: Published, tmp_path: Path) -> None:
    """One process with accumulation, or two: the same samples in the same updates."""
    starts = {
        "runner": ([PYTHON, "-m", "trilithon.compat.deepspeed"], 1, {}),
        "launch": ([PYTHON, "-m", "trilithon.cli.main", "launch", "--deepspeed", "--num_gpus", "2"], 2, {}),
        "torchrun": (
            [
                PYTHON,
                "-m",
                "trilithon.compat.deepspeed",
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node=2",
            ],
            2,
            {},
        ),
    }
    losses = {}
    for name, (command, world, env) in starts.items():
        folder = tmp_path / name
        run([*command, *script(published, folder, world)], folder, **env)
        losses[name] = losses_of(folder)
    assert losses["launch"] == pytest.approx(losses["runner"], rel=1e-5)
    assert losses["torchrun"] == pytest.approx(losses["launch"], rel=1e-9)


def test_the_shim_serves_scripts_that_know_nothing_of_it(published: Published, tmp_path: Path) -> None:
    """`accelerate launch` starts plain Python processes; they find `deepspeed` and its metadata on their path."""
    assert SHIM, "CLIENTS_SHIM names no folder: run `make test-clients`, or install ./shim with pip --target"
    command = [
        PYTHON,
        "-m",
        "accelerate.commands.launch",
        "--use_deepspeed",
        "--zero_stage",
        "2",
        "--num_machines",
        "1",
    ]
    command += ["--num_processes", "2", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    arguments = ["--model", published.llama, "--text", published.text, "--output_dir", tmp_path, "--zero_stage", 2]
    run([*command, str(SCRIPTS / "accelerate_finetune.py"), *map(str, arguments)], tmp_path, PYTHONPATH=SHIM_FIRST)
    assert losses_of(tmp_path)[-1] < losses_of(tmp_path)[0]

    told = 'import importlib.metadata as m, deepspeed; print(m.version("deepspeed"), deepspeed.__name__)'
    shown = subprocess.run(
        [PYTHON, "-c", told],
        env=environment(PYTHONPATH=SHIM_FIRST),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert shown.stdout.split() == ["0.19.8+trilithon", "trilithon.compat.deepspeed"]
