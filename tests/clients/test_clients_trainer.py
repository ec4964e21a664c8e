"""transformers' Trainer with a DeepSpeed JSON file: the losses are plain PyTorch's, and what it writes can be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ds_files
import plain_training
import pytest
import torch
from launching import Finished, RankServer
from published import Published
from torch import Tensor, nn

MICRO, STEPS, RATE = 2, 4, 1e-2


def run_trainer(
    ranks: RankServer,
    published: Published,
    folder: Path,
    config: dict[str, Any],
    *args: object,
    model: Path | None = None,
    world: int = 1,
    accumulation: int = 1,
    **launch: Any,
) -> Finished:
    blocks = STEPS * MICRO * world * accumulation
    return ranks.run(
        "trainer_finetune.py",
        folder,
        *("--model", model or published.llama, "--text", published.text, "--output_dir", folder),
        *("--deepspeed", ds_files.write(folder, config)),
        *("--accelerator_config", '{"use_configured_state": true}'),
        *("--train_sampling_strategy", "sequential", "--train_blocks", blocks, "--max_steps", STEPS),
        *("--per_device_train_batch_size", MICRO, "--per_device_eval_batch_size", MICRO),
        *("--gradient_accumulation_steps", accumulation, "--learning_rate", RATE, "--logging_steps", 1),
        *("--report_to", "none", "--disable_tqdm", "true", "--dataloader_pin_memory", "false"),
        *args,
        world_size=world,
        **launch,
    )


def logged(finished: Finished, key: str) -> list[float]:
    return [entry[key] for entry in finished.report()["log"] if key in entry]


def reference(
    published: Published,
    parts: int,
    rates: plain_training.Rates,
    model: Any = None,
    source: Path | None = None,
    **how: Any,
) -> plain_training.Plain:
    source = source or published.llama
    updates = plain_training.updates_of(published.text, source, STEPS, parts, micro=MICRO)
    return plain_training.train(model or plain_training.load(source), updates, rates=rates, **how)


def held_out_loss(
    published: Published, plain: plain_training.Plain, parts: int, source: Path | None = None, **how: Any
) -> float:
    first = STEPS * parts * MICRO
    batches = plain_training.updates_of(published.text, source or published.llama, 1, 4, first=first)[0]
    return plain_training.evaluate(plain.model, batches, **how)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fine_tuning_equals_plain_training(
    ranks: RankServer, published: Published, tmp_path: Path, stage: int, world: int
) -> None:
    """With accumulation, clipping, evaluation, the best model loaded at the end, saving and resuming."""
    schedule = ("--eval_strategy", "steps", "--eval_steps", 2, "--save_steps", 2)
    best = ("--load_best_model_at_end", "true", "--metric_for_best_model", "loss")
    config = ds_files.for_a_client(stage)
    done = run_trainer(ranks, published, tmp_path / "whole", config, *schedule, *best, world=world, accumulation=2)
    plain = reference(published, 2 * world, plain_training.warmup_decay(RATE, 1, STEPS))
    assert logged(done, "loss") == pytest.approx(plain.losses, rel=1e-4)
    if stage > 0:  # at stage 0 in fp32 the engine reports no norm
        assert logged(done, "grad_norm") == pytest.approx(plain.norms, rel=1e-3)
    expected = held_out_loss(published, plain, 2 * world)
    assert logged(done, "eval_loss")[-1] == pytest.approx(expected, rel=1e-4)
    assert done.report()["best"].endswith(f"checkpoint-{STEPS}")

    saved = tmp_path / "whole" / "checkpoint-2"
    resumed = run_trainer(
        ranks, published, tmp_path / "resumed", config, *schedule, "--resume", saved, world=world, accumulation=2
    )
    assert logged(resumed, "loss")[-2:] == pytest.approx(logged(done, "loss")[-2:], rel=1e-6)
    weights = plain_training.load(tmp_path / "resumed").state_dict()
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("stage", [1, 3])
def test_the_clients_own_optimizer_and_schedule(
    ranks: RankServer, published: Published, tmp_path: Path, stage: int
) -> None:
    """No "optimizer" in the file: the Trainer's AdamW and its linear schedule, recompute switched on."""
    done = run_trainer(
        ranks,
        published,
        tmp_path,
        ds_files.for_a_client(stage, optimizer=False),
        "--gradient_checkpointing",
        "true",
        world=2,
    )
    plain = reference(published, 2, plain_training.linear_decay(RATE, STEPS))
    assert logged(done, "loss") == pytest.approx(plain.losses, rel=1e-4)
    assert logged(done, "learning_rate") == pytest.approx(plain.rates, rel=1e-6)


