"""The files around the code agree with each other."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def name_of(requirement: str) -> str:
    return re.split(r"[<>=!~\[; ]", requirement, maxsplit=1)[0].lower()


@pytest.mark.parametrize("requirement", PROJECT["dependencies"] + EXTRAS["train"] + EXTRAS["fast"] + EXTRAS["dev"])
def test_every_dependency_has_one_exact_version(requirement):
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = dict(line.split("==") for line in lines)
    assert len(pinned) == len(lines)
    version = tuple(int(part) for part in pinned[name_of(requirement)].split("."))
    for operator, bound in re.findall(r"(>=|<)([\d.]+)", requirement):
        limit = tuple(int(part) for part in bound.split("."))
        assert version >= limit if operator == ">=" else version < limit


def test_every_dependency_is_explained_in_a_sentence():
    rows = [line for line in (ROOT / "docs" / "dependencies.md").read_text().splitlines() if line.startswith("| ")]
    explained = {cell.strip() for row in rows for cell in row.split("|") if row.rstrip().endswith(". |")}
    required = PROJECT["dependencies"] + [item for extra in EXTRAS.values() for item in extra]
    assert {name_of(requirement) for requirement in required} <= explained


def test_make_alone_explains_every_target():
    shown = subprocess.run(["make", "-C", str(ROOT)], capture_output=True, text=True, check=True, timeout=30).stdout
    declared = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE).group(1).split()
    assert re.findall(r"make ([\w-]+) +\w", shown) == declared
