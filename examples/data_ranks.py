"""Each rank reads other samples, and ZeRO cuts what would be the same on all of them:

python examples/data_ranks.py
torchrun --nproc-per-node 2 examples/data_ranks.py
"""

import torch

import trilithon
from trilithon.models import GPT, GPTConfig

shape = GPTConfig(vocab_size=64, context=32, num_layers=2, width=64, num_heads=4)
config = {"zero": {"stage": 3}, "batch": {"micro_size": 4}, "optimizer": {"kind": "adamw", "lr": 3e-3}}

torch.manual_seed(0)
with trilithon.initialize(GPT(shape), config) as engine:
    torch.manual_seed(engine.mesh.data_rank)  # other samples on each rank
    for _step in range(40):
        tokens = (torch.randint(0, 64, (4, 1)) + 3 * torch.arange(33)) % 64  # each token is the one before it plus 3
        engine.train_step([(tokens[:, :-1], tokens[:, 1:])])
    if engine.rank == 0:
        held = engine.memory()
        print(f"{engine.steps} steps on {engine.world_size} ranks, loss {engine.loss:.3f}")
        print(f"{held['parameters']:,} bytes of parameters and {held['optimizer']:,} of their state on this rank")
