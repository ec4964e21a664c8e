"""The documentation of the configuration: its tables are those the code gives, and its examples run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from trilithon.config import Config
from trilithon.config.naming import every_key
from trilithon.config.schema import deepspeed_names, deepspeed_reference, reference

DOCS = Path(__file__).parents[3] / "docs"
PAGES = {
    "config.md": (reference, "trilithon check --reference"),
    "deepspeed-config.md": (deepspeed_reference, "trilithon check --deepspeed-reference"),
    "coming_from_deepspeed.md": (deepspeed_names, "trilithon.config.schema.deepspeed_names()"),
}


@pytest.mark.parametrize("page", PAGES)
def test_the_tables_in_the_docs_are_those_of_the_code(page):
    make, command = PAGES[page]
    written = (DOCS / page).read_text()
    assert written.endswith(make()), f"docs/{page} is out of date: replace its tables by the output of `{command}`"


def test_every_key_and_kind_is_in_the_reference():
    text = reference()
    assert [name for name, _ in every_key(Config) if name != "kind" and f"| `{name}` |" not in text] == []
    for kind in ("bf16", "lamb", "piecewise", "one_cycle"):
        assert f".kind` = `{kind}`" in text
    assert "None" not in text


@pytest.mark.parametrize("page", ["config.md", "deepspeed-config.md"])
def test_the_python_examples_run(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = (DOCS / page).read_text()
    block = re.search(r"```json\n(.*?)```", text, re.DOTALL)
    (tmp_path / "config.json").write_text(block.group(1) if block else "{}")
    file = {"train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": False}
    (tmp_path / "ds_config.json").write_text(json.dumps(file))
    examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert examples
    for example in examples:
        exec(compile(example, page, "exec"), {})
    out = capsys.readouterr().out
    assert ("2\n" in out and "zero.stage 3 override" in out) if page == "config.md" else "wall_clock_breakdown" in out


def test_the_mistakes_shown_in_the_docs_are_what_is_printed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text('{"zero": {"stge": 1, "clip_norm": 1}, "seed": "7"}')
    shown = re.search(r"```text\n(.*?)```", (DOCS / "config.md").read_text(), re.DOTALL).group(1)
    with pytest.raises(ValueError) as caught:
        Config.load("config.json")
    assert f"{caught.value}\n" == shown
