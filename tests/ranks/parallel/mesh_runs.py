"""What the tests of meshes train: models of each shape, on every mesh, against plain PyTorch in one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trilithon.models import GPT, Bert, BertConfig, GPTConfig, Llama, LlamaConfig
from trilithon.testing.engine_run import EngineRun, train_on_engine
from trilithon.testing.parity import Batch, PlainRun, train_plain

STEPS, ROWS, LENGTH, VOCAB = 5, 4, 8, 61  # 61 rows divide over no mesh: the vocabulary is padded
CLIP = 0.6  # below every norm of these runs
GPT_SHAPE = GPTConfig(vocab_size=VOCAB, context=LENGTH, num_layers=2, width=32, num_heads=4, dropout=0.1)
LLAMA_SHAPE = LlamaConfig(
    vocab_size=VOCAB, context=LENGTH, num_layers=2, width=32, num_heads=4, num_kv_heads=4, inner_width=64
)
BERT_SHAPE = BertConfig(vocab_size=VOCAB, context=LENGTH, num_layers=2, width=32, num_heads=4, inner_width=64)
# The gradient of a key's bias is zero in exact arithmetic, and Adam would turn its rounding noise into full steps.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "gpt": {"kind": "adamw", "lr": 1e-3, "eps": 1e-6},
    "llama": {"kind": "adamw", "lr": 1e-3, "eps": 1e-6},
    "bert": {"kind": "sgd", "lr": 0.05},
    "lamb": {"kind": "lamb", "lr": 1e-2},
}


@dataclass(frozen=True)
class Case:
    """One run: which model, on which mesh, and which ZeRO stage."""

    kind: str
    mesh: tuple[tuple[str, int], ...]
    stage: int
    cut_norms: bool = False
    accumulation: int = 1

    @property
    def axes(self) -> dict[str, int]:
        return dict(self.mesh)


def make(kind: str) -> torch.nn.Module:
    """The model with its own seed; what follows (dropout) begins from another one, the same on every rank."""
    torch.manual_seed(3)
    shapes = {"llama": lambda: Llama(LLAMA_SHAPE), "bert": lambda: Bert(BERT_SHAPE)}
    model = shapes.get(kind, lambda: GPT(GPT_SHAPE))()
    torch.manual_seed(11)
    return model


def batches(kind: str, accumulation: int) -> list[list[Batch]]:
    generator = torch.Generator().manual_seed(7)

    def one() -> Batch:
        tokens = torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=generator)
        targets = tokens[:, 1:].clone()
        if kind == "bert":  # the same number in each row: a mean of means is then the mean
            targets[:, ::3] = -100
        return tokens[:, :-1].contiguous(), targets

    return [[one() for _ in range(accumulation)] for _ in range(STEPS)]


def plain(kind: str, accumulation: int) -> PlainRun:
    options = dict(OPTIMIZERS[kind])
    name, lr = options.pop("kind"), options.pop("lr")
    return train_plain(
        lambda: make(kind),
        batches(kind, accumulation),
        optimizer=name,
        lr=lr,
        clip_norm=CLIP,
        missing="skip",
        **options,
    )


def run(case: Case) -> EngineRun:
    config: Mapping[str, Any] = {
        "zero": {"stage": case.stage, "bucket_numel": 3000},
        "mesh": case.axes,
        **({"tensor": {"cut_norms": True}} if case.cut_norms else {}),
        "optimizer": OPTIMIZERS[case.kind],
        "clip_norm": CLIP,
    }
    return train_on_engine(lambda: make(case.kind), batches(case.kind, case.accumulation), config)


def run_all(cases: list[Case]) -> list[EngineRun]:
    """One call, since starting ranks costs more than training this."""
    return [run(case) for case in cases]
