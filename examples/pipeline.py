"""A model written as a list of layers, cut into stages that work on different micro-batches at the same time:

python examples/pipeline.py
torchrun --nproc-per-node 2 examples/pipeline.py
torchrun --nproc-per-node 4 examples/pipeline.py
"""

import os

import torch
from torch import nn

import trilithon
from trilithon import LayerSpec, PipelineModule, TiedLayerSpec
from trilithon.parallel.pipeline import make_orders, simulate

VOCABULARY, WIDTH, MICROS = 64, 64, 8


class Block(nn.Module):
    """A residual layer that sees the token before."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(2 * WIDTH, 128), nn.Linear(128, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        before = nn.functional.pad(normed, (0, 0, 1, 0))[:, :-1]
        return x + self.down(torch.relu(self.up(torch.cat((normed, before), -1))))


def to_logits(embedding: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x @ embedding.weight.T


def loss_fn(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


torch.manual_seed(0)
stages = min(int(os.environ.get("WORLD_SIZE", "1")), 2)  # what is left over is the data axis
layers = [
    TiedLayerSpec("embedding", nn.Embedding, VOCABULARY, WIDTH),  # the same weight on the first and the last stage
    *(LayerSpec(Block) for _ in range(4)),
    LayerSpec(nn.LayerNorm, WIDTH),
    TiedLayerSpec("embedding", nn.Embedding, VOCABULARY, WIDTH, forward_fn=to_logits),
]
model = PipelineModule(layers, num_stages=stages, loss_fn=loss_fn)
config = {
    "zero": {"stage": 1},
    "batch": {"micro_size": 4, "accumulation": MICROS},
    "pipeline": {"schedule": "1f1b"},
    "optimizer": {"kind": "adamw", "lr": 3e-3},
}
with trilithon.initialize(model, config) as engine:
    torch.manual_seed(engine.mesh.data_rank)  # stages of one pipeline draw the same samples
    for _step in range(40):
        start = torch.randint(0, VOCABULARY, (MICROS, 4, 1))
        tokens = (start + 3 * torch.arange(33)) % VOCABULARY  # each token is the one before it plus 3
        engine.train_step([(x[:, :-1], x[:, 1:]) for x in tokens])
    loss = engine.eval_step([(x[:, :-1], x[:, 1:]) for x in tokens[:2]])
    if engine.rank == 0:
        local = sum(param.numel() for param in engine.module.parameters())
        sent = engine.ledger.sent_bytes(kind="message") // engine.steps
        waiting = simulate(make_orders("1f1b", stages, MICROS)).bubble
        print(f"{engine.steps} steps on {engine.world_size} ranks in {stages} stages, loss {loss:.3f}")
        print(f"{local:,} parameters and {sent:,} bytes to the next stage a step; {waiting:.0%} of the time is waiting")
