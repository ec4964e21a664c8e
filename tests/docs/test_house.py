"""The rules of CONTRIBUTING.md that a linter does not know."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for folder in ("src", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
MOST_LINES = 500
WITHOUT_A_CONCEPT = {"utils", "util", "helpers", "helper", "common", "misc", "constants"}


def test_every_file_is_short_enough_to_be_read():
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in [*SOURCES, *TESTS]}
    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}


def test_every_file_is_named_after_a_concept():
    theirs = ROOT / "src" / "trilithon" / "compat"  # where files have the names of another library's modules
    ours = [path for path in [*SOURCES, *TESTS] if theirs not in path.parents]
    assert [path for path in ours if path.stem in WITHOUT_A_CONCEPT] == []


def test_no_two_test_files_share_a_name():
    counted = Counter(path.name for path in TESTS if path.name.startswith("test_"))
    assert [name for name, times in counted.items() if times > 1] == []


def test_every_source_file_says_what_it_is():
    silent = [path for path in SOURCES if not ast.get_docstring(ast.parse(path.read_text()))]
    assert silent == []


def test_no_test_is_left_out():
    """A test that is always skipped, or expected to fail, is a claim that nobody checks."""
    marks = re.compile(r"pytest\.(?:mark\.)?(?:skip|xfail)\b")
    left_out = [path.name for path in TESTS if marks.search(path.read_text()) and path.name != Path(__file__).name]
    assert left_out == []


def test_no_path_of_one_machine_is_written_down():
    folders = re.compile(r"(?<![\w.])/(?:home|root|work|Users)/\w")
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    found = [path.name for path in [*SOURCES, *pages] if folders.search(path.read_text())]
    assert found == []
