"""The pages and the project agree: links lead somewhere, every page and package is listed, tables are the code's."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from trilithon.engine.capabilities import compatibility_table
from trilithon.engine.expert_capabilities import expert_combinations, expert_table

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "trilithon"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    local = [target for target in targets if not target.startswith(("http://", "https://", "mailto:"))]
    missing = [target for target in local if not (page.parent / target).exists()]
    assert not missing


def test_the_index_lists_every_page():
    listed = set(re.findall(r"\]\(([\w-]+\.md)\)", (ROOT / "docs" / "README.md").read_text()))
    there = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert listed == there


def test_the_map_names_every_package():
    rooms = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    linked = set(re.findall(r"\]\(src/trilithon/(\w+)(?:\.py)?\)", (ROOT / "README.md").read_text()))
    assert linked == rooms - {"__init__", "__main__"}


def test_the_layers_hold_every_package_and_the_page_shows_them():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    shown = re.search(r"```text\n(.*?)```", (ROOT / "docs" / "architecture.md").read_text(), re.DOTALL).group(1)
    rows = [re.split(r"\s{2,}", line)[0] for line in shown.splitlines()]
    assert rows == [layer.replace("trilithon.", "") for layer in layers]
    rooms = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert {name for row in rows for name in row.split(" | ")} == rooms - {"__init__", "__main__"}


def test_the_compatibility_table_of_the_page_is_that_of_the_code():
    assert compatibility_table() in (ROOT / "docs" / "engine.md").read_text()
    experts = (ROOT / "docs" / "moe.md").read_text()
    assert expert_table() in experts and expert_combinations() in experts


def test_the_promised_arithmetic_of_the_readme_is_right():
    """Bytes per parameter: 2 for values and gradients in bf16, 12 for master and two moments in fp32."""
    expected = {
        0: lambda n: 16.0,
        1: lambda n: 4 + 12 / n,
        2: lambda n: 2 + 14 / n,
        3: lambda n: 16 / n,
    }
    rows = re.findall(r"^ stage (\d) .*?([\d.]+) +([\d.]+) +([\d.]+)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(rows) == len(expected)
    for stage, *figures in rows:
        assert [float(figure) for figure in figures] == [expected[int(stage)](n) for n in (1, 2, 8)]
