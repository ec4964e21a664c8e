"""Train over a slow network: the same model with AdamW and with 1-bit Adam, and what each of them sends.

python examples/slow_network.py
torchrun --nproc-per-node 2 examples/slow_network.py
"""

import torch

import trilithon

STEPS, WARM_UP = 150, 30
LINK_BITS_PER_S = 100e6  # an ordinary office network

for optimizer in (
    {"kind": "adamw", "lr": 1e-2, "weight_decay": 0.0},
    {"kind": "onebit_adam", "lr": 1e-2, "freeze_step": WARM_UP},
):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.GELU(), torch.nn.Linear(256, 4))
    with trilithon.initialize(model, {"optimizer": optimizer, "clip_norm": 1.0}) as engine:
        torch.manual_seed(1 + engine.rank)  # each rank draws its own data
        for _step in range(STEPS):
            x = torch.randn(64, 32)
            with engine.ledger.measure() as sent:
                loss = torch.nn.functional.cross_entropy(engine(x), x[:, :4].argmax(dim=1))
                engine.backward(loss)
                engine.step()
        if engine.rank == 0:
            seconds = sent.total_bytes * 8 / LINK_BITS_PER_S
            print(
                f"{optimizer['kind']}: {engine.steps} steps on {engine.world_size} ranks, loss {engine.loss:.3f}, "
                f"{sent.total_bytes} bytes sent in the last step, {1e3 * seconds:.2f} ms at 100 Mbit/s"
            )
