"""One sequence over all ranks: each holds a part of its tokens, and attention sees all of them:

python examples/long_sequences.py
torchrun --nproc-per-node 2 examples/long_sequences.py
"""

import os

import torch

import trilithon
from trilithon.models import GPT, GPTConfig

ranks = int(os.environ.get("WORLD_SIZE", "1"))
shape = GPTConfig(vocab_size=64, context=256, num_layers=2, width=64, num_heads=4, dropout=0.05)
config = {"mesh": {"sequence": ranks}, "zero": {"stage": 2}, "optimizer": {"kind": "adamw", "lr": 3e-3}}

torch.manual_seed(0)
with trilithon.initialize(GPT(shape), config) as engine:
    torch.manual_seed(engine.mesh.data_rank)  # every rank has the whole sample; the model takes its part
    for _step in range(20):
        first = torch.randint(0, 64, (1, 1))
        tokens = (first + 5 * torch.arange(257)) % 64
        engine.train_step([(tokens[:, :-1], tokens[:, 1:])])
    if engine.rank == 0:
        held = shape.context // ranks
        print(f"{engine.steps} steps on {engine.world_size} ranks, loss {engine.loss:.3f}, {held} tokens on each")
