"""Train a small language model whose MLP is a mixture of experts, with deepspeed.moe."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import deepspeed
import torch
from corpus import Blocks
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import has_moe_layers, split_params_into_different_moe_groups_for_optimizer
from torch import Tensor, nn
from transformers import AutoTokenizer


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class SparseModel(nn.Module):
    def __init__(self, vocabulary: int, width: int, experts: int, expert_parallel: int, k: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.moe = MoE(
            hidden_size=width,
            expert=Expert(width),
            num_experts=experts,
            ep_size=expert_parallel,
            k=k,
            capacity_factor=float(experts),
            eval_capacity_factor=float(experts),
            min_capacity=4,
            use_rts=False,
            top2_2nd_expert_sampling=False,
        )

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.embed(ids)
        steps = torch.arange(1, ids.shape[1] + 1, device=x.device, dtype=x.dtype).unsqueeze(1)
        mixed, balance, counts = self.moe(self.norm(x + x.cumsum(1) / steps))
        logits = self.head(x + mixed)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
        return loss, balance, counts


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--ep_size", type=int, default=1)
    parser.add_argument("--k", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--balance_weight", type=float, default=0.01)
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")))
    return deepspeed.add_config_arguments(parser).parse_args()


def main() -> None:
    args = parse_args()
    deepspeed.init_distributed(dist_backend="gloo")
    rank, world = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    torch.manual_seed(0)
    model = SparseModel(len(tokenizer), 32, args.experts, args.ep_size, args.k)
    found, experts = has_moe_layers(model)
    groups = split_params_into_different_moe_groups_for_optimizer(
        {"params": list(model.parameters()), "name": "all", "lr": 0.05}
    )
    engine, _, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=groups)

    micro, gas = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    blocks = Blocks(args.text, tokenizer, 32, args.steps * micro * gas * world)
    losses, balances, tokens = [], [], []
    engine.train()
    for step in range(args.steps):
        total = torch.zeros(2)
        for part in range(gas):
            first = ((step * gas + part) * world + rank) * micro
            ids = torch.stack([blocks[i]["input_ids"] for i in range(first, first + micro)]).to(engine.device)
            loss, balance, counts = engine(ids)
            engine.backward(loss + args.balance_weight * balance)
            engine.step()
            seen = torch.stack([loss.detach().float(), balance.detach().float()])
            deepspeed.comm.all_reduce(seen)
            total += seen / world / gas
        losses.append(total[0].item())
        balances.append(total[1].item())
        tokens.append(int(counts.sum()))
    engine.save_checkpoint(args.output_dir)
    if rank == 0:
        report = {"losses": losses, "balances": balances, "tokens": tokens, "found": [bool(found), int(experts)]}
        Path(args.output_dir, "report.json").write_text(json.dumps(report, indent=1))
    engine.destroy()


if __name__ == "__main__":
    main()
