"""Modules that need no file: what is told of them is there, once, under every name, and the package stays small."""

from __future__ import annotations

import ast
import importlib
import importlib.machinery
import importlib.util
import io
import pickle
import sys
import tokenize
import types
from pathlib import Path

import pytest

from trilithon.compat import deepspeed
from trilithon.compat.deepspeed import names, resolve

PACKAGE = Path(deepspeed.__file__).parents[1]
LINES = 2300  # of code in all files: not blank, no comment, no docstring


def lines_of_code(path: Path) -> set[int]:
    text = path.read_text()
    silent = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = (token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in silent)
    found = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            found -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return found


def test_the_package_stays_small():
    """Adapters only: what the native library lacks is written there and not here."""
    assert sum(len(lines_of_code(path)) for path in PACKAGE.rglob("*.py")) <= LINES


@pytest.mark.parametrize("path", sorted(resolve._MODULES))
def test_every_module_and_name_that_is_told_of_is_there(path):
    module = importlib.import_module(f"{names.ROOT}.{path}")
    assert module.__name__ == resolve.canonical(f"{names.ROOT}.{path}") and sys.modules[module.__name__] is module
    assert module.__spec__.name == module.__name__
    assert set(module.__all__) <= set(dir(module))
    for name in module.__all__:
        assert getattr(module, name, self := object()) is not self
    reached = deepspeed
    for part in path.split("."):
        reached = getattr(reached, part)
    assert reached is module or (path, type(reached)) == ("utils.z3_leaf_module", types.FunctionType)


def test_everything_at_the_top_can_be_imported_at_once():
    space: dict[str, object] = {}
    exec(f"from {names.ROOT} import *", space)
    assert {"initialize", "DeepSpeedEngine", "PipelineModule", "init_inference", "HAS_TRITON"} <= set(space)


def test_a_module_under_another_name_is_not_a_copy():
    parts = importlib.import_module(f"{names.ROOT}.zero.partition_parameters")
    assert parts is importlib.import_module(f"{names.ROOT}.runtime.zero.partition_parameters")
    assert deepspeed.zero.Init is deepspeed.runtime.zero.Init is parts.Init
    assert importlib.import_module(f"{names.ROOT}.dist") is deepspeed.comm
    assert importlib.util.find_spec(f"{names.ROOT}.zero.nothing") is None


def test_a_name_wins_over_the_module_of_the_same_name():
    leaf = importlib.import_module(f"{names.ROOT}.utils.z3_leaf_module")
    assert deepspeed.utils.z3_leaf_module is leaf.z3_leaf_module


def test_what_is_made_of_a_table_survives_a_pickle():
    stage = deepspeed.runtime.zero.config.ZeroStageEnum.weights
    assert pickle.loads(pickle.dumps(stage)) is stage and stage == 3
    device = deepspeed.runtime.zero.offload_config.OffloadDeviceEnum.nvme
    assert pickle.loads(pickle.dumps(device)) is device and device == "nvme"


def test_deepspeeds_own_modules_are_not_answered_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", types.ModuleType("deepspeed"))
    assert resolve.Finder().find_spec("deepspeed.zero") is None
    monkeypatch.setitem(sys.modules, "deepspeed", deepspeed)
    found = resolve.Finder().find_spec("deepspeed.zero")
    assert isinstance(found, importlib.machinery.ModuleSpec) and found.name == "deepspeed.zero"