@pytest.mark.parametrize(("stage", "world"), [(0, 1), (1, 2), (2, 1), (3, 2)])
def test_bf16(ranks: RankServer, published: Published, tmp_path: Path, stage: int, world: int) -> None:
    done = run_trainer(
        ranks,
        published,
        tmp_path,
        ds_files.for_a_client(stage, optimizer=False),
        *("--bf16", "true"),
        world=world,
        accumulation=2,
        preludes=("bf16_on_cpu.py",),
    )
    plain = reference(published, 2 * world, plain_training.linear_decay(RATE, STEPS), bf16=True)
    assert logged(done, "loss") == pytest.approx(plain.losses, rel=2**-7)


@pytest.mark.parametrize("stage", [2, 3])
def test_tied_resized_and_frozen(ranks: RankServer, published: Published, tmp_path: Path, stage: int) -> None:
    """gpt2's head is its embedding; the table grows by three rows; its positions are frozen."""
    done = run_trainer(
        ranks,
        published,
        tmp_path,
        ds_files.for_a_client(stage, optimizer=False),
        *("--extra_tokens", 3, "--freeze", "wpe"),
        model=published.gpt2,
        world=2,
    )
    torch.manual_seed(42)  # the Trainer's own seed: the new rows start at random
    model = plain_training.load(published.gpt2)
    before = model.transformer.wpe.weight.detach().clone()
    model.resize_token_embeddings(model.config.vocab_size + 3, mean_resizing=False)
    model.transformer.wpe.weight.requires_grad = False

    def loss_of(call: nn.Module, ids: Tensor) -> Tensor:
        """The Trainer divides by all 32 labels of a block where a model's configuration names no loss, as gpt2's."""
        return plain_training.language_model_loss(call, ids) * 31 / 32

    rates = plain_training.linear_decay(RATE, STEPS)
    plain = reference(published, 2, rates, model=model, source=published.gpt2, loss_of=loss_of)
    assert logged(done, "loss") == pytest.approx(plain.losses, rel=1e-4)
    trained = plain_training.load(tmp_path)
    assert trained.transformer.wte.weight.shape[0] == model.config.vocab_size
    assert trained.lm_head.weight is trained.transformer.wte.weight
    assert torch.equal(trained.transformer.wpe.weight, before)
    assert not torch.equal(
        trained.transformer.h[0].attn.c_attn.weight,
        plain_training.load(published.gpt2).transformer.h[0].attn.c_attn.weight,
    )


@pytest.mark.parametrize(("stage", "recompute"), [(2, False), (3, False), (3, True)])
def test_lora(ranks: RankServer, published: Published, tmp_path: Path, stage: int, recompute: bool) -> None:
    """Only the adapters are trained, and only they are saved."""
    switch = ("--gradient_checkpointing", "true") if recompute else ()
    done = run_trainer(
        ranks, published, tmp_path, ds_files.for_a_client(stage, optimizer=False), "--lora_rank", 4, *switch, world=2
    )
    plain = lora_reference(published, 2)
    assert logged(done, "loss") == pytest.approx(plain.losses, rel=1e-4)
    assert (tmp_path / "adapter_model.safetensors").exists()
    assert not (tmp_path / "model.safetensors").exists()


def lora_reference(published: Published, parts: int) -> plain_training.Plain:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(42)  # the Trainer's own seed
    lora = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(plain_training.load(published.llama), lora)
    return reference(published, parts, plain_training.linear_decay(RATE, STEPS), model=model)


def test_stage_3_evaluates_without_training(ranks: RankServer, published: Published, tmp_path: Path) -> None:
    """The Trainer makes an engine without an optimizer for that. (It cannot train with the same Trainer afterwards.)"""
    config = ds_files.for_a_client(3, optimizer=False)
    done = run_trainer(ranks, published, tmp_path, config, "--evaluate_only", "true", world=2)
    expected = held_out_loss(published, plain_training.Plain(plain_training.load(published.llama)), 2)
    assert done.report()["eval_loss"] == pytest.approx(expected, rel=1e-5)


def test_stage_3_generates_after_training(ranks: RankServer, published: Published, tmp_path: Path) -> None:
    config = ds_files.for_a_client(3, optimizer=False)
    done = run_trainer(ranks, published, tmp_path, config, "--generate_tokens", 6, world=2)
    plain = reference(published, 2, plain_training.linear_decay(RATE, STEPS))
    prompt = plain_training.tokens_of(published.text, published.llama, 8).unsqueeze(0)
    plain.model.eval()
    expected = plain.model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert done.report()["generated"] == expected[0].tolist()
