"""Lightning's DeepSpeed strategy, with its two checks for CUDA lifted (preludes/lightning_on_cpu.py)."""

from __future__ import annotations

from pathlib import Path

import plain_training
import pytest
import torch
from launching import RankServer, ScriptFailedError
from published import Published
from transformers import AutoConfig, AutoModelForCausalLM

STEPS, RATE = 4, 1e-2


def run_script(
    ranks: RankServer, published: Published, folder: Path, stage: int, world: int, *args: object, lift: bool = True
) -> dict:
    return ranks.run(
        "lightning_train.py",
        folder,
        *("--model", published.llama, "--text", published.text, "--output_dir", folder),
        *("--zero_stage", stage, "--devices", world, *args),
        world_size=world,
        preludes=("lightning_on_cpu.py",) if lift else (),
        LIGHTNING_EXTERNAL="1",
    ).report()


def reference(published: Published, run: Path, world: int, steps: int) -> tuple[plain_training.Plain, float]:
    """From the weights that the script began with: Lightning decides in which order they are drawn."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(published.llama))
    model.load_state_dict(torch.load(run / "initial_0.pt"))
    updates = plain_training.updates_of(published.text, published.llama, STEPS, 2 * world)
    updates = [*updates, *updates][:steps]
    held_out = plain_training.updates_of(published.text, published.llama, 1, 4, first=512)[0]
    # Lightning divides the loss by the accumulation and leaves it to the engine to do so too: its limit of 1 acts at 2.
    plain = plain_training.train(model, updates, rates=plain_training.constant(RATE), clip=2.0)
    return plain, plain_training.evaluate(plain.model, held_out)


@pytest.mark.parametrize(("stage", "world"), [(1, 1), (2, 2), (3, 1), (3, 2)])
def test_fit_equals_plain_training(
    ranks: RankServer, published: Published, tmp_path: Path, stage: int, world: int
) -> None:
    """The second run is limited by steps alone: Lightning counts the finished epoch that it resumes from as two."""
    done = run_script(ranks, published, tmp_path / "a", stage, world)
    plain, eval_loss = reference(published, tmp_path / "a", world, STEPS)
    means = [sum(done["losses"][i : i + 2]) / 2 for i in range(0, 2 * STEPS, 2)]
    assert means == pytest.approx(plain.losses, rel=1e-4)
    assert sum(done["eval_losses"]) / len(done["eval_losses"]) == pytest.approx(eval_loss, rel=1e-4)
    assert done["global_step"] == STEPS

    again = run_script(ranks, published, tmp_path / "b", stage, world, "--resume_from", tmp_path / "a" / "fit.ckpt")
    longer, eval_loss = reference(published, tmp_path / "a", world, 2 * STEPS)
    assert (len(again["losses"]), again["global_step"]) == (2 * STEPS, 2 * STEPS)
    means = [sum(again["losses"][i : i + 2]) / 2 for i in range(0, 2 * STEPS, 2)]
    assert means == pytest.approx(longer.losses[STEPS:], rel=1e-4)
    assert sum(again["eval_losses"]) / len(again["eval_losses"]) == pytest.approx(eval_loss, rel=1e-4)


def test_lightning_itself_refuses_the_cpu(ranks: RankServer, published: Published, tmp_path: Path) -> None:
    """Which is why the tests above lift its check."""
    with pytest.raises(ScriptFailedError, match="only supported on CUDA GPUs"):
        run_script(ranks, published, tmp_path, 2, 1, lift=False)
