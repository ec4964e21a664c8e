"""trl's SFTTrainer on texts of unequal length: its loss is a mean over tokens, whatever the split into batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ds_files
import plain_training
import pytest
import torch
from launching import RankServer
from published import Published
from torch import Tensor, nn
from transformers import AutoTokenizer

MICRO, STEPS, RATE, LENGTH = 2, 4, 1e-2, 48


def texts(published: Published, count: int) -> list[Tensor]:
    """Paragraphs as tokens with an end, cut to the length that SFTConfig names."""
    tokenizer = AutoTokenizer.from_pretrained(published.llama)
    paragraphs = [part.strip() for part in published.text.read_text(encoding="utf-8").split("\n\n")]
    kept = [part for part in paragraphs if len(part) > 40][:count]
    return [torch.tensor([*tokenizer(part)["input_ids"], tokenizer.eos_token_id][:LENGTH]) for part in kept]


def summed_loss(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids.unsqueeze(0)).logits[0, :-1]
    return nn.functional.cross_entropy(logits.float(), ids[1:], reduction="sum")


def reference(published: Published, texts_per_update: int) -> list[float]:
    """AdamW on the mean over the tokens of all texts of an update."""
    model: Any = plain_training.load(published.llama)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    all_texts = texts(published, STEPS * texts_per_update)
    losses = []
    for update in range(STEPS):
        batch = all_texts[update * texts_per_update : (update + 1) * texts_per_update]
        loss = sum((summed_loss(model, ids) for ids in batch), torch.zeros(())) / sum(len(ids) - 1 for ids in batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = RATE * (1 - update / STEPS)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def run_sft(
    ranks: RankServer, published: Published, folder: Path, stage: int, world: int, *args: object
) -> list[float]:
    config = ds_files.for_a_client(stage, optimizer=False)
    done = ranks.run(
        "sft_train.py",
        folder,
        *("--model", published.llama, "--text", published.text, "--output_dir", folder),
        *("--deepspeed", ds_files.write(folder, config), "--bf16", "false"),
        *("--accelerator_config", '{"use_configured_state": true}', "--train_sampling_strategy", "sequential"),
        *("--train_texts", STEPS * MICRO * 2 * world, "--max_steps", STEPS, "--max_length", LENGTH),
        *("--per_device_train_batch_size", MICRO, "--gradient_accumulation_steps", 2, "--learning_rate", RATE),
        *("--logging_steps", 1, "--report_to", "none", "--disable_tqdm", "true", "--save_strategy", "no"),
        *("--dataloader_pin_memory", "false", *args),
        world_size=world,
    )
    return [entry["loss"] for entry in done.report()["log"] if "loss" in entry]


@pytest.mark.parametrize(("stage", "world"), [(0, 1), (1, 2), (2, 2), (3, 1), (3, 2)])
def test_sft_equals_plain_training(
    ranks: RankServer, published: Published, tmp_path: Path, stage: int, world: int
) -> None:
    """With gradient checkpointing, which SFTConfig switches on."""
    losses = run_sft(ranks, published, tmp_path, stage, world)
    assert losses == pytest.approx(reference(published, MICRO * 2 * world), rel=2e-4)
    assert (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize("stage", [2, 3])
def test_sft_with_adapters(ranks: RankServer, published: Published, tmp_path: Path, stage: int) -> None:
    """At stage 3 trl insists on reentrant checkpointing. Adapters start at zero: the first loss is the model's own."""
    losses = run_sft(ranks, published, tmp_path, stage, 2, "--lora_rank", 4)
    assert losses[0] == pytest.approx(reference(published, MICRO * 4)[0], rel=1e-5)
    assert losses[-1] != losses[0]
    assert (tmp_path / "adapter_model.safetensors").exists()
