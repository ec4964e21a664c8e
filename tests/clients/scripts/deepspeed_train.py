"""Train a small language model with DeepSpeed's own loop: initialize, forward, backward, step, checkpoints."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import deepspeed
import torch
from corpus import Blocks
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoTokenizer


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, bias=False, batch_first=True)
        self.norm_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.triu(torch.full((x.shape[1], x.shape[1]), float("-inf"), device=x.device, dtype=x.dtype), 1)
        h = self.norm(x)
        x = x + self.attention(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.norm_2(x))


class LanguageModel(nn.Module):
    def __init__(
        self, vocabulary: int, width: int = 32, heads: int = 4, depth: int = 2, recompute: bool = False
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.recompute = recompute

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute and self.training else block(x)
        logits = self.head(x)
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--first_step", type=int, default=0)
    parser.add_argument("--block_length", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--zero_init", action="store_true", help="build the model inside deepspeed.zero.Init")
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--freeze_embeddings", action="store_true")
    parser.add_argument(
        "--client_optimizer", action="store_true", help="torch.optim.SGD instead of the file's optimizer"
    )
    parser.add_argument("--load", default=None, help="folder of a checkpoint to go on from")
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")))
    return deepspeed.add_config_arguments(parser).parse_args()


def main() -> None:
    args = parse_args()
    deepspeed.init_distributed(dist_backend="gloo")
    rank, world = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)

    torch.manual_seed(args.seed)
    with deepspeed.zero.Init(config_dict_or_path=args.deepspeed_config, enabled=args.zero_init):
        model = LanguageModel(len(tokenizer), recompute=args.recompute)
    if args.zero_init:  # parameters made under zero.Init are filled through GatheredParameters
        torch.manual_seed(args.seed)
        filled = LanguageModel(len(tokenizer)) if rank == 0 else None
        for name, parameter in model.named_parameters():
            with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0):
                if filled is not None:
                    parameter.data.copy_(filled.get_parameter(name))
    if args.freeze_embeddings:
        model.embed.weight.requires_grad = False

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) if args.client_optimizer else None
    engine, optimizer, _, scheduler = deepspeed.initialize(
        args=args,
        model=model,
        optimizer=optimizer,
        model_parameters=[p for p in model.parameters() if p.requires_grad],
    )
    start = 0
    if args.load:
        path, client_state = engine.load_checkpoint(args.load)
        assert path is not None, f"nothing to load in {args.load}"
        start = client_state["done"]

    micro, gas = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    blocks = Blocks(args.text, tokenizer, args.block_length, (start + args.steps) * micro * gas * world)
    losses, norms, rates, returned = [], [], [], []
    engine.train()
    for step in range(start, start + args.steps):
        total = 0.0
        for part in range(gas):
            first = ((step * gas + part) * world + rank) * micro
            ids = torch.stack([blocks[i]["input_ids"] for i in range(first, first + micro)]).to(engine.device)
            loss = engine(ids)
            returned.append(float(engine.backward(loss)))
            assert engine.is_gradient_accumulation_boundary() == (part == gas - 1)
            engine.step()
            seen = loss.detach().float().clone()
            deepspeed.comm.all_reduce(seen)
            total += seen.item() / world / gas
        norm = engine.get_global_grad_norm()
        losses.append(total)
        norms.append(None if norm is None else float(norm))
        rates.append(engine.get_lr()[0])

    saved = engine.save_checkpoint(args.output_dir, client_state={"done": start + args.steps})
    written = engine.save_16bit_model(args.output_dir, "weights.bin")
    if rank == 0:
        full = None
        if engine.zero_optimization_stage() > 0:
            full = get_fp32_state_dict_from_zero_checkpoint(args.output_dir)
            torch.save({name: t.clone() for name, t in full.items()}, Path(args.output_dir, "fp32.pt"))
        report = {
            "losses": losses,
            "norms": norms,
            "rates": rates,
            "returned": returned,
            "saved": bool(saved),
            "written": bool(written),
            "global_steps": engine.global_steps,
            "global_samples": engine.global_samples,
            "micro_steps": engine.micro_steps,
            "scheduler": type(scheduler).__name__ if scheduler is not None else None,
            "optimizer_groups": len(optimizer.param_groups),
        }
        Path(args.output_dir, "report.json").write_text(json.dumps(report, indent=1))
    engine.destroy()


if __name__ == "__main__":
    main()
