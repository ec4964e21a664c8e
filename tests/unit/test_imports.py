"""What importing trilithon costs and promises."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import trilithon
from trilithon import errors


def loaded_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sorted(sys.modules))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(ended.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import trilithon",
        "from trilithon import Config, ConfigError; Config.load({'zero': {'stage': 3}})",
        "import trilithon.cli.main",
        "from trilithon.models import preset; preset('nano', 257)",
        "from trilithon.launch import make_plan",
    ],
)
def test_what_answers_at_once_does_not_import_torch(statement):
    loaded = loaded_after(statement)
    assert "trilithon" in loaded
    assert not loaded & {"torch", "numpy", "numba"}


def test_kernels_are_compiled_by_nobody_who_only_imports():
    assert "numba" not in loaded_after("import trilithon.engine.build, trilithon.kernels")


@pytest.mark.parametrize("name", trilithon.__all__)
def test_every_promised_name_is_there(name):
    assert getattr(trilithon, name) is not None
    assert name in dir(trilithon)


def test_the_promise_names_all_of_its_homes():
    assert set(trilithon.__all__) == {*trilithon._HOME, "__version__"}


def test_every_exception_is_public_and_has_one_base():
    ours = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    assert all(issubclass(kind, trilithon.TrilithonError) for kind in ours)
    assert {kind.__name__ for kind in ours} <= set(trilithon.__all__)


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'train_faster'"):
        _ = trilithon.train_faster


PACKAGES = (
    "comm",
    "compare",
    "compress",
    "config",
    "data",
    "doctor",
    "kernels",
    "launch",
    "models",
    "optim",
    "parallel.moe",
    "pretrain",
    "testing",
    "tiers",
    "zero",
)


@pytest.mark.parametrize("package", PACKAGES)
def test_what_a_package_lists_it_has(package):
    module = importlib.import_module(f"trilithon.{package}")
    missing = [name for name in getattr(module, "__all__", []) if not hasattr(module, name)]
    assert not missing
