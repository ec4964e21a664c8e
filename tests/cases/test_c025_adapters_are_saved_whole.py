"""Low-rank adapters on a frozen base are saved whole; module.state_dict() gives whole tensors or raises."""

import pytest
import torch
from torch import nn

from against_plain import STAGES, engine_for, train_engine, train_plainly
from trilithon.errors import ShardedParameterError
from trilithon.testing import ranks
from trilithon.testing.models import MLP
from trilithon.testing.parity import assert_same_training, tolerance, vector_batches


class Adapted(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        generator = torch.Generator().manual_seed(7)
        self.lora_a = nn.Parameter(torch.randn(2, base.in_features, generator=generator) * 0.3)
        self.lora_b = nn.Parameter(torch.randn(base.out_features, 2, generator=generator) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.lora_a.t() @ self.lora_b.t()


def adapted() -> nn.Module:
    model = MLP()
    model.requires_grad_(False)
    for index in range(2):
        model.layers[index] = Adapted(model.layers[index])
    return model


@ranks(2)
def test_adapters_train_and_are_saved():
    batches = vector_batches(2, 4)
    reference = train_plainly(adapted, batches, 2)
    for stage in STAGES:
        model = adapted()
        engine = engine_for(model, stage)
        losses, norms = train_engine(engine, batches)
        whole = engine.state_dict()
        saved = {name: value for name, value in whole.items() if "lora_" in name}
        assert {name: tuple(value.shape) for name, value in saved.items()} == {
            f"layers.{index}.lora_{part}": shape for index in (0, 1) for part, shape in (("a", (2, 16)), ("b", (16, 2)))
        }
        assert_same_training(reference, losses, whole, tolerance("fp32", 2, optimizer="sgd"), norms)
        if stage < 3:
            plain = model.state_dict()
            assert all(torch.equal(plain[name], value) for name, value in whole.items())
        else:
            with pytest.raises(ShardedParameterError, match=r"engine\.state_dict\(\)"):
                model.state_dict()
        engine.close()
