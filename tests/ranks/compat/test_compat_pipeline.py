"""DeepSpeed's pipeline classes and engine: train_batch and eval_batch equal plain training on one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from trilithon.compat import deepspeed
from trilithon.compat.deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from trilithon.compat.deepspeed.runtime.pipe.module import PipelineError
from trilithon.compat.deepspeed.runtime.pipe.topology import (
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
    ProcessTopology,
)
from trilithon.testing import ranks

CONFIG = {
    "train_micro_batch_size_per_gpu": 3,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
    "gradient_clipping": 0.0,
}


def layers() -> list[object]:
    return [
        LayerSpec(nn.Linear, 8, 16),
        torch.tanh,
        LayerSpec(nn.Linear, 16, 16),
        TiedLayerSpec("tie", nn.Linear, 16, 16),
        TiedLayerSpec("tie", nn.Linear, 16, 16, forward_fn=lambda module, x: x @ module.weight),
        LayerSpec(nn.Linear, 16, 4),
    ]


def batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    made = torch.Generator().manual_seed(11)
    return [(torch.randn(3, 8, generator=made), torch.randn(3, 4, generator=made)) for _ in range(2 * steps)]


def plain(steps: int) -> tuple[list[float], float]:
    torch.manual_seed(7)
    model = PipelineModule(layers(), num_stages=1, loss_fn=nn.functional.mse_loss, seed_layers=True)
    update = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, data = [], batches(steps)
    for step in range(steps):
        update.zero_grad()
        loss = sum(nn.functional.mse_loss(model(x), y) for x, y in data[2 * step : 2 * step + 2]) / 2
        loss.backward()
        update.step()
        losses.append(loss.item())
    with torch.no_grad():
        return losses, (sum(nn.functional.mse_loss(model(x), y) for x, y in data[:2]) / 2).item()


@ranks(2)
def test_batches_train_like_one_process_and_evaluate():
    expected, evaluated = plain(3)
    torch.manual_seed(7)
    model = PipelineModule(layers(), num_stages=2, loss_fn=nn.functional.mse_loss, seed_layers=True)
    engine, *_ = deepspeed.initialize(model=model, config=CONFIG)
    assert type(engine).__name__ == "PipelineEngine" and isinstance(engine, deepspeed.PipelineEngine)
    assert (engine.num_stages, engine.stage_id, engine.micro_batches) == (2, dist.get_rank(), 2)
    assert engine.is_first_stage() == (dist.get_rank() == 0) and engine.is_last_stage() == (dist.get_rank() == 1)
    assert engine.train_batch_size() == 6
    data = iter(batches(3))
    losses = [engine.train_batch(data).item() for _ in range(3)]
    assert losses == pytest.approx(expected, abs=1e-5)
    assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (3, 6, 18)
    assert engine.eval_batch(iter(batches(3))).item() == pytest.approx(evaluated, abs=1e-5)
    outputs = engine.eval_batch(iter(batches(3)), compute_loss=False)
    assert (outputs is None) == (not engine.is_last_stage())
    if outputs is not None:
        assert [tuple(one.shape) for one in outputs] == [(3, 4), (3, 4)]
    for call in (engine.forward, engine.backward, engine.step):
        with pytest.raises(PipelineError):
            call(torch.ones(3, 8))
    with pytest.raises(RuntimeError, match="no_grad"), torch.no_grad():
        engine.train_batch(iter(batches(1)))
    engine.set_batch_fn(lambda pair: (pair["x"], pair["y"]))
    engine.set_dataloader([{"x": x, "y": y} for x, y in batches(1)])
    assert engine.train_batch().item() < losses[0]
    engine.destroy()


@ranks(2)
def test_what_cannot_be_is_refused():
    with pytest.raises(RuntimeError, match="num_stages or topology"):
        PipelineModule(layers())
    with pytest.raises(NotImplementedError, match="weight for each layer"):
        PipelineModule(layers(), num_stages=2, partition_method="profile")
    with pytest.raises(RuntimeError, match=r"torch\.nn\.Module"):
        LayerSpec(torch.tanh)
    model = PipelineModule(layers(), num_stages=2, loss_fn=nn.functional.mse_loss)
    with pytest.raises(AssertionError, match="ZeRO stage 0 or 1"):
        deepspeed.initialize(model=model, config={**CONFIG, "zero_optimization": {"stage": 2}})
    with pytest.raises(NotImplementedError, match="make_orders"):
        deepspeed.runtime.pipe.schedule.TrainSchedule(micro_batches=2, stages=2, stage_id=0)


def test_topologies_are_arithmetic():
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    assert topology.get_axis_names() == ["pipe", "data", "model"] and topology.world_size() == 8
    assert topology.get_rank(pipe=1, data=0, model=1) == 5 and topology.get_coord(5).pipe == 1
    assert topology.get_axis_comm_lists("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert topology.get_axis_comm_lists("none") == [] and topology.get_dim("none") == 0
    assert topology.filter_match(pipe=0, model=1) == [1, 3] and topology.get_axis_list("data", 0) == [0, 1, 4, 5]
    assert topology.get_rank_repr(5) == "model_01"
    assert ProcessTopology(["a", "b"], [2, 3]).get_rank(a=1, b=2) == 5
    with pytest.raises(ValueError, match="coordinates"):
        topology.get_rank(pipe=1)
    grid = PipelineParallelGrid()
    assert grid.get_pipe_parallel_world_size() == 1 and grid.stage_to_global(0) == 0
