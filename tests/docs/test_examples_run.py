"""Every script in examples/ runs as its first lines say, alone and on two ranks, and says what it did."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
from pathlib import Path

import pytest

from trilithon.testing import run_ranks
from warm_python import python

ROOT = Path(__file__).parents[2]
APART = ("compare_script.py", "multilingual_moe.py")  # with tests of their own: they take arguments
SCRIPTS = sorted(path for path in (ROOT / "examples").glob("*.py") if path.name not in APART)
LIMIT_S = 150


def run(folder: Path, *arguments: str) -> str:
    source = f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    ended = subprocess.run(
        [python(), *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        cwd=folder,
        env={**environment, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    return ended.stdout


def test_there_are_examples():
    assert {"minimal.py", "zero3_init.py", "huggingface_style_loop.py"} <= {path.name for path in SCRIPTS}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_example_runs(script, num_ranks, tmp_path):
    several = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks))
    said = run(tmp_path, *(several if num_ranks > 1 else ()), str(script))
    assert re.search(r"\d+ steps", said)
    if script.name == "minimal.py":
        steps, ranks, loss = re.search(r"(\d+) steps on (\d) ranks, loss ([\d.]+)", said).groups()
        assert (steps, ranks) == ("60", str(num_ranks))
        assert float(loss) < 1.0  # four classes: 1.39 is a guess
    if script.name == "huggingface_style_loop.py":
        assert float(re.search(r"accuracy ([\d.]+)", said).group(1)) > 0.9
    if script.name == "bigger_than_memory.py":
        states, grown = re.search(r"states (\d+) MiB a rank, resident memory grew by (\d+) MiB", said).groups()
        assert int(grown) <= 32 and int(states) > 2 * int(grown)
    if script.name == "zero3_init.py":
        assert ("refused: `sum` reads" in said) == (num_ranks > 1)  # one rank holds everything


def executed(script: Path) -> tuple[tuple[int, ...], int, float]:
    engine = runpy.run_path(str(script))["engine"]
    return engine.mesh.axes.sizes, engine.steps, engine.loss


def test_all_axes_at_once():
    """Eight ranks, of the warm server: stages, sequence and tensor slices together."""
    found = run_ranks(executed, 8, ROOT / "examples" / "all_axes.py", timeout_s=LIMIT_S)
    assert len(set(found)) == 1
    sizes, steps, loss = found[0]
    assert sizes == (2, 1, 2, 2) and steps == 20 and loss < 3.5  # log 64 is 4.2


def test_the_smallest_example_is_about_ten_lines():
    source = (ROOT / "examples" / "minimal.py").read_text().split('"""')[2]
    assert len([line for line in source.splitlines() if line.strip()]) <= 15
