"""Stage 3 does not issue one gather per tiny layer.

A system gathered each of many small layers by itself, so latency ruled. With the default settings the number of
collectives of a step is bounded by bytes over bucket size plus a small constant, not by the number of layers; the plan
of units can be printed.
https://github.com/deepspeedai/DeepSpeed/issues/5047
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trilithon import initialize
from trilithon.testing import ranks

LAYERS, WIDTH = 60, 8


class ManySmall(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()


class Group(ManySmall):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS // 5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.groups = nn.Sequential(*(Group() for _ in range(5)))

    def forward(self, x: Tensor) -> Tensor:
        return self.groups(x).square().mean()


@ranks(2)
def test_collectives_per_step_do_not_grow_with_layers(world_size: int):
    engine = initialize(ManySmall(), {"zero": {"stage": 3}, "optimizer": {"kind": "adamw"}})
    for _ in range(2):
        with engine.ledger.measure() as sent:
            engine.backward(engine(torch.ones(2, WIDTH)))
            engine.step()
    # everything fits into one unit: gathered once (it stays until backward), reduced once, and one agreement on norm,
    # flags and loss
    assert sent.calls <= 3, engine.ledger.rows()
    header, *lines = engine.plan().splitlines()
    assert header.split() == ["unit", "elements", "type", "values", "parameters"]
    assert len(lines) == 1 and lines[0].startswith("(root)") and f"and {2 * LAYERS - 3} more" in lines[0]
    engine.close()


@ranks(2)
def test_the_bound_is_bytes_over_unit_size(world_size: int):
    """With units of at most a fifth of the model there are at least five, and a dozen layers still share one."""
    zero = {"stage": 3, "unit_classes": ("Group",)}
    engine = initialize(Grouped(), {"zero": zero, "optimizer": {"kind": "adamw"}})
    for _ in range(2):
        with engine.ledger.measure() as sent:
            engine.backward(engine(torch.ones(2, WIDTH)))
            engine.step()
    # each group: gathered for forward and (but for the last) for backward, reduced once; one agreement
    assert sent.calls == 3 * 5 - 1 + 1, engine.ledger.rows()
    assert len(engine.plan().splitlines()) == 1 + 5
    engine.close()
