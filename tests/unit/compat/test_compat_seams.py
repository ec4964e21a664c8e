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


def own_names(tree: ast.Module) -> Iterator[str]:
    """Functions, classes and attributes that a file of the package defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
            yield from (target.id for target in targets if isinstance(target, ast.Name))


OWN_NAMES = {name for path in FILES for name in own_names(ast.parse(path.read_text()))}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_private_of_the_native_library_is_used(path):
    tree = ast.parse(path.read_text())
    private = [f"{module}.{name}" for module, name in imported(tree) if re.search(r"(^|\.)_[a-z]", f"{module}.{name}")]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr):
            chain = ast.unparse(node)
            of_native = "native." in chain  # an engine of ours, behind the one that the program holds
            if of_native or node.attr not in OWN_NAMES | THEIRS:
                private.append(chain)
    assert private == []
