"""DeepSpeed's own loop, and what it writes: initialize, forward, backward, step, save, load, zero_to_fp32."""

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
from torch import nn

STEPS = 4


@pytest.fixture(scope="session")
def plain_model() -> Any:
    return definitions_of("deepspeed_train.py")["LanguageModel"]


def run_script(
    ranks: RankServer, published: Published, folder: Path, config: dict[str, Any], *args: object, world: int
) -> Finished:
    return ranks.run(
        "deepspeed_train.py",
        folder,
        *("--tokenizer", published.llama, "--text", published.text, "--output_dir", folder),
        *("--deepspeed", "--deepspeed_config", ds_files.write(folder, config), *args),
        world_size=world,
    )


def reference(
    published: Published, model: nn.Module, parts: int, steps: int = STEPS, **how: Any
) -> plain_training.Plain:
    updates = plain_training.updates_of(published.text, published.llama, steps, parts)
    how = {"rates": plain_training.constant(1e-2), "make": decayed_adamw} | how
    return plain_training.train(model, updates, loss_of=lambda call, ids: call(ids), **how)


def decayed_adamw(parameters: list[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=rate, weight_decay=0.01)


def make(plain_model: Any, published: Published) -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module = plain_model(plain_training.load(published.llama).config.vocab_size)
    return made


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_loop_equals_plain_training(
    ranks: RankServer, published: Published, plain_model: Any, tmp_path: Path, *, stage: int, world: int
) -> None:
    config = ds_files.for_a_loop(stage, world, 2)
    more = ("--zero_init",) if stage == 3 else ()
    done = run_script(ranks, published, tmp_path / "a", config, *more, world=world)
    plain = reference(published, make(plain_model, published), 2 * world)
    report = done.report()
    assert report["losses"] == pytest.approx(plain.losses, rel=1e-4)
    if stage > 0:
        assert report["norms"] == pytest.approx(plain.norms, rel=1e-3)
    assert (report["global_steps"], report["micro_steps"]) == (STEPS, 2 * STEPS)
    assert report["global_samples"] == STEPS * 2 * 2 * world
    assert report["saved"] and report["written"]
    assert sum(report["returned"][:2]) == pytest.approx(report["losses"][0], rel=1e-5 if world == 1 else 1)
    if stage > 0:
        full = torch.load(tmp_path / "a" / "fp32.pt")
        for name, value in plain.model.state_dict().items():
            torch.testing.assert_close(full[name], value, rtol=1e-3, atol=1e-4)

    again = run_script(
        ranks, published, tmp_path / "b", config, *more, "--load", tmp_path / "a", "--steps", 2, world=world
    )
    longer = reference(published, make(plain_model, published), 2 * world, steps=6)
    assert again.report()["losses"] == pytest.approx(longer.losses[4:], rel=1e-4)
    assert again.report()["global_steps"] == 6


@pytest.mark.parametrize(("stage", "world"), [(0, 1), (1, 2), (2, 1), (3, 2)])
def test_bf16(
    ranks: RankServer, published: Published, plain_model: Any, tmp_path: Path, *, stage: int, world: int
) -> None:
    config = ds_files.for_a_loop(stage, world, 2, bf16={"enabled": True})
    report = run_script(ranks, published, tmp_path, config, world=world).report()
    plain = reference(published, make(plain_model, published), 2 * world, bf16=True)
    assert report["losses"] == pytest.approx(plain.losses, rel=2**-7)


@pytest.mark.parametrize("stage", [1, 3])
def test_own_optimizer_frozen_embedding_and_recompute(
    ranks: RankServer, published: Published, plain_model: Any, tmp_path: Path, stage: int
) -> None:
    config = ds_files.for_a_loop(stage, 2, 1, zero_allow_untested_optimizer=True)
    del config["optimizer"]
    options = ("--client_optimizer", "--freeze_embeddings", "--recompute")
    report = run_script(ranks, published, tmp_path, config, *options, world=2).report()
    model = make(plain_model, published)
    model.embed.weight.requires_grad = False
    before = model.embed.weight.detach().clone()
    plain = reference(
        published,
        model,
        2,
        make=lambda parameters, rate: torch.optim.SGD(parameters, lr=rate, momentum=0.9),
        rates=plain_training.constant(0.1),
    )
    assert report["losses"] == pytest.approx(plain.losses, rel=1e-4)
    assert torch.equal(torch.load(tmp_path / "fp32.pt")["embed.weight"], before)
