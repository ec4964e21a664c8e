"""A Llama-shaped model whose matrices are cut over all ranks, with ZeRO over what is left of them:

python examples/tensor_slices.py
torchrun --nproc-per-node 2 examples/tensor_slices.py
torchrun --nproc-per-node 4 examples/tensor_slices.py
"""

import os

import torch

import trilithon
from trilithon.models import Llama, LlamaConfig

ranks = int(os.environ.get("WORLD_SIZE", "1"))
shape = LlamaConfig(vocab_size=64, context=32, num_layers=2, width=64, num_heads=4, num_kv_heads=4, inner_width=128)
config = {
    "mesh": {"tensor": min(ranks, 2)},  # what is left over is the data axis
    "tensor": {"cut_norms": ranks > 1},
    "zero": {"stage": 1},
    "optimizer": {"kind": "adamw", "lr": 3e-3},
}

torch.manual_seed(0)
with trilithon.initialize(Llama(shape), config) as engine:
    torch.manual_seed(engine.mesh.data_rank)  # ranks that share a sample draw the same one
    for _step in range(40):
        start = torch.randint(0, 64, (8, 1))
        tokens = (start + 3 * torch.arange(33)) % 64  # each token is the one before it plus 3
        engine.train_step([(tokens[:, :-1], tokens[:, 1:])])
    if engine.rank == 0:
        local = sum(param.numel() for param in engine.module.parameters())
        sent = engine.ledger.sent_bytes(group="tensor") // engine.steps
        print(f"{engine.steps} steps on {engine.world_size} ranks, loss {engine.loss:.3f}")
        print(f"{local:,} parameters on this rank, {sent:,} bytes between tensor ranks a step")
