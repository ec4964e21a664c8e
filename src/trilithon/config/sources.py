"""Reads a configuration from where it is written: a file, JSON text, or urlsafe base64 of JSON text.

JSON may carry comments (`//`, `#`, `/* */`) and trailing commas. A key written twice in one block is refused.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

from trilithon.config.base import show
from trilithon.errors import ConfigError

_STRING = r'"(?:\\.|[^"\\\n])*"'
_COMMENT = re.compile(_STRING + r"|//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)
_TRAILING_COMMA = re.compile(_STRING + r"|,(?=\s*[}\]])", re.DOTALL)


def read(source: str | os.PathLike[str]) -> tuple[dict[str, Any], str]:
    """The block a source holds and the name to show for it.

    A path, or text that names an existing file, is read (`.toml` as TOML, everything else as JSON). Other text is
    taken as JSON when it begins with `{` or a comment, else as urlsafe base64 of such text. Raises ConfigError.
    """
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(
            f"a configuration cannot be read from what is no path, JSON text or block of keys; got {show(source)}."
        )
    if isinstance(source, os.PathLike) or _is_file(source):
        return _read_file(Path(source)), str(source)
    if source.lstrip().startswith(("{", "//", "#", "/*")):
        return parse_json(source, "JSON text"), "JSON text"
    decoded = _decode_base64(source)
    if decoded is not None:
        return parse_json(decoded, "base64 text"), "base64 text"
    raise ConfigError(
        f"{show(source)}: no such file, and neither JSON text nor base64 of it. Give the path of a JSON or TOML file."
    )


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # too long for a path, or a null byte in it
        return False


def _read_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start}). Save it as UTF-8.") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path}: cannot be read ({reason}). Check the path and its permissions.") from None
    if path.suffix.lower() in (".yaml", ".yml"):
        raise ConfigError(f"{path}: YAML is not read. Write the same keys as JSON (comments are allowed) or TOML.")
    if path.suffix.lower() != ".toml":
        return parse_json(text, str(path))
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}.") from None


def parse_json(text: str, where: str) -> dict[str, Any]:
    """One JSON block, with comments and trailing commas allowed. Raises ConfigError with line and column."""
    duplicates: list[str] = []

    def block(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        counts = Counter(name for name, _ in pairs)
        duplicates.extend(name for name, count in counts.items() if count > 1)
        return dict(pairs)

    plain = _TRAILING_COMMA.sub(_blank_unless_string, _COMMENT.sub(_blank_unless_string, text))
    try:
        value = json.loads(plain, object_pairs_hook=block)
    except json.JSONDecodeError as error:
        line = text.splitlines()[error.lineno - 1].strip() if text.splitlines()[error.lineno - 1 :] else ""
        raise ConfigError(
            f"{where}: not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}: {show(line)}."
        ) from None
    except (ValueError, RecursionError) as error:  # a number with thousands of digits, blocks nested without end
        raise ConfigError(f"{where}: not valid JSON: {error}.") from None
    if duplicates:
        raise ConfigError(f"{where}: written twice in one block: {', '.join(duplicates)}. Keep one of each.")
    if not isinstance(value, dict):
        raise ConfigError(
            f"{where}: holds {type(value).__name__} {show(value)}, but a block {{...}} of keys is needed."
        )
    return value


def _blank_unless_string(match: re.Match[str]) -> str:
    """Comments and commas become blanks of the same length, so that positions in errors stay right."""
    found = match.group()
    return found if found.startswith('"') else re.sub(r"[^\n]", " ", found)


def _decode_base64(text: str) -> str | None:
    try:
        decoded = base64.b64decode(text.strip(), altchars=b"-_", validate=True).decode("utf-8")
    except (binascii.Error, ValueError):
        return None
    return decoded if decoded.lstrip().startswith(("{", "//", "#", "/*")) else None
