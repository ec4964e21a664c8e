"""Train with Lightning's DeepSpeed strategy: a LightningModule, a Trainer, a checkpoint and a second run from it."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import deepspeed
import lightning
import torch
from corpus import Blocks
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


class FineTuning(lightning.LightningModule):
    def __init__(self, model: str, learning_rate: float, output_dir: str) -> None:
        super().__init__()
        self.source = model
        self.learning_rate = learning_rate
        self.output_dir = output_dir
        self.model: torch.nn.Module | None = None
        self.losses: list[float] = []
        self.eval_losses: list[float] = []

    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(0)
            self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(self.source))
            with deepspeed.zero.GatheredParameters(list(self.model.parameters())):
                initial = {name: value.detach().clone() for name, value in self.model.named_parameters()}
            torch.save(initial, f"{self.output_dir}/initial_{self.trainer.global_rank}.pt")

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        assert self.model is not None
        loss: Tensor = self.model(**batch).loss
        self.losses.append(self.trainer.strategy.reduce(loss.detach().clone(), reduce_op="mean").item())
        return loss

    def validation_step(self, batch: dict[str, Tensor], _: int) -> None:
        assert self.model is not None
        loss = self.model(**batch).loss
        self.eval_losses.append(self.trainer.strategy.reduce(loss.detach().clone(), reduce_op="mean").item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate, weight_decay=0.0)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--zero_stage", type=int, default=2)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--learning_rate", type=float, default=1e-2)
    parser.add_argument("--resume_from", default=None)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    count = args.steps * args.accumulation * args.devices * 2
    blocks = Blocks(args.text, tokenizer, 32, count)
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    in_order = DistributedSampler(blocks, num_replicas=args.devices, rank=rank, shuffle=False)  # else it is shuffled
    train = DataLoader(blocks, batch_size=2, sampler=in_order)
    held_out = DataLoader(Blocks(args.text, tokenizer, 32, 8, first=512), batch_size=2)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy=DeepSpeedStrategy(stage=args.zero_stage, process_group_backend="gloo"),
        max_steps=args.steps if args.resume_from is None else 2 * args.steps,
        accumulate_grad_batches=args.accumulation,
        gradient_clip_val=1.0,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        default_root_dir=args.output_dir,
        num_sanity_val_steps=0,
    )
    module = FineTuning(args.model, args.learning_rate, args.output_dir)
    trainer.fit(module, train, held_out, ckpt_path=args.resume_from)
    trainer.save_checkpoint(f"{args.output_dir}/fit.ckpt")
    if trainer.is_global_zero:
        report = {"losses": module.losses, "eval_losses": module.eval_losses, "global_step": trainer.global_step}
        Path(args.output_dir, "report.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
