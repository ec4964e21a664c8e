"""Train a language model cut into pipeline stages, its embedding tied to its head, with deepspeed.pipe."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path

import deepspeed
import torch
from corpus import Blocks
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import Tensor, nn
from transformers import AutoTokenizer


class Embedding(nn.Module):
    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(vocabulary, width) * 0.1)

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids, self.weight)


def to_logits(embedding: Embedding, x: Tensor) -> Tensor:
    return x @ embedding.weight.T


class Mixer(nn.Module):
    """A causal mean over positions and an MLP: enough to learn from what came before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device, dtype=x.dtype).unsqueeze(1)
        return x + self.down(nn.functional.gelu(self.up(self.norm(x + mean))))


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def layers(vocabulary: int, width: int, depth: int) -> list[LayerSpec]:
    return [
        TiedLayerSpec("embedding", Embedding, vocabulary, width, tied_weight_attr="weight"),
        *(LayerSpec(Mixer, width) for _ in range(depth)),
        LayerSpec(nn.LayerNorm, width),
        TiedLayerSpec("embedding", Embedding, vocabulary, width, forward_fn=to_logits, tied_weight_attr="weight"),
    ]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--load", default=None)
    parser.add_argument("--partition_method", default="parameters")
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")))
    return deepspeed.add_config_arguments(parser).parse_args()


def micro_batches(blocks: Blocks, micro: int, replica: int, replicas: int) -> Iterator[tuple[Tensor, Tensor]]:
    for first in range(replica * micro, len(blocks), replicas * micro):
        ids = torch.stack([blocks[i]["input_ids"] for i in range(first, first + micro)])
        yield ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def main() -> None:
    args = parse_args()
    deepspeed.init_distributed(dist_backend="gloo")
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    model = PipelineModule(
        layers=layers(len(tokenizer), 32, 4),
        num_stages=args.stages,
        loss_fn=next_token_loss,
        seed_layers=True,
        seed_fn=torch.manual_seed,  # without one, DeepSpeed gives numpy's integers to random.seed: Python 3.11 refuses
        base_seed=1234,
        partition_method=args.partition_method,
    )
    engine, _, _, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=[p for p in model.parameters() if p.requires_grad]
    )
    if args.load:
        path, _ = engine.load_checkpoint(args.load)
        assert path is not None, f"nothing to load in {args.load}"

    micro, gas = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    replicas, replica = engine.dp_world_size, engine.grid.get_data_parallel_id()
    start = engine.global_steps
    per_step = micro * gas * replicas
    blocks = Blocks(args.text, tokenizer, 33, args.steps * per_step, first=start * per_step)
    held_out = Blocks(args.text, tokenizer, 33, per_step, first=256)

    data = micro_batches(blocks, micro, replica, replicas)
    losses = [float(engine.train_batch(data_iter=data)) for _ in range(args.steps)]
    eval_loss = float(engine.eval_batch(micro_batches(held_out, micro, replica, replicas)))
    engine.save_checkpoint(args.output_dir)
    if deepspeed.comm.get_rank() == 0:
        report = {"losses": losses, "eval_loss": eval_loss, "global_steps": engine.global_steps}
        Path(args.output_dir, "report.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
