"""Text to token ids and back: every byte a token, or a byte-level BPE vocabulary learnt from the data.

What always holds: decode(encode(text)) == text for any text, and the id `end` never comes out of `encode`; it is put
between documents. Byte-pair encoding follows Sennrich et al. 2016 (arXiv:1508.07909, section 3.2), on bytes instead of
characters as in GPT-2 (Radford et al. 2019, section 2.2); the merges are learnt by the `tokenizers` package.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trilithon.errors import ConfigError, DataError

END = "<|end|>"  # its text in a BPE vocabulary; it stands between documents
NUM_BYTES = 256
SMALLEST_BPE = NUM_BYTES + 2  # every byte, the end and at least one merge


class Tokenizer(Protocol):
    """What the cache and the trainer need from a tokenizer."""

    @property
    def kind(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def end(self) -> int:
        """The id between documents."""
        ...

    def encode(self, text: str) -> NDArray[np.int64]:
        """text -> ids [n] int64."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """ids -> text; bytes that are not UTF-8 become U+FFFD, ends are left out."""
        ...

    def to_json(self) -> str:
        """Everything that `load_tokenizer` needs."""
        ...


class ByteTokenizer:
    """256 byte values and the end: nothing to learn, nothing unknown."""

    kind = "bytes"
    vocab_size = NUM_BYTES + 1
    end = NUM_BYTES

    def encode(self, text: str) -> NDArray[np.int64]:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < NUM_BYTES).decode("utf-8", errors="replace")

    def to_json(self) -> str:
        return json.dumps({"trilithon_tokenizer": self.kind, "vocab_size": self.vocab_size, "end": self.end})


class BpeTokenizer:
    """A byte-level BPE vocabulary."""

    kind = "bpe"

    def __init__(self, inner: Any) -> None:
        """inner: a `tokenizers.Tokenizer` whose vocabulary contains the end token."""
        self._inner = inner
        end = inner.token_to_id(END)
        if end is None:
            raise DataError(f"The vocabulary has no {END} token, which stands between documents. Train it again.")
        self.end: int = end
        self.vocab_size: int = inner.get_vocab_size()

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> BpeTokenizer:
        """Learn `vocab_size` tokens (256 bytes, the end, the rest merges); equal texts give an equal vocabulary.

        Raises ConfigError when the size is too small or `tokenizers` is missing, DataError when the texts do not
        contain enough different pairs for that many merges.
        """
        if vocab_size < SMALLEST_BPE:
            raise ConfigError(
                f"A BPE vocabulary of {vocab_size} is too small: 256 bytes and the end token come first. "
                f"Give at least {SMALLEST_BPE}, or use the tokenizer 'bytes'."
            )
        tokenizers = _import_tokenizers()
        inner = tokenizers.Tokenizer(tokenizers.models.BPE())
        inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size,
            show_progress=False,
            special_tokens=[END],
            initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        )
        inner.train_from_iterator(texts, trainer=trainer)
        reached = inner.get_vocab_size()
        if reached < vocab_size:
            raise DataError(
                f"The vocabulary of {vocab_size} is larger than the data can fill: merging every pair there is "
                f"gives {reached} tokens. Give a vocabulary of at most {reached}, or more text."
            )
        return cls(inner)

    def encode(self, text: str) -> NDArray[np.int64]:
        # A text that spells the end token literally must not become one: special tokens are encoded as plain text.
        self._inner.encode_special_tokens = True
        return np.asarray(self._inner.encode(text).ids, dtype=np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._inner.decode([int(i) for i in ids if i != self.end], skip_special_tokens=False)
        return text

    def to_json(self) -> str:
        text: str = self._inner.to_str(pretty=False)
        return text


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer that was written as `path.write_text(tokenizer.to_json())`.

    Raises DataError when the file is missing or is not a tokenizer.
    """
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} is not a readable tokenizer file ({error}). Remove the cache and run again."
        ) from error
    if isinstance(content, dict) and content.get("trilithon_tokenizer") == ByteTokenizer.kind:
        return ByteTokenizer()
    if not isinstance(content, dict) or "model" not in content:
        raise DataError(f"{path} holds no tokenizer of a known kind. Remove the cache and run again.")
    return BpeTokenizer(_import_tokenizers().Tokenizer.from_str(text))


def _import_tokenizers() -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError as error:
        raise ConfigError(
            "The tokenizer 'bpe' needs the package tokenizers, which is not installed: "
            "pip install 'trilithon[train]', or use the tokenizer 'bytes'."
        ) from error
    return tokenizers
