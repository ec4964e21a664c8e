"""One model cut along every axis that the ranks are enough for, and recomputed activations cut over tensor ranks:

python examples/all_axes.py
torchrun --nproc-per-node 4 examples/all_axes.py
torchrun --nproc-per-node 8 examples/all_axes.py
"""

import os

import torch

import trilithon
from trilithon.models import GPT, GPTConfig

ranks = int(os.environ.get("WORLD_SIZE", "1"))
tensor = 2 if ranks % 2 == 0 else 1
sequence = 2 if ranks % 4 == 0 else 1
pipe = 2 if ranks % 8 == 0 else 1  # what is left over is the data axis
shape = GPTConfig(vocab_size=64, context=32, num_layers=2, width=64, num_heads=4, dropout=0.05)
config = {
    "mesh": {"tensor": tensor, "sequence": sequence, "pipe": pipe},
    "zero": {"stage": 2},
    "recompute": {"partition": tensor > 1, "contiguous": True},
    "batch": {"micro_size": 4, "accumulation": 2},  # with stages, two micro-batches are under way at a time
    "optimizer": {"kind": "adamw", "lr": 3e-3},
}


def sample() -> tuple[torch.Tensor, torch.Tensor]:
    """Four sequences in which each token is the one before it plus 3."""
    tokens = (torch.randint(0, 64, (4, 1)) + 3 * torch.arange(33)) % 64
    return tokens[:, :-1], tokens[:, 1:]


torch.manual_seed(0)
with trilithon.initialize(GPT(shape), config) as engine:
    torch.manual_seed(engine.mesh.data_rank)  # ranks that share samples draw the same ones
    for _step in range(20):
        engine.train_step([sample(), sample()])
    if engine.rank == 0:
        axes = " x ".join(f"{size} {name}" for name, size in zip(engine.mesh.axes.names, engine.mesh.axes.sizes))
        print(f"{engine.steps} steps on {engine.world_size} ranks ({axes}), loss {engine.loss:.3f}")
        for group in ("tensor", "sequence", "activations", "gradients", "reduce", "gather"):
            print(f"{engine.ledger.sent_bytes(group=group) // engine.steps:>9,} bytes a step in {group}")
