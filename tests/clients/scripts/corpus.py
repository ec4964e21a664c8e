"""Fixed-length blocks of tokens from a text file, in the order of the text: what every script here trains on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Blocks(Dataset[dict[str, Tensor]]):
    """`count` blocks of `length` tokens each, beginning with block number `first` of the text."""

    def __init__(self, text: str | Path, tokenizer: Any, length: int, count: int, first: int = 0) -> None:
        needed = (first + count) * length
        read = Path(text).read_text(encoding="utf-8")[: needed * 16]
        ids = tokenizer(read, return_attention_mask=False)["input_ids"]
        if len(ids) < needed:
            raise ValueError(f"{text} has {len(ids)} tokens; {first + count} blocks of {length} need {needed}")
        self._ids = torch.tensor(ids[first * length : needed]).view(count, length)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self._ids[index]
        return {"input_ids": ids, "labels": ids}
