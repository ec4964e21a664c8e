"""ZeRO stage 3 from the first moment: the model is built in slices, trained in slices, and read whole when asked.

python examples/zero3_init.py
torchrun --nproc-per-node 2 examples/zero3_init.py
"""

from __future__ import annotations

import torch

import trilithon
from trilithon.models import GPT, preset

VOCABULARY = 257
CONFIG = {
    "batch": {"micro_size": 4},
    "precision": "bf16",
    "zero": {"stage": 3},
    "optimizer": {"kind": "adamw", "lr": 3e-3},
    "clip_norm": 1.0,
}


def main() -> None:
    shape = preset("nano", VOCABULARY)
    with trilithon.zero.init():  # every parameter is cut as soon as it is registered; initialisers still work
        model = GPT(shape)
    with trilithon.initialize(model, CONFIG) as engine:
        torch.manual_seed(engine.rank)
        for _ in range(20):
            tokens = torch.randint(0, 32, (4, shape.context + 1))
            engine.train_step([(tokens[:, :-1], tokens[:, 1:])])  # the model returns its loss when it gets targets
        if engine.rank == 0:
            kinds = ("parameters", "gradients", "master", "optimizer")
            print(f"loss {engine.loss:.3f}; on this rank " + ", ".join(f"{k} {engine.memory()[k]:,} B" for k in kinds))

        weight = model.embedding.weight
        try:  # between uses only a slice is here, and a read of the values says so
            weight.sum()
        except trilithon.ShardedParameterError as error:
            if engine.rank == 0:
                print(f"refused: {str(error).splitlines()[0]}")
        with trilithon.zero.gathered(weight, modify=0):  # collective: every rank opens it, rank 0 may write
            if engine.rank == 0:
                weight.data[0].zero_()

        whole = engine.state_dict()  # collective: what an ordinary model's state_dict() holds, on every rank
    ordinary = GPT(shape)
    ordinary.load_state_dict(whole)
    assert not ordinary.embedding.weight[0].any()
    if engine.rank == 0:
        print(f"{engine.steps} steps; the whole model has {sum(p.numel() for p in ordinary.parameters()):,} parameters")


if __name__ == "__main__":
    main()
