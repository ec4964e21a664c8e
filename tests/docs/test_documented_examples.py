"""Every Python example and every command of the documentation runs, in a folder such as a reader would have.

The Python examples of one page run one after the other in one namespace; test bodies run under pytest. Commands run as
they are, except that a training is cut down to two steps of the smallest model on at most two ranks, that `python` has
imported torch already (see `warm_python`), and that targets of make are only looked up: they are what runs these tests.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist

from trilithon.checkpoint import convert
from warm_python import python

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
PROGRAMS = ("trilithon", "torchrun", "python", "make")
LIMIT_S = 150

_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SHORT = "--model nano --steps 2 --max-tokens 20000 --eval-batches 1 --sample-tokens 4 --overwrite --out runs/short"


@dataclass(frozen=True)
class Example:
    """One fenced block, or one command of it; `line` is its place in the page."""

    page: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: Path, *languages: str) -> list[Example]:
    text = page.read_text()
    name = str(page.relative_to(ROOT))
    found = [fence for fence in _FENCE.finditer(text) if fence[1] in languages]
    return [Example(name, text[: fence.start(2)].count("\n") + 1, fence[2]) for fence in found]


def commands() -> list[Example]:
    found = []
    for page in PAGES:
        for block in blocks(page, "sh", "bash", ""):
            joined = block.text.replace("\\\n", " ")
            lines = [line.removeprefix("$ ") for line in joined.splitlines()]
            found += [Example(block.page, block.line, line) for line in lines if line.split(" ")[0] in PROGRAMS]
    return found


PYTHON = {str(page.relative_to(ROOT)): examples for page in PAGES if (examples := blocks(page, "python"))}
COMMANDS = commands()


@pytest.fixture(scope="session")
def what_readers_have(tmp_path_factory):
    """What the pages assume to be there: configurations, a script, text, runs with checkpoints, and our examples."""
    tmp_path = tmp_path_factory.mktemp("reader")
    (tmp_path / "config.json").write_text('{"zero": {"stage": 2}, "optimizer": {"kind": "adamw", "lr": 0.001}}')
    (tmp_path / "zero3.json").write_text('{"zero": {"stage": 3}, "optimizer": {"kind": "adamw", "lr": 0.001}}')
    (tmp_path / "ds_config.json").write_text(json.dumps({"train_micro_batch_size_per_gpu": 4}))
    (tmp_path / "train.py").write_text("import sys; print(sys.argv)\n")
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("docs", "texts"):
        shutil.copytree(ROOT / "docs", tmp_path / name)
    shutil.copytree(ROOT / "tests" / "data" / "deepspeed" / "zero3_bf16", tmp_path / "ds_run")
    for run in ("a", "b"):
        convert(tmp_path / "ds_run", tmp_path / "runs" / run, out_tag="step-00000003")
    return tmp_path


@pytest.fixture
def readers_folder(tmp_path, monkeypatch, what_readers_have):
    """A reader's own folder of that, and the current one."""
    shutil.copytree(what_readers_have, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def a_run(tmp_path_factory):
    """A run of `trilithon train` that has saved its first step, for the pages that continue, export or examine one."""
    folder = tmp_path_factory.mktemp("documented")
    short = _SHORT.replace("--steps 2", "--steps 1").replace("runs/short", str(folder / "books"))
    command = [python(), "-m", "trilithon.cli.main", "train", "--data", str(ROOT / "docs"), *short.split()]
    command += ["--save-every", "1", "--cache", str(folder / "cache"), "--quiet"]
    subprocess.run(command, check=True, timeout=LIMIT_S, env=_environment(), stdout=subprocess.DEVNULL)
    return folder / "books"


@pytest.fixture(scope="session")
def mixtures(tmp_path_factory):
    """Two runs with experts, which are joined here, for the page that joins and prunes them."""
    folder = tmp_path_factory.mktemp("mixtures")
    trilithon = [python(), "-m", "trilithon.cli.main"]
    short = _SHORT.replace("runs/short", str(folder / "first"))
    train = ["train", "--data", str(ROOT / "docs"), "--experts", "4", *short.split(), "--cache", str(folder / "cache")]
    join = ["moe", "aggregate", str(folder / "first"), str(folder / "second"), "--out", str(folder / "both")]
    subprocess.run(
        [*trilithon, *train, "--quiet"], check=True, timeout=LIMIT_S, env=_environment(), stdout=subprocess.DEVNULL
    )
    shutil.copytree(folder / "first", folder / "second")
    subprocess.run([*trilithon, *join], check=True, timeout=LIMIT_S, env=_environment(), stdout=subprocess.DEVNULL)
    return folder


@pytest.mark.parametrize("page", PYTHON)
def test_the_python_examples_of_the_page_run(page, readers_folder, capsys):
    if any(re.search(r"^def test_", example.text, re.MULTILINE) for example in PYTHON[page]):
        source = "\n".join(example.text for example in PYTHON[page])
        (readers_folder / "test_of_the_page.py").write_text(source)
        run = [python(), "-m", "pytest", "-q", "test_of_the_page.py"]
        ended = subprocess.run(run, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=_environment())
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return
    config = blocks(ROOT / page, "json")
    if config:
        (readers_folder / "config.json").write_text(config[0].text)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for example in PYTHON[page]:
        exec(compile("\n" * (example.line - 1) + example.text, page, "exec"), namespace)
    assert not dist.is_initialized(), "an example without ranks made a process group"


@pytest.mark.parametrize("example", COMMANDS, ids=str)
def test_the_command_runs(example, readers_folder, request):
    command = example.text.split("  #")[0].strip()
    if re.search(r"(--resume|checkpoint [a-z-]+) runs/books\b", command):
        shutil.copytree(request.getfixturevalue("a_run"), readers_folder / "runs" / "books")
    if command.startswith("trilithon moe "):
        for name in re.findall(r"runs/(first|second|both)\b", command.split("--out")[0]):
            shutil.copytree(request.getfixturevalue("mixtures") / name, readers_folder / "runs" / name)
    if command.startswith("make"):
        targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        assert set(command.split()[1:]) <= targets
        return
    if re.search(r"\btrain\b(?!\.py)", command):
        command = f"{command} {_SHORT}"
    command = command.replace("--nproc-per-node 4", "--nproc-per-node 2").replace("--nproc 4", "--nproc 2")
    shell = (
        'python() { "$THIS_PYTHON" "$@"; }\n'
        'trilithon() { python -m trilithon.cli.main "$@"; }\n'
        'torchrun() { python -m torch.distributed.run --standalone "$@"; }\n'
        f"{command}\n"
    )
    ended = subprocess.run(
        ["bash", "-c", shell], capture_output=True, text=True, timeout=LIMIT_S, check=False, env=_environment()
    )
    # `doctor` and `compare` answer 1 for a machine or a comparison that is not well; 2 and more is a wrong command
    worst = 1 if re.search(r"^trilithon (doctor|compare)", command) else 0
    assert ended.returncode <= worst, f"{example}: {command}\n{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"
    assert ended.returncode >= 0


def _environment() -> dict[str, str]:
    source = str(ROOT / "src")
    inherited = os.environ.get("PYTHONPATH", "")
    return {
        **{name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")},
        "PYTHONPATH": f"{source}:{inherited}" if inherited else source,
        "THIS_PYTHON": python(),
        "OMP_NUM_THREADS": "1",
    }
