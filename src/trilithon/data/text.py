"""Text files to training data: found, tokenised once into a cache, split, and cut into blocks.

    manifest = prepare_text(["texts/"], cache=Path("cache"))      # one process of a machine
    corpus = TextCorpus.open(manifest)                            # every process
    blocks = TokenBlocks(corpus.train, context=128)               # blocks[i] -> (inputs [T], targets [T])

What always holds: the same files and settings give the same tokens in the same order and the same held-out part, so the
entry's key is a digest of both. Held-out text is whole files where there are enough of them, and otherwise the last
part of each file; it is never trained on.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from trilithon.data import token_cache
from trilithon.data.files import EMPTY, EXCLUDED_FOLDERS, FoundText, TextFile, find_text_files
from trilithon.data.token_cache import Manifest, TokenWriter
from trilithon.data.tokenizer import BpeTokenizer, ByteTokenizer, Tokenizer, load_tokenizer
from trilithon.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

_SHOWN = 3  # skipped files that are named
FILES_TO_SPLIT_BY = 20  # from this many on, held-out text is whole files
BPE_TRAINING_CHARACTERS = 50_000_000  # merges are learnt on this much of the training text at most


@dataclass(frozen=True, slots=True)
class TextCorpus:
    """A cache entry, opened."""

    manifest: Manifest
    tokenizer: Tokenizer
    train: NDArray[Any]  # [n] ids, mapped
    held_out: NDArray[Any]  # [m] ids, mapped

    @classmethod
    def open(cls, manifest: Path, wait_s: float = 0.0) -> TextCorpus:
        """Map an entry that `prepare_text` wrote; see `read_manifest` for the wait and what DataError tells."""
        entry = token_cache.read_manifest(manifest, wait_s)
        folder = manifest.parent
        return cls(
            entry,
            load_tokenizer(entry.tokenizer_file(folder)),
            token_cache.map_tokens(entry.train_file(folder), entry.dtype),
            token_cache.map_tokens(entry.held_out_file(folder), entry.dtype),
        )


class TokenBlocks(Dataset[tuple[Tensor, Tensor]]):
    """Consecutive blocks of a token stream; the targets are the inputs moved on by one token."""

    def __init__(self, tokens: NDArray[Any], context: int) -> None:
        """tokens: [n] ids. Raises DataError when they do not fill one block."""
        self._tokens, self._context = tokens, context
        self._num_blocks = (len(tokens) - 1) // context
        if self._num_blocks < 1:
            raise DataError(
                f"{len(tokens)} tokens do not fill one block of context {context} (it takes {context + 1}). "
                f"Give more text or a context of at most {max(len(tokens) - 1, 1)}."
            )

    def __len__(self) -> int:
        return self._num_blocks

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """-> inputs [T] i64, targets [T] i64."""
        if not 0 <= index < self._num_blocks:
            raise IndexError(f"block {index} of {self._num_blocks}")
        start = index * self._context
        block = torch.from_numpy(self._tokens[start : start + self._context + 1].astype(np.int64))
        return block[:-1], block[1:]


def prepare_text(
    paths: Sequence[str | Path],
    *,
    cache: Path,
    tokenizer: Literal["bytes", "bpe"] = "bytes",
    vocab_size: int | None = None,
    suffixes: Sequence[str] = (),
    excluded_folders: Sequence[str] = EXCLUDED_FOLDERS,
    held_out: float = 0.05,
    max_tokens: int | None = None,
) -> Path:
    """Tokenise the text under `paths` into `cache`, unless that was done before; returns the manifest's path.

    vocab_size: for "bpe" only. held_out: share of the text that is kept from training. max_tokens: training tokens to
    stop at (the held-out part is limited in proportion).
    Raises DataError for data or disk that cannot be used, ConfigError for settings that make no sense together.
    """
    if not 0.0 < held_out < 1.0:
        raise ConfigError(f"held_out={held_out} must lie between 0 and 1, such as 0.05.")
    if tokenizer == "bytes" and vocab_size not in (None, ByteTokenizer.vocab_size):
        raise ConfigError(
            f"vocab_size={vocab_size} has no meaning for the tokenizer 'bytes', which has {ByteTokenizer.vocab_size}. "
            "Leave it out or use the tokenizer 'bpe'."
        )
    if tokenizer == "bpe" and vocab_size is None:
        raise ConfigError("The tokenizer 'bpe' needs a vocabulary size, such as vocab_size=4096.")
    found = find_text_files(paths, suffixes, excluded_folders)
    _report_skipped(found)
    recipe = _Recipe(tokenizer, vocab_size, held_out, max_tokens)
    key = _cache_key(found, recipe)
    path = token_cache.manifest_path(cache, key)
    if path.exists():
        try:
            token_cache.read_manifest(path)
            return path
        except DataError as error:
            logger.warning("building the token cache again: %s", error)
    return _build(found, recipe, cache, key)


def _report_skipped(found: FoundText) -> None:
    """A warning for files that are not text; an empty file is nothing to worry about."""
    unusable = [skipped for skipped in found.skipped if skipped.reason != EMPTY]
    for skipped in unusable[:_SHOWN]:
        logger.warning("skipped %s: %s", skipped.path, skipped.reason)
    if len(unusable) > _SHOWN:
        logger.warning("skipped %d more files that are not UTF-8 text", len(unusable) - _SHOWN)


@dataclass(frozen=True, slots=True)
class _Recipe:
    """The settings that decide which tokens come out of given files."""

    tokenizer: str
    vocab_size: int | None
    held_out: float
    max_tokens: int | None

    def most_tokens(self, found: FoundText) -> int:
        """An upper bound: a token is at least one byte of text, and each document adds an end to one or both sides."""
        most = found.num_bytes + 2 * len(found.files)
        return most if self.max_tokens is None else min(most, self.max_tokens + self.held_out_limit)

    @property
    def held_out_limit(self) -> int:
        assert self.max_tokens is not None
        return max(int(self.max_tokens * self.held_out), 1)


def _cache_key(found: FoundText, recipe: _Recipe) -> str:
    content = [token_cache.FORMAT, asdict(recipe), [(file.name, file.digest) for file in found.files]]
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=10).hexdigest()


def _build(found: FoundText, recipe: _Recipe, cache: Path, key: str) -> Path:
    split = _Split(found, recipe.held_out)
    coder = _make_tokenizer(recipe, split)
    dtype = token_cache.token_dtype(coder.vocab_size)
    with token_cache.building(cache, key, recipe.most_tokens(found) * dtype.itemsize) as build:
        with build.open(cache / f"{key}.tokenizer.json") as stream:
            stream.write(coder.to_json().encode())
        with build.open(cache / f"{key}.train.bin") as first, build.open(cache / f"{key}.held_out.bin") as second:
            train = TokenWriter(first, coder.vocab_size, recipe.max_tokens)
            kept = TokenWriter(second, coder.vocab_size, recipe.held_out_limit if recipe.max_tokens else None)
            _tokenise(split, coder, train, kept)
        if train.num_bytes == 0 or kept.num_bytes == 0:
            raise DataError(
                f"{found.num_bytes} bytes of text are too little to train on and to hold out {recipe.held_out:.0%} of. "
                "Give more text."
            )
        manifest = Manifest(
            key=key,
            dtype=dtype.name,
            vocab_size=coder.vocab_size,
            tokenizer=coder.kind,
            num_files=len(found.files),
            num_skipped=len(found.skipped),
            split=split.kind,
            train_tokens=train.num_tokens,
            train_bytes=train.num_bytes,
            held_out_tokens=kept.num_tokens,
            held_out_bytes=kept.num_bytes,
            unigram_entropy=token_cache.unigram_entropy(train.counts),
        )
        return build.commit(manifest)


def _make_tokenizer(recipe: _Recipe, split: _Split) -> Tokenizer:
    if recipe.vocab_size is None or recipe.tokenizer == ByteTokenizer.kind:
        return ByteTokenizer()
    return BpeTokenizer.train(_limited(split.training_text(), BPE_TRAINING_CHARACTERS), recipe.vocab_size)


def _tokenise(split: _Split, coder: Tokenizer, train: TokenWriter, kept: TokenWriter) -> None:
    """Write every document to its side, each followed by the end."""
    writers = {"train": train, "held_out": kept}
    end = np.asarray([coder.end], dtype=np.int64)
    for file in split.files:
        sides = split.sides(file)
        if all(writers[side].full for side in sides):
            continue
        for side, text in split.parts(file):
            writer = writers[side]
            if writer.full:
                continue
            ids = coder.encode(text)
            written = writer.write(ids)
            writer.num_bytes += len((text if written == len(ids) else coder.decode(ids[:written].tolist())).encode())
        for side in sides:
            writers[side].write(end)


class _Split:
    """Which text is held out: whole files, or the tail of each where files are few."""

    def __init__(self, found: FoundText, held_out: float) -> None:
        self.files = found.files
        self._share = held_out
        self.kind = "files" if len(found.files) >= FILES_TO_SPLIT_BY else "tails"
        num_kept = max(round(held_out * len(found.files)), 1)
        ranked = sorted(found.files, key=lambda file: hashlib.blake2b(f"held out {file.name}".encode()).digest())
        self._kept = frozenset(file.path for file in ranked[:num_kept])

    def sides(self, file: TextFile) -> tuple[str, ...]:
        """Where the text of a file goes: "train", "held_out" or both."""
        if self.kind == "tails":
            return ("train", "held_out")
        return ("held_out",) if file.path in self._kept else ("train",)

    def parts(self, file: TextFile) -> Iterator[tuple[str, str]]:
        """("train" | "held_out", text) in the order of the file."""
        if self.kind == "files":
            (side,) = self.sides(file)
            yield from ((side, piece) for piece in file.pieces())
            return
        boundary = round(file.num_bytes * (1.0 - self._share))
        position = 0
        for piece in file.pieces():
            size = len(piece.encode())
            if position + size <= boundary:
                yield "train", piece
            elif position >= boundary:
                yield "held_out", piece
            else:
                # The cut is made in bytes; a character that it would split goes to the held-out side.
                head = piece.encode()[: boundary - position].decode("utf-8", errors="ignore")
                yield "train", head
                yield "held_out", piece[len(head) :]
            position += size

    def training_text(self) -> Iterator[str]:
        for file in self.files:
            yield from (text for side, text in self.parts(file) if side == "train")


def _limited(texts: Iterator[str], characters: int) -> Iterator[str]:
    for text in texts:
        yield text[:characters]
        characters -= len(text)
        if characters <= 0:
            return
