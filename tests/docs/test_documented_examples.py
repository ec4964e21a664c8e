"""Every Python example of the documentation runs, and every command shown exists with the options shown.

Examples of one page run one after the other in one folder and one namespace, as a reader would type them; a test body
(a function decorated with `@ranks`) is called. An example that a machine without several ranks cannot run as it stands
is no example.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Example:
    """One fenced block. line: its first line in the page, so that a traceback points there."""

    page: Path
    language: str
    line: int
    text: str


def examples(page: Path, *languages: str) -> list[Example]:
    text = page.read_text()
    return [
        Example(page, found[1], text[: found.start(2)].count("\n") + 1, found[2])
        for found in _FENCE.finditer(text)
        if found[1] in languages
    ]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


PYTHON_PAGES = [page for page in PAGES if examples(page, "python")]
SHELL_PAGES = [page for page in PAGES if examples(page, "sh", "bash", "")]
