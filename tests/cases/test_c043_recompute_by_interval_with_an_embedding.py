"""Case 43: layers recomputed by interval, the first of which takes integers: gradients equal those without."""

from __future__ import annotations

import torch
from torch import nn

import trilithon
from trilithon import LayerSpec, PipelineModule
from trilithon.testing import ranks


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(width, width), nn.Linear(width, width), nn.Dropout(0.2)

    def forward(self, x):
        return x + self.dropout(self.down(torch.relu(self.up(x))))


def loss_fn(logits, labels):
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@ranks(2)
def test_every_interval_gives_the_same_weights(world_size):
    tokens = torch.arange(12).view(2, 6) % 11
    weights = []
    for interval in (0, 1, 2, 3):
        torch.manual_seed(0)
        layers = [LayerSpec(nn.Embedding, 11, 8), *(LayerSpec(Block, 8) for _ in range(4)), LayerSpec(nn.Linear, 8, 11)]
        model = PipelineModule(layers, loss_fn=loss_fn, activation_checkpoint_interval=interval)
        config = {"mesh": {"pipe": 2}, "batch": {"micro_size": 2, "accumulation": 3}, "optimizer": "adamw"}
        with trilithon.initialize(model, config) as engine:
            engine.train_step([(tokens, tokens)] * 3)
            weights.append(engine.state_dict())
    for found in weights[1:]:
        assert all(torch.equal(value, weights[0][name]) for name, value in found.items())


@ranks(2)
def test_classes_and_functions_of_ones_own_decide_what_is_recomputed_and_how(world_size):
    tokens = torch.arange(12).view(2, 6) % 11
    calls = []

    def again(function, *inputs):
        calls.append(len(inputs))
        return torch.utils.checkpoint.checkpoint(function, *inputs, use_reentrant=False)

    torch.manual_seed(0)
    layers = [LayerSpec(nn.Embedding, 11, 8), *(LayerSpec(Block, 8) for _ in range(4)), LayerSpec(nn.Linear, 8, 11)]
    model = PipelineModule(
        layers, loss_fn=loss_fn, activation_checkpoint_interval=1, activation_checkpoint_func=again,
        checkpointable_layers=["Block"],
    )  # fmt: skip
    config = {"mesh": {"pipe": 2}, "batch": {"micro_size": 2}, "optimizer": "adamw"}
    with trilithon.initialize(model, config) as engine:
        engine.train_step([(tokens, tokens)])
        blocks = sum(isinstance(module, Block) for module in engine.module.modules())
        assert 0 < blocks < 4 and calls == [1] * blocks
