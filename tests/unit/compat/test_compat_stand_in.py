"""The module `deepspeed` of a process is trilithon.compat.deepspeed, and never beside another one."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import trilithon.compat.deepspeed as here
from trilithon.compat.deepspeed.stand_in import HERE, ON_PATH, environment

ROOT = Path(__file__).parents[3]
PATH = os.pathsep.join(part for part in sys.path if part)


def python(code: str, *folders: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([*map(str, folders), PATH])
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, check=False, timeout=60, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip


def test_modules_are_the_same_under_both_names():
    ended = python(
        "import sys, deepspeed.zero, deepspeed.utils.logging as a\n"
        "from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus as b\n"
        f"import {HERE} as c, {HERE}.zero\n"
        f"from {HERE}.runtime.zero.partition_parameters import ZeroParamStatus as d\n"
        f"assert sys.modules['deepspeed'] is c and deepspeed.zero is {HERE}.zero and b is d\n"
        "assert deepspeed.__spec__.name == c.__name__ and a.__spec__.name == a.__name__\n"
        "try:\n    import deepspeed.inference\nexcept ImportError as error: print(error)\n"
        "try:\n    import deepspeed.nothing\nexcept ImportError as error: print(error)\n",
        ON_PATH,
    )
    assert ended.returncode == 0, ended.stderr
    assert "deepspeed.inference does not exist here" in ended.stdout and "deepspeed.nothing" in ended.stdout


def test_importing_the_module_imports_no_torch():
    ended = python(
        "import sys, deepspeed; assert 'torch' not in sys.modules, 'torch'; print(deepspeed.__version__)", ON_PATH
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == here.__version__


def test_a_module_runs_as_a_program():
    path = os.pathsep.join([str(ON_PATH), PATH])
    ended = subprocess.run(
        [sys.executable, "-m", "deepspeed.utils.zero_to_fp32", "--help"],
        capture_output=True, text=True, check=False, timeout=60, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert ended.returncode == 0 and "--max_shard_size" in ended.stdout


def test_a_program_is_run_with_the_module_in_place(tmp_path):
    script = tmp_path / "ask.py"
    script.write_text(
        "import subprocess, sys, deepspeed, importlib.metadata as m\n"
        "print(deepspeed.__name__, sys.argv[1:], m.version('deepspeed'), flush=True)\n"
        "subprocess.run([sys.executable, '-c', 'import deepspeed; print(deepspeed.__name__)'], check=True)\n"
    )
    command = [sys.executable, "-m", HERE]
    settings = {**os.environ, "PYTHONPATH": PATH}
    ended = subprocess.run(
        [*command, str(script), "--a"], capture_output=True, text=True, check=False, timeout=60, env=settings
    )
    assert ended.stdout.splitlines() == [f"{HERE} ['--a'] 0.19.8+trilithon", HERE], ended.stderr
    for wrong in ([], ["none.py"]):
        assert (
            subprocess.run([*command, *wrong], capture_output=True, check=False, timeout=60, env=settings).returncode
            == 2
        )


def test_an_installed_one_refuses_to_be_beside_deepspeed(tmp_path):
    shim = ROOT / "shim"
    real = tmp_path / "deepspeed-0.19.8.dist-info"
    real.mkdir()
    (real / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.19.8\n")
    assert python("import deepspeed", shim).returncode == 0
    ended = python("import deepspeed", shim, tmp_path)
    assert ended.returncode and "installed beside DeepSpeed 0.19.8" in ended.stderr
    (real / "METADATA").unlink()
    real.rmdir()
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").write_text("__version__ = '0.19.8'\n")
    ended = python("import deepspeed", shim, tmp_path)
    assert ended.returncode and "installed beside" in ended.stderr
    ended = python(f"import deepspeed\nfrom {HERE}.stand_in import stand_in\nstand_in()", tmp_path)
    assert ended.returncode and "was imported before" in ended.stderr


def test_both_sources_of_the_module_tell_one_version():
    told = list(ON_PATH.glob("*.dist-info/METADATA"))
    versions = {importlib.metadata.PathDistribution(path.parent).version for path in told}
    assert (
        versions == {"0.19.8+trilithon"}
        and 'version = "0.19.8+trilithon"' in (ROOT / "shim/pyproject.toml").read_text()
    )
    assert versions.pop().startswith(here.__version__)
    assert environment()["PYTHONPATH"].split(os.pathsep)[0] == str(ON_PATH)
