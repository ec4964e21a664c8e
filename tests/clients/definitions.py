"""The model classes of a script, without its imports of `deepspeed`: what the plain references are built from."""

from __future__ import annotations

import ast
import sys
from typing import Any

from launching import SCRIPTS


def definitions_of(script: str, **stand_ins: Any) -> dict[str, Any]:
    """The names that the script defines at its top level. `stand_ins` are names that `deepspeed` would have brought."""
    tree = ast.parse((SCRIPTS / script).read_text(), script)
    tree.body = [node for node in tree.body if not _of_deepspeed(node) and not isinstance(node, ast.If)]
    names: dict[str, Any] = {"__name__": f"definitions_of_{script.removesuffix('.py')}", **stand_ins}
    sys.path.insert(0, str(SCRIPTS))
    try:
        exec(compile(tree, script, "exec"), names)
    finally:
        sys.path.remove(str(SCRIPTS))
    return names


def _of_deepspeed(node: ast.stmt) -> bool:
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").split(".")[0] == "deepspeed"
    return isinstance(node, ast.Import) and any(alias.name.split(".")[0] == "deepspeed" for alias in node.names)
