"""C047: `sys.argv` is the same list on all ranks as without the launcher."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

ARGUMENTS = [
    '--a="x y"', "--a=x y", "--b", "p q", "", '{"lr": 1e-3, "name": "a b"}', "--", "-5", "--nproc", "7", "$HOME",
    "$$HOME", "${local_rank}", "`id`", "a\\b", "*", "line\nbreak", "é", "--help", "--dry-run", "-m", "@file", "x;y",
    "%s",
]  # fmt: skip

DUMP = """
import json, os, pathlib, sys
rank = os.environ.get("RANK", "plain")
pathlib.Path(__file__).with_name(f"argv-{rank}.json").write_text(
    json.dumps([sys.argv, sys.path[0], __name__, __file__, os.getcwd()]))
"""


def dumped(folder, name):
    return json.loads((folder / f"argv-{name}.json").read_text())


@pytest.mark.parametrize("as_module", [False, True], ids=["script", "module"])
def test_arguments_path_and_main_are_what_they_are_without_a_launcher(tmp_path, as_module):
    (tmp_path / "dump.py").write_text(DUMP)
    plain = ["-m", "dump"] if as_module else ["dump.py"]
    launched = ["--module", "dump"] if as_module else ["dump.py"]
    subprocess.run([sys.executable, *plain, *ARGUMENTS], cwd=tmp_path, check=True, timeout=20)
    launch = [sys.executable, "-m", "trilithon.cli.main", "launch", "--nproc", "2", *launched, *ARGUMENTS]
    subprocess.run(launch, cwd=tmp_path, check=True, timeout=40)
    expected = dumped(tmp_path, "plain")
    assert expected[0][1:] == ARGUMENTS
    assert dumped(tmp_path, 0) == expected
    assert dumped(tmp_path, 1) == expected


def test_a_program_gets_its_arguments_too(tmp_path):
    program = tmp_path / "program"
    program.write_text(f"#!{sys.executable}\n" + DUMP)
    program.chmod(0o755)
    launch = [sys.executable, "-m", "trilithon.cli.main", "launch", "-n", "2", "--no-python", str(program), *ARGUMENTS]
    subprocess.run(launch, check=True, timeout=40)
    assert dumped(tmp_path, 0)[0] == dumped(tmp_path, 1)[0] == [str(program), *ARGUMENTS]
