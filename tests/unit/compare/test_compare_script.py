from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import nn

from trilithon.compare.plain import PlainSide, torch_optimizer
from trilithon.compare.script import Script
from trilithon.compare.side import perturb_
from trilithon.config import Config
from trilithon.errors import ConfigError, DataError

GOOD = """
import torch
from torch import nn
def build():
    return nn.Linear(3, 1)
def batches(rank, world_size):
    for index in range(6):
        yield torch.full((2, 3), float(10 * rank + index))
def loss(model, batch):
    return model(batch).square().mean()
"""


def script(tmp_path: Path, text: str = GOOD) -> Script:
    path = tmp_path / "script.py"
    path.write_text(text)
    return Script.load(path)


def test_build_starts_from_the_same_weights_every_time(tmp_path):
    ours = script(tmp_path)
    first, second, other = ours.model(3), ours.model(3), ours.model(4)
    assert torch.equal(first.weight, second.weight) and not torch.equal(first.weight, other.weight)
    assert first.training


@pytest.mark.parametrize("missing", ["build", "batches"])
def test_a_script_without_what_is_needed_is_refused(tmp_path, missing):
    with pytest.raises(ConfigError, match=f"does not define {missing}"):
        script(tmp_path, GOOD.replace(f"def {missing}(", f"def not_{missing}("))


def test_a_build_that_returns_something_else_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"returned dict, not an nn\.Module"):
        script(tmp_path, GOOD.replace("return nn.Linear(3, 1)", "return {}")).model(0)


def test_dropout_is_refused_because_it_cannot_be_compared(tmp_path):
    text = GOOD.replace("return nn.Linear(3, 1)", "return nn.Sequential(nn.Linear(3, 1), nn.Dropout(0.1))")
    with pytest.raises(ConfigError, match=r"1 is dropout with p=0.1"):
        script(tmp_path, text).model(0)
    script(tmp_path, text.replace("0.1", "0.0")).model(0)


def test_data_that_ends_too_early_is_told_with_the_count(tmp_path):
    feed = script(tmp_path).feed(1, 2)
    assert len(list(islice(feed, 6))) == 6
    with pytest.raises(DataError, match=r"batches\(1, 2\) .* ended after 6 batches"):
        next(feed)


@pytest.mark.parametrize("returned", ["{'loss': x.mean()}", "x.mean()", "type('Output', (), {'loss': x.mean()})()"])
def test_without_a_loss_function_the_model_returns_it(tmp_path, returned):
    text = f"""
from torch import nn
class Model(nn.Module):
    def forward(self, x):
        return {returned}
def build(): return Model()
def batches(rank, world_size): yield None
"""
    ours = script(tmp_path, text)
    x = torch.tensor([1.0, 3.0])
    for batch in (x, (x,), [x], {"x": x}):
        assert ours.loss(ours.model(0), batch).item() == 2.0


def test_a_model_that_does_not_return_a_loss_is_refused(tmp_path):
    ours = script(tmp_path, GOOD.partition("def loss")[0])
    with pytest.raises(ConfigError, match=r"shape \(2, 1\), not a loss"):
        ours.loss(ours.model(0), torch.ones(2, 3))


def test_plain_is_one_big_batch(tmp_path):
    ours = script(tmp_path)
    config = Config.load({"batch": {"accumulation": 3}, "optimizer": {"kind": "sgd", "lr": 0.01}})
    side = PlainSide(ours, ours.model(0), config, nproc=2)
    record = side.step(None)
    model = ours.model(0)
    whole = torch.cat([torch.full((2, 3), float(value)) for value in (0, 1, 2, 10, 11, 12)])
    loss = ours.loss(model, whole)
    loss.backward()
    assert record.loss == pytest.approx(loss.item(), rel=1e-6)  # a mean over 12 numbers
    torch.testing.assert_close(record.gradients["weight"], model.weight.grad, rtol=1e-6, atol=0)
    torch.testing.assert_close(record.parameters["bias"], model.bias - 0.01 * model.bias.grad, rtol=1e-6, atol=1e-7)
    assert (record.changed, record.lr) == (True, [0.01])


def test_plain_clips_and_takes_the_rates_of_the_other_side(tmp_path):
    ours = script(tmp_path)
    config = Config.load({"clip_norm": 0.5, "optimizer": {"kind": "sgd", "lr": 0.01}})
    model = ours.model(0)
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    record = PlainSide(ours, model, config, nproc=1).step([2.0])
    moved = torch.cat([p.flatten() for p in record.parameters.values()]) - before
    norm = torch.cat([g.flatten() for g in record.gradients.values()]).norm().item()
    assert norm > 0.5 or record.loss == 0  # recorded before clipping
    assert moved.norm().item() <= 2.0 * 0.5 * (1 + 1e-5)
    assert record.lr == [2.0]


@pytest.mark.parametrize("optimizer", [None, {"kind": "lion"}, {"kind": "adam", "bias_correction": False}])
def test_optimizers_that_torch_does_not_have_are_refused(optimizer):
    with pytest.raises(ConfigError, match="Define optimizer"):
        torch_optimizer(nn.Linear(1, 1), Config.load({"optimizer": optimizer} if optimizer else {}))


@pytest.mark.parametrize("kind", ["adam", "adamw", "sgd", "adagrad"])
def test_torch_optimizers_get_the_settings_of_the_configuration(kind):
    config = Config.load({"optimizer": {"kind": kind, "lr": 0.125, "weight_decay": 0.5}})
    optimizer = torch_optimizer(nn.Linear(1, 1), config)
    assert type(optimizer).__name__.lower() == kind
    assert optimizer.param_groups[0]["lr"] == 0.125 and optimizer.param_groups[0]["weight_decay"] == 0.5


def test_a_perturbation_moves_every_weight_by_one_unit_in_the_last_place():
    model, same = nn.Linear(50, 50), nn.Linear(50, 50)
    same.load_state_dict(model.state_dict())
    amount = 2.0**-23
    perturb_(model, amount, seed=1)
    moved = (model.weight - same.weight).abs() / same.weight.abs()
    assert (model.weight != same.weight).all()
    assert moved.max() <= 2 * amount
    untouched = [p.clone() for p in model.parameters()]
    perturb_(model, 0.0, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(untouched, model.parameters(), strict=True))
