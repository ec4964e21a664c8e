"""Trained here, exported in DeepSpeed's layout, and gone on from by a script on the `deepspeed` under test.

With `CLIENTS_PYTHON` that is DeepSpeed itself, and the way back is shown; otherwise it is our reader of its layout.
"""

from __future__ import annotations

from pathlib import Path

import ds_files
import plain_training
import pytest
import torch
from definitions import definitions_of
from launching import RankServer
from published import Published
from torch import nn
from typer.testing import CliRunner

import trilithon
from trilithon.cli.checkpoint import app

BEFORE, AFTER = 4, 2  # steps


def make(published: Published) -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module = definitions_of("deepspeed_train.py")["LanguageModel"](
        plain_training.load(published.llama).config.vocab_size
    )
    return made


def train_and_save(model: nn.Module, updates: list[plain_training.Update], folder: Path) -> None:
    """On one rank at stage 2: what DeepSpeed then has to read is another stage and another number of ranks."""
    config = ds_files.for_a_loop(2, 1, len(updates[0]))
    with trilithon.initialize(model, config) as engine:
        for micro_batches in updates:
            for ids in micro_batches:
                engine.backward(engine(ids))
                engine.step()
        engine.save(folder, client_state={"done": len(updates)})


@pytest.mark.parametrize(("stage", "world"), [(1, 1), (1, 2), (2, 2), (3, 1), (3, 2)])
def test_the_next_losses_are_those_of_plain_training(
    ranks: RankServer, published: Published, tmp_path: Path, *, stage: int, world: int
) -> None:
    updates = plain_training.updates_of(published.text, published.llama, BEFORE + AFTER, 2 * world)
    train_and_save(make(published), updates[:BEFORE], tmp_path / "ours")
    exported = tmp_path / "exported"
    command = ["export", tmp_path / "ours", exported, "--format", "deepspeed", "--ranks", world, "--zero-stage", stage]
    done = CliRunner().invoke(app, [str(argument) for argument in command])
    assert done.exit_code == 0, f"{done.output}\n{done.exception!r}"

    report = ranks.run(
        "deepspeed_train.py",
        tmp_path / "theirs",
        *("--tokenizer", published.llama, "--text", published.text, "--output_dir", tmp_path / "theirs"),
        *("--deepspeed", "--deepspeed_config", ds_files.write(tmp_path, ds_files.for_a_loop(stage, world, 2))),
        *("--load", exported, "--steps", AFTER),
        world_size=world,
    ).report()
    plain = plain_training.train(
        make(published),
        updates,
        rates=plain_training.constant(1e-2),
        loss_of=lambda call, ids: call(ids),
        make=lambda parameters, rate: torch.optim.AdamW(parameters, lr=rate, weight_decay=0.01),
    )
    assert report["losses"] == pytest.approx(plain.losses[BEFORE:], rel=1e-4)
    assert report["norms"] == pytest.approx(plain.norms[BEFORE:], rel=1e-3)
    assert report["global_steps"] == BEFORE + AFTER
    full = torch.load(tmp_path / "theirs" / "fp32.pt")
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(full[name], value, rtol=1e-3, atol=1e-4)
