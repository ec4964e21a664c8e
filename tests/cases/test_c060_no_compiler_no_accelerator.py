"""C060: without a compiler on PATH and without CUDA, importing builds nothing and training works, offloaded too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

# Runs before anything of ours: notes every process started and every file opened for writing.
WATCH = """
import json, os, sys
started, written = [], []
def hook(event, args):
    if event in ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.system"):
        started.append((event, str(args[:2])))
    if event == "open" and isinstance(args[0], str) and isinstance(args[1], str) and set(args[1]) & set("wax+"):
        if args[0] != os.devnull:
            written.append(args[0])
sys.addaudithook(hook)
"""

IMPORT_ALL = (
    WATCH
    + """
import trilithon
assert "torch" not in sys.modules, "importing the package imported torch"
import importlib, pkgutil
imported = []
for found in pkgutil.walk_packages(trilithon.__path__, "trilithon."):
    if not found.name.endswith(("__main__", "_triton")):  # written in Triton's language, imported when it is asked for
        importlib.import_module(found.name)
        imported.append(found.name)
import torch
print(json.dumps({
    "imported": imported, "started": started, "written": written, "device": torch.cuda.is_initialized(),
    "compilers": [name for name in ("numba", "triton", "torch.utils.cpp_extension") if name in sys.modules],
}))
"""
)

TRAIN = (
    WATCH
    + """
if HIDE_NUMBA:
    sys.modules["numba"] = None
import torch
from torch import nn
import trilithon
values = []
for stage, state in SETTINGS:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    config = {"optimizer": {"kind": "adamw", "lr": 0.01}, "zero": {"stage": stage}, "offload": {"state": state}}
    with trilithon.initialize(model, config) as engine:
        for step in range(2):
            inputs = torch.linspace(-1, 1, 12).view(3, 4) + step
            engine.backward(engine(inputs).square().mean())
            assert engine.step()
    values.append([p.detach().tolist() for p in model.parameters()])
print(json.dumps({"started": started, "written": written, "values": values}))
"""
)


def run(tmp_path: Path, code: str) -> dict:
    bare = tmp_path / "bare"
    bare.mkdir(exist_ok=True)
    keep = {name: os.environ[name] for name in ("PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
    environment = {
        **keep, "PATH": str(bare), "HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_importing_builds_nothing_starts_nothing_and_touches_no_device(tmp_path):
    told = run(tmp_path, IMPORT_ALL)
    assert len(told["imported"]) > 40
    assert told["started"] == []
    assert told["written"] == []
    assert told["compilers"] == []
    assert told["device"] is False


@pytest.mark.parametrize("hide_numba", [False, True], ids=["as-installed", "without-numba"])
def test_two_steps_train_without_compiler_and_without_accelerator(tmp_path, hide_numba):
    settings = [(0, "device"), (3, "device"), (1, "host")]
    code = TRAIN.replace("SETTINGS", repr(settings)).replace("HIDE_NUMBA", str(hide_numba))
    told = run(tmp_path, code)
    assert told["started"] == []
    if hide_numba:
        assert told["written"] == []
    expected = plain_torch()
    for (stage, state), values in zip(settings, told["values"], strict=True):
        for value, reference in zip(values, expected, strict=True):
            # two steps of Adam move each weight by at most 2 lr; a few roundings of fp32 in gradients of order 1
            off = (torch.tensor(value) - reference).abs() - (1e-6 + 1e-5 * reference.abs())
            assert off.max() <= 0, (stage, state)


def plain_torch() -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(2):
        optimizer.zero_grad()
        model(torch.linspace(-1, 1, 12).view(3, 4) + step).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]
