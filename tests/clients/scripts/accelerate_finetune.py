"""Fine-tune a causal language model with accelerate's own loop and a DeepSpeed plugin."""

from __future__ import annotations

import argparse
import json
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import DummyOptim, DummyScheduler, InitProcessGroupKwargs, set_seed
from corpus import Blocks
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, get_scheduler


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--deepspeed_config", default=None, help="JSON file; without it --zero_stage makes the plugin")
    parser.add_argument("--zero_stage", type=int, default=2)
    parser.add_argument("--mixed_precision", choices=["no", "bf16"], default="no")
    parser.add_argument("--micro_batch", type=int, default=2)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--learning_rate", type=float, default=1e-2)
    parser.add_argument("--weight_decay", type=float, default=0.01)
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--block_length", type=int, default=32)
    parser.add_argument("--eval_blocks", type=int, default=8)
    parser.add_argument("--save_after", type=int, default=0, help="save_state after this many updates")
    parser.add_argument("--resume_from", default=None)
    parser.add_argument("--first_update", type=int, default=0, help="updates that the run resumed from has made")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    plugin = DeepSpeedPlugin(
        hf_ds_config=args.deepspeed_config,
        zero_stage=None if args.deepspeed_config else args.zero_stage,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        gradient_clipping=args.max_grad_norm,
        zero3_save_16bit_model=None if args.deepspeed_config else args.zero_stage == 3,
    )
    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        mixed_precision=args.mixed_precision,
        deepspeed_plugin=plugin,
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo", timeout=timedelta(seconds=60))],
    )
    set_seed(args.seed)

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    blocks = args.steps * args.gradient_accumulation_steps * args.micro_batch * accelerator.num_processes
    first = blocks // args.steps * args.first_update
    train = DataLoader(
        Blocks(args.text, tokenizer, args.block_length, blocks, first=first), batch_size=args.micro_batch
    )
    held_out = DataLoader(
        Blocks(args.text, tokenizer, args.block_length, args.eval_blocks, first=512), batch_size=args.micro_batch
    )

    in_file = accelerator.state.deepspeed_plugin.deepspeed_config
    if "optimizer" in in_file:
        optimizer = DummyOptim(model.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay)
    if "scheduler" in in_file:
        scheduler = DummyScheduler(optimizer, total_num_steps=8 * accelerator.num_processes, warmup_num_steps=2)
    else:
        scheduler = get_scheduler("linear", optimizer, 0, 8 * accelerator.num_processes)
    model, optimizer, train, held_out, scheduler = accelerator.prepare(model, optimizer, train, held_out, scheduler)

    if args.resume_from:
        accelerator.load_state(args.resume_from)

    losses, norms, rates, within = [], [], [], []
    updates = 0
    model.train()
    for batch in train:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        within.append(accelerator.gather(loss.detach().float()).mean().item())
        if accelerator.sync_gradients:
            updates += 1
            losses.append(sum(within) / len(within))
            norms.append(None if norm is None else float(norm))
            rates.append(scheduler.get_last_lr()[0])
            within.clear()
            if updates == args.save_after:
                accelerator.save_state(f"{args.output_dir}/state")

    model.eval()
    seen = []
    for batch in held_out:
        with torch.no_grad():
            outputs = model(**batch)
        seen.append(accelerator.gather_for_metrics(outputs.loss.detach().float().repeat(args.micro_batch)))
    eval_loss = torch.cat(seen).mean().item()

    unwrapped = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(
        f"{args.output_dir}/model",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    if accelerator.is_main_process:
        report = {"losses": losses, "norms": norms, "rates": rates, "eval_loss": eval_loss}
        report["model_class"] = type(unwrapped).__name__
        Path(args.output_dir, "report.json").write_text(json.dumps(report, indent=1))
    accelerator.end_training()


if __name__ == "__main__":
    main()
