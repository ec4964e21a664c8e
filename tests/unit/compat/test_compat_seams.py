"""What the DeepSpeed package stands on: public names of the native library, from modules that docs/compat.md names."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from trilithon.compat import deepspeed

PACKAGE = Path(deepspeed.__file__).parents[1]
DOCS = Path(__file__).parents[3] / "docs" / "compat.md"
FILES = sorted(PACKAGE.rglob("*.py"))
OWN = "trilithon.compat"
THEIRS = {"_parameters", "_distributed_c10d", "_asdict"}  # torch's, and of named tuples


def imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(module, name) of the native library."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("trilithon"):
            if not node.module.startswith(OWN):
                yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.startswith("trilithon"))


def test_the_page_names_every_module_and_no_other():
    _, _, section = DOCS.read_text().partition("## What it stands on")
    told = set(re.findall(r"`(trilithon[.a-z_]*)`", section.partition("\n## ")[0]))
    used = {module for path in FILES for module, _ in imported(ast.parse(path.read_text()))}
    assert told == used


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_private_of_the_native_library_is_used(path):
    tree = ast.parse(path.read_text())
    private = [f"{module}.{name}" for module, name in imported(tree) if re.search(r"(^|\.)_[a-z]", f"{module}.{name}")]
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assigned = {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr):
            of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not of_self and node.attr not in defined | assigned | THEIRS:
                private.append(ast.unparse(node))
    assert private == []
