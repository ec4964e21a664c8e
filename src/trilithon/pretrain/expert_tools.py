"""Finished runs whose models have experts: two of them joined, or one with fewer experts.

The results are folders like those of a run (weights, shape and tokenizer), to be loaded, trained on or measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from trilithon.data import Tokenizer
from trilithon.errors import ConfigError, DataError
from trilithon.models import GPT, GPTConfig
from trilithon.parallel.moe import Utilization, aggregate, choose_experts, layers, prune
from trilithon.parallel.moe.merge import Dense
from trilithon.pretrain.artifacts import load_model, save_model
from trilithon.pretrain.start import WEIGHTS


def aggregate_runs(first: Path, second: Path, out: Path, dense: Dense = "mean") -> GPTConfig:
    """Write a model with the experts of both runs to `out`; returns its shape.

    Raises CheckpointError for a folder without a model, ConfigError for models that do not match or a taken folder.
    """
    one, tokenizer = _sparse(first)
    other, their_tokenizer = _sparse(second)
    if tokenizer.to_json() != their_tokenizer.to_json():
        raise ConfigError(f"{first} and {second} have different tokenizers, so their tokens mean different things.")
    state = aggregate(one.state_dict(), other.state_dict(), dense)
    shape = _with_experts(one.config, one.config.experts + other.config.experts)
    big = GPT(shape)
    big.load_state_dict(state)
    _save(out, big, tokenizer)
    return shape


def prune_run(
    run: Path, out: Path, keep: int, by: Literal["random", "utilization"] = "utilization", *,
    text: Path | None = None, max_tokens: int = 65536, seed: int = 0,
) -> tuple[GPTConfig, dict[str, list[int]]]:  # fmt: skip
    """Write the run's model with `keep` experts in each layer to `out`; its shape, and which experts were kept.

    by: "utilization" keeps those that most tokens of `text` choose. Raises as `aggregate_runs` does, ConfigError
    without a text to look at, and DataError for one that cannot be read.
    """
    model, tokenizer = _sparse(run)
    if keep < model.config.top_k:
        raise ConfigError(f"--keep {keep}: each token goes to {model.config.top_k} experts, so as many have to stay.")
    counts = {name: torch.zeros(layer.num_experts, dtype=torch.int64) for name, layer in layers(model)}
    if by == "utilization":
        if text is None:
            raise ConfigError("which experts are used shows on a text: give --data FILE, or --by random.")
        try:
            read = text.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise DataError(f"--data {text} cannot be read: {error.strerror}. Give a text file.") from error
        tokens = tokenizer.encode(read)[:max_tokens]
        counts = _counts(model, torch.as_tensor(tokens, dtype=torch.int64))
    kept = choose_experts(counts, keep, by, seed)
    for _, layer in layers(model):
        layer.ep_size = None  # how the new number splits over ranks is for the next run to say
    prune(model, kept)
    model.config = _with_experts(model.config, keep)
    _save(out, model, tokenizer)
    return model.config, kept


@torch.no_grad()
def _counts(model: GPT, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Tokens by expert, over a text of any length."""
    context = model.config.context
    if not len(tokens):
        raise ConfigError("the text has no tokens to look at.")
    with Utilization(model.eval()) as seen:
        for start in range(0, len(tokens), context):
            model(tokens[start : start + context].unsqueeze(0))
    return seen.counts


def _sparse(folder: Path) -> tuple[GPT, Tokenizer]:
    model, tokenizer = load_model(folder)
    if not model.config.experts:
        raise ConfigError(f"the model in {folder} has no experts; train one with `trilithon train --experts N`.")
    return model, tokenizer


def _with_experts(shape: GPTConfig, experts: int) -> GPTConfig:
    return GPTConfig(**{**shape.model_dump(), "experts": experts, "ep_size": None})


def _save(out: Path, model: GPT, tokenizer: Tokenizer) -> None:
    if (out / WEIGHTS).exists():
        raise ConfigError(f"{out} already holds a model. Give another --out.")
    out.mkdir(parents=True, exist_ok=True)
    save_model(out, model.state_dict(), model.config, tokenizer)
