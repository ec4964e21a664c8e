"""A model, a configuration, three calls. The same file runs on one process and on several:

python examples/minimal.py
torchrun --nproc-per-node 2 examples/minimal.py
"""

import torch

import trilithon

model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 4))
config = {"zero": {"stage": 3}, "optimizer": {"kind": "adamw", "lr": 1e-2}}

with trilithon.initialize(model, config) as engine:
    torch.manual_seed(engine.rank)  # each rank draws its own data
    for _step in range(60):
        x = torch.randn(16, 32)
        loss = torch.nn.functional.cross_entropy(engine(x), x[:, :4].argmax(dim=1))
        engine.backward(loss)
        engine.step()
    if engine.rank == 0:
        print(f"{engine.steps} steps on {engine.world_size} ranks, loss {engine.loss:.3f}")
