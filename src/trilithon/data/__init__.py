"""What is fed when: text to tokens, the order of samples, and batches for one rank."""

from __future__ import annotations

from trilithon.data.files import FoundText, SkippedFile, TextFile, find_text_files
from trilithon.data.loader import EpochLoader, Loader, RepeatingLoader, prepare_loader
from trilithon.data.sampler import StreamSampler, epoch_order
from trilithon.data.text import TextCorpus, TokenBlocks, prepare_text
from trilithon.data.tokenizer import BpeTokenizer, ByteTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "BpeTokenizer",
    "ByteTokenizer",
    "EpochLoader",
    "FoundText",
    "Loader",
    "RepeatingLoader",
    "SkippedFile",
    "StreamSampler",
    "TextCorpus",
    "TextFile",
    "TokenBlocks",
    "Tokenizer",
    "epoch_order",
    "find_text_files",
    "load_tokenizer",
    "prepare_loader",
    "prepare_text",
]
