"""A script with deepspeed.pipe: stages, a tied embedding, train_batch and eval_batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ds_files
import plain_training
import pytest
import torch
from definitions import definitions_of
from launching import Finished, RankServer
from published import Published
from torch import Tensor, nn

STEPS, WIDTH, DEPTH = 4, 32, 4


class Uncut(nn.Module):
    """The script's layers as one model; every layer is made after its own seed, as `seed_layers` has it."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        names = definitions_of("pipeline_train.py", LayerSpec=None, TiedLayerSpec=None, PipelineModule=None)
        self._logits, self._loss = names["to_logits"], names["next_token_loss"]
        torch.manual_seed(1234)
        self.embedding = names["Embedding"](vocabulary, WIDTH)
        made = []
        for number in range(DEPTH):
            torch.manual_seed(1234 + number + 1)
            made.append(names["Mixer"](WIDTH))
        self.mixers = nn.Sequential(*made)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.mixers(self.embedding(ids[:, :-1])))
        loss: Tensor = self._loss(self._logits(self.embedding, x), ids[:, 1:])
        return loss


def run_script(
    ranks: RankServer, published: Published, folder: Path, stages: int, world: int, *args: object, zero: int = 0
) -> Finished:
    config = ds_files.for_a_loop(zero, world // stages, 4)
    config["zero_optimization"] = {"stage": zero}
    return ranks.run(
        "pipeline_train.py",
        folder,
        *("--tokenizer", published.llama, "--text", published.text, "--output_dir", folder, "--stages", stages),
        *("--deepspeed", "--deepspeed_config", ds_files.write(folder, config), *args),
        world_size=world,
    )


def reference(published: Published, replicas: int, steps: int = STEPS) -> tuple[plain_training.Plain, float]:
    updates = plain_training.updates_of(published.text, published.llama, steps, 4 * replicas, length=33)
    held_out = plain_training.updates_of(published.text, published.llama, 1, 4 * replicas, length=33, first=256)[0]
    plain = plain_training.train(
        Uncut(plain_training.load(published.llama).config.vocab_size),
        updates,
        rates=plain_training.constant(1e-2),
        loss_of=call,
        make=lambda parameters, rate: torch.optim.AdamW(parameters, lr=rate, weight_decay=0.01),
    )
    return plain, plain_training.evaluate(plain.model, held_out, call)


def call(model: Any, ids: Tensor) -> Tensor:
    loss: Tensor = model(ids)
    return loss


@pytest.mark.parametrize(("stages", "world", "zero"), [(1, 1, 0), (1, 2, 1), (2, 2, 0), (2, 2, 1)])
def test_the_pipeline_equals_the_uncut_model(
    ranks: RankServer, published: Published, tmp_path: Path, *, stages: int, world: int, zero: int
) -> None:
    done = run_script(ranks, published, tmp_path / "a", stages, world, zero=zero).report()
    plain, eval_loss = reference(published, world // stages)
    assert done["losses"] == pytest.approx(plain.losses, rel=1e-4)
    assert done["eval_loss"] == pytest.approx(eval_loss, rel=1e-4)
    assert done["global_steps"] == STEPS

    more = ("--load", tmp_path / "a", "--steps", 2)
    again = run_script(ranks, published, tmp_path / "b", stages, world, *more, zero=zero).report()
    longer, _ = reference(published, world // stages, steps=6)
    assert again["losses"] == pytest.approx(longer.losses[4:], rel=1e-4)
    assert again["global_steps"] == 6
