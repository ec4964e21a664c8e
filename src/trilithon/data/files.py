"""Which files of a machine are training text, in an order that does not depend on the machine.

A path may be a file, a folder (walked) or a glob pattern. Each file is read once to learn its length, its digest and
whether it is text at all: a file with NUL bytes or invalid UTF-8 is set aside with the reason, never guessed at.

The order of the files is that of a digest of their names relative to the path they were found under. So it is the same
wherever the folder lies, and a limit that stops early has taken a fair sample of the tree, not its first letters.
"""

from __future__ import annotations

import codecs
import glob
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trilithon.errors import DataError

EXCLUDED_FOLDERS = ("__pycache__", "site-packages", "dist-packages", "node_modules")
EMPTY = "empty"  # the reason of a file without content
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class TextFile:
    """One file that decodes as UTF-8."""

    name: str  # relative to the path it was found under, with forward slashes
    path: Path
    num_bytes: int
    digest: str  # blake2b of the content, hexadecimal

    def pieces(self) -> Iterator[str]:
        """The text in order, in runs of whole lines of about a mebibyte; newlines are kept as they are."""
        try:
            with self.path.open(encoding="utf-8", newline="") as stream:
                while lines := stream.readlines(_PIECE_BYTES):
                    yield "".join(lines)
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(
                f"{self.path} could be read a moment ago and cannot be now ({error}). "
                "Run again when nothing writes to the data."
            ) from error


@dataclass(frozen=True, slots=True)
class SkippedFile:
    """One file that was found and not used."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True)
class FoundText:
    """The text files under some paths, in the order in which they are to be read."""

    files: tuple[TextFile, ...]
    skipped: tuple[SkippedFile, ...]

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


def find_text_files(
    paths: Sequence[str | Path],
    suffixes: Sequence[str] = (),
    excluded_folders: Sequence[str] = EXCLUDED_FOLDERS,
) -> FoundText:
    """Find every text file under `paths`; a file reached twice counts once.

    suffixes: endings such as ".py" that files inside folders must have (empty: any); a file that is named itself or by
    a pattern is taken whatever its ending. Folders whose name is in `excluded_folders` or begins with a dot are not
    entered, and links to folders are not followed.
    Raises DataError when a path does not exist, a pattern matches nothing, or no file is left to train on.
    """
    if not paths:
        raise DataError("No data: give at least one file, folder or pattern to train on.")
    endings = tuple(suffix if suffix.startswith(".") else f".{suffix}" for suffix in suffixes)
    files: list[TextFile] = []
    skipped: list[SkippedFile] = []
    seen: set[Path] = set()
    for name, path in _candidates(paths, endings, frozenset(excluded_folders)):
        identity = path.resolve()
        if identity in seen:
            continue
        seen.add(identity)
        found = _inspect(name, path)
        if isinstance(found, TextFile):
            files.append(found)
        else:
            skipped.append(found)
    if not files:
        raise DataError(_nothing_left(paths, endings, skipped))
    files.sort(key=lambda file: (_name_digest(file.name), file.name, str(file.path)))
    return FoundText(tuple(files), tuple(skipped))


def _candidates(
    paths: Sequence[str | Path], endings: tuple[str, ...], excluded: frozenset[str]
) -> Iterator[tuple[str, Path]]:
    """(relative name, path) of each file to look at."""
    for given in paths:
        path = Path(given).expanduser()
        if path.exists():
            matches = [path]
        elif glob.has_magic(str(path)):
            matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
            if not matches:
                raise DataError(f"The pattern {given} matches no file. Check it with `ls {given}`.")
        else:
            raise DataError(
                f"{given} does not exist. Give an existing file or folder, or a pattern such as 'texts/*.txt'."
            )
        for match in matches:
            if match.is_dir():
                yield from _walk(match, endings, excluded)
            else:
                yield match.name, match


def _walk(root: Path, endings: tuple[str, ...], excluded: frozenset[str]) -> Iterator[tuple[str, Path]]:
    for folder, inner, names in os.walk(root):
        inner[:] = sorted(name for name in inner if name not in excluded and not name.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            if name.startswith(".") or (endings and not name.endswith(endings)) or not path.is_file():
                continue
            yield path.relative_to(root).as_posix(), path


def _inspect(name: str, path: Path) -> TextFile | SkippedFile:
    """Read a file once: its digest, or the reason why it is not text."""
    digest = hashlib.blake2b(digest_size=16)
    decoder = codecs.getincrementaldecoder("utf-8")()
    num_bytes = 0
    try:
        with path.open("rb") as stream:
            while piece := stream.read(_PIECE_BYTES):
                if b"\0" in piece:
                    return SkippedFile(path, "binary (it contains NUL bytes)")
                decoder.decode(piece)
                digest.update(piece)
                num_bytes += len(piece)
            decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        return SkippedFile(path, f"not UTF-8 (in the mebibyte after byte {num_bytes}: {error.reason})")
    except OSError as error:
        return SkippedFile(path, f"unreadable ({error.strerror})")
    if num_bytes == 0:
        return SkippedFile(path, EMPTY)
    return TextFile(name, path, num_bytes, digest.hexdigest())


def _name_digest(name: str) -> bytes:
    return hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()


def _nothing_left(paths: Sequence[str | Path], endings: tuple[str, ...], skipped: Sequence[SkippedFile]) -> str:
    where = ", ".join(str(path) for path in paths)
    if not skipped:
        wanted = f" ending in {', '.join(endings)}" if endings else ""
        return f"No file{wanted} under {where}. Give a folder that holds text files, or other suffixes."
    shown = "; ".join(f"{file.path.name}: {file.reason}" for file in skipped[:5])
    more = f"; and {len(skipped) - 5} more" if len(skipped) > 5 else ""
    return (
        f"No text under {where}: {len(skipped)} files were found and none can be used ({shown}{more}). Give UTF-8 text."
    )
