"""The engine's surface on one rank: returns, counters, refusals, loaders, whole weights, frozen parameters."""

from __future__ import annotations

import argparse
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trilithon.checkpoint import open_checkpoint
from trilithon.compat import deepspeed
from trilithon.compat.deepspeed.runtime.dataloader import RepeatingLoader
from trilithon.errors import CheckpointError, ProtocolError

initialize = partial(deepspeed.initialize, dist_init_required=False)


def start(stage: int = 0, *, net: nn.Module | None = None, **more: object) -> deepspeed.DeepSpeedEngine:
    block = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        **more,
    }
    return initialize(model=net if net is not None else nn.Linear(4, 2), config=block)[0]


def loss_of(engine: deepspeed.DeepSpeedEngine, factor: float = 1.0) -> Tensor:
    dtype = torch.float16 if engine.fp16_enabled() else torch.bfloat16 if engine.bfloat16_enabled() else torch.float32
    return engine(torch.full((2, 4), factor, dtype=dtype)).sum()


def test_the_engine_is_a_module_around_the_model():
    net = nn.Linear(4, 2)
    engine = start(net=net)
    assert engine.module is net and isinstance(engine, nn.Module)
    assert [name for name, _ in engine.named_parameters()] == ["module.weight", "module.bias"]
    assert engine.in_features == 4 and engine.train() is None and engine.training and net.training
    engine.eval()
    assert not net.training and not engine.training
    with pytest.raises(AttributeError, match=r"'DeepSpeedEngine' object has no attribute 'nothing'"):
        _ = engine.nothing
    with pytest.raises(AttributeError, match=r"engine\.backward\(loss\)"):
        engine.scale(1)
    engine.destroy()


def test_a_plain_backward_is_refused_with_the_way():
    engine = start(2)
    with pytest.raises(RuntimeError, match=r"engine\.backward\(loss\) instead of loss\.backward"):
        loss_of(engine).backward()
    engine.native.drop_gradients()
    engine.destroy()


def test_flags_and_return_of_backward_are_those_of_the_release():
    new = start(gradient_accumulation_steps=4)
    loss = loss_of(new)
    assert new.backward(loss, True).item() == pytest.approx(loss.item() / 4)  # retain_graph comes first
    assert new.backward(loss, scale_wrt_gas=False).item() == pytest.approx(loss.item())
    with pytest.raises(TypeError, match="retain_graph, scale_wrt_gas"):
        new.backward(loss, False, True, True)
    new.destroy()
    old = start(gradient_accumulation_steps=4, bf16={"enabled": True}, _deepspeed_release="0.16")
    loss = loss_of(old)
    returned = old.backward(loss, False, True)  # release_loss, retain_graph
    assert returned.dtype == torch.float32 and returned.item() == pytest.approx(loss.item() / 4)
    with old.no_sync():
        assert old.backward(loss).dtype == torch.bfloat16  # nothing is reduced: the loss itself
    old.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_grad_drops_an_open_accumulation_except_at_stage_2(stage):
    """Observed with 0.19.8: stage 2 has reduced the gradient into its partition, which zero_grad does not reach."""
    engine = start(stage, gradient_accumulation_steps=2)
    engine.backward(loss_of(engine))
    engine.step()
    engine.zero_grad()
    engine.backward(loss_of(engine))
    engine.step()
    one = float(torch.tensor([1.0] * 10).norm())  # a half of: each weight 2 rows x 1, each bias 2 rows
    assert float(engine.get_global_grad_norm()) == pytest.approx(one * (2 if stage == 2 else 1), rel=1e-6)
    engine.destroy()


def test_no_sync_follows_the_rules_of_deepspeed_and_names_ours():
    engine = start()
    with engine.no_sync():
        with pytest.raises(AssertionError, match="reentry"), engine.no_sync():
            pass
        with pytest.raises(AssertionError, match=r"Engine\.step\(\) inside no_sync"):
            engine.step()
    engine.destroy()
    cut = start(2)
    with pytest.raises(AssertionError, match=r"engine\.native\.no_sync"), cut.no_sync():
        pass
    cut.destroy()


def test_a_loss_that_is_no_scalar_and_an_engine_without_optimizer_are_assertion_errors():
    engine = start()
    for wrong in (engine(torch.ones(2, 4)), 1.0):
        with pytest.raises(AssertionError, match="must be a scalar"):
            engine.backward(wrong)
    engine.destroy()
    for stage, kind in ((0, type(None)), (3, deepspeed.zero.DeepSpeedZeRoOffload)):
        block = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
        idle, optimizer, _, scheduler = initialize(model=nn.Linear(4, 2), config=block)
        assert isinstance(optimizer, kind) and scheduler is None
        with torch.no_grad():
            loss = idle(torch.ones(1, 4)).sum()
        with pytest.raises(AssertionError, match="must provide optimizer"):
            idle.backward(loss)
        with pytest.raises(AssertionError, match="must provide optimizer"):
            idle.step()
        idle.destroy()


@pytest.mark.parametrize("stage", [0, 2])
def test_a_step_that_overflows_counts_and_leaves_rate_and_weights(stage):
    engine = start(
        stage,
        fp16={"enabled": True, "initial_scale_power": 8, "hysteresis": 1},
        scheduler={"type": "LRRangeTest", "params": {"lr_range_test_step_size": 1}},
    )
    rate, weights = engine.get_lr(), engine.native.state_dict()["weight"]
    assert engine.optimizer.loss_scale == 256 and not engine.optimizer.overflow and engine.dynamic_loss_scale()
    engine.backward(loss_of(engine) * float("inf"))
    engine.step()
    assert engine.optimizer.overflow and not engine.was_step_applied()
    assert (engine.global_steps, engine.skipped_steps, engine.global_samples) == (1, 1, 2)
    assert engine.optimizer.cur_scale == 128 and engine.get_lr() == rate
    assert torch.equal(engine.native.state_dict()["weight"], weights)
    engine.backward(loss_of(engine))
    engine.step()
    assert not engine.optimizer.overflow and engine.get_lr() != rate and engine.skipped_steps == 1
    engine.destroy()


def test_sizes_can_be_changed_between_steps():
    engine = start(gradient_accumulation_steps=2)
    assert [ask() for ask in engine.get_batch_info()] == [4, 2, 2]
    with pytest.raises(ValueError, match=r"not a multiple of micro-batch x data-parallel ranks = 2 x 1"):
        engine.set_train_batch_size(3)
    engine.set_train_batch_size(2)
    assert engine.gradient_accumulation_steps() == 1
    engine.backward(loss_of(engine))
    engine.step()
    assert engine.was_step_applied() and engine.global_samples == 2
    engine.set_train_micro_batch_size(3)
    assert (engine.train_batch_size(), engine.gradient_accumulation_steps()) == (3, 1)
    engine.destroy()


def test_training_data_becomes_a_loader_that_shuffles_anew():
    data = TensorDataset(torch.arange(10.0).view(10, 1))
    block = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "Adam"}, "dataloader_drop_last": True}
    engine, _, loader, _ = initialize(model=nn.Linear(1, 1), config=block, training_data=data)
    assert loader is engine.training_dataloader and len(loader) == 2
    passes = [torch.cat([batch[0] for batch in loader]).view(-1).tolist() for _ in range(2)]
    assert passes[0] != passes[1] and all(len(set(one)) == 8 for one in passes)
    endless = RepeatingLoader(engine.deepspeed_io(data, batch_size=10, route="eval"))
    assert [next(endless)[0].view(-1).tolist() for _ in range(2)] == [list(range(10))] * 2
    engine.destroy()


def test_a_model_can_be_given_to_another_engine():
    """As the Trainer does, which makes an engine for evaluation before the one that trains."""
    net = nn.Linear(4, 2)
    weight = net.weight.detach().clone()
    first, _, _, _ = initialize(
        model=net, config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    )
    second = start(3, net=net)
    assert torch.equal(second.native.state_dict()["weight"], weight)
    with pytest.raises(ProtocolError, match="closed"):
        first(torch.ones(1, 4))
    second.backward(loss_of(second))
    second.step()
    second.destroy()
    second.destroy()  # as accelerate does, which does not remember
    third = start(3, net=net)  # whose parameters were given back
    assert torch.isfinite(third(torch.ones(1, 4))).all()
    third.destroy(give_back=False)


@pytest.mark.parametrize("stage", [1, 3])
def test_frozen_parameters_can_be_left_out_of_a_checkpoint(stage, tmp_path):
    def adapted() -> nn.Module:
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        net[0].requires_grad_(False)
        return net

    engine = start(stage, net=adapted())
    engine.backward(loss_of(engine))
    engine.step()
    engine.save_checkpoint(
        str(tmp_path), exclude_frozen_parameters=True, client_state={"args": argparse.Namespace(a=1)}
    )
    trained = engine.native.state_dict()
    engine.destroy()
    with open_checkpoint(tmp_path) as saved:
        assert {entry.name for part in ("master", "frozen") for entry in saved.entries(part)} == {"1.weight", "1.bias"}
    again = start(stage, net=adapted())
    path, client_state = again.load_checkpoint(tmp_path)
    assert path is not None and client_state["args"] == argparse.Namespace(a=1) and client_state["global_samples"] == 2
    assert all(torch.equal(value, trained[name]) for name, value in again.native.state_dict().items())
    again.destroy()


@pytest.mark.parametrize("stage", [0, 3])
def test_weights_are_saved_whole_in_the_type_that_forward_reads(stage, tmp_path, caplog):
    gather = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
    net = nn.Linear(4, 2)
    net.register_buffer("count", torch.tensor(3))
    net.bias.requires_grad = False
    engine = start(net=net, bf16={"enabled": True}, zero_optimization=gather)
    assert engine.save_16bit_model(str(tmp_path / "new"), exclude_frozen_parameters=True) is True
    saved = torch.load(tmp_path / "new" / "pytorch_model.bin")
    assert set(saved) == {"weight", "count"} and saved["weight"].dtype == torch.bfloat16
    if stage == 3:
        assert set(engine._zero3_consolidated_16bit_state_dict()) == {"weight", "bias", "count"}
    else:
        with pytest.raises(ValueError, match="requires ZeRO-3"):
            engine._zero3_consolidated_16bit_state_dict()
        assert set(engine._consolidated_16bit_state_dict()) == {"weight", "bias", "count"}
    engine.destroy()
    if stage == 3:
        cut = start(3)
        with caplog.at_level("INFO"):
            assert cut.save_16bit_model(str(tmp_path)) is False
        assert "stage3_gather_16bit_weights_on_model_save" in caplog.text
        cut.destroy()


def test_the_state_of_the_optimizer_goes_back_to_where_it_was():
    def one_more(engine: deepspeed.DeepSpeedEngine) -> Tensor:
        engine.backward(loss_of(engine))
        engine.step()
        return engine.native.state_dict()["weight"]

    adam = {"type": "Adam", "params": {"lr": 0.1}}
    engine = start(2, optimizer=adam)
    one_more(engine)
    state = engine.optimizer.state_dict()
    expected = one_more(engine)
    one_more(engine)
    engine.optimizer.load_state_dict(state)
    assert torch.equal(one_more(engine), expected)
    with pytest.raises(CheckpointError, match="2 ranks"):
        engine.optimizer.load_state_dict({**state, "ranks": 2})
    engine.destroy()


def test_calls_that_mean_nothing_here_are_refused_by_name(tmp_path):
    engine = start()
    with pytest.raises(ValueError, match="non-empty"):
        engine.save_checkpoint("")
    with pytest.raises(ProtocolError, match="custom_load_fn"):
        engine.load_checkpoint(tmp_path, custom_load_fn=print)
    with pytest.raises(ProtocolError, match="compiles the module"):
        engine.compile(schedule=[(0, [])])
    for name in ("offload_states", "coalesce_grad_reduction", "amp_enabled", "zero_cpu_offload"):
        assert not hasattr(engine, name)
        with pytest.raises(AttributeError, match=f"DeepSpeedEngine.{name} does not exist"):
            getattr(engine, name)
    engine.save_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="no checkpoint 'missing'"):
        engine.load_checkpoint(tmp_path, tag="missing")
    engine.destroy()


def test_events_are_written_as_rows_of_step_and_value(tmp_path):
    sink = {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}
    engine = start(csv_monitor=sink)
    for _ in range(2):
        engine.backward(loss_of(engine))
        engine.step()
    engine.monitor.write_events([("Mine/value", torch.tensor(1.5), 7)])
    assert (tmp_path / "run" / "Mine_value.csv").read_text().splitlines()[1:] == ["7,1.5"]
    lines = (tmp_path / "run" / "Train_Samples_lr.csv").read_text().splitlines()
    assert lines[1:] == ["2,0.5", "4,0.5"]
    engine.destroy()


def test_weights_under_module_are_taken_over_by_the_masters():
    engine = start(2)
    engine.load_module_state_dict({"module": {"weight": torch.zeros(2, 4), "bias": torch.ones(2)}})
    assert dict(engine.native.full_parameters())["bias"].tolist() == [1.0, 1.0]
    assert set(engine.module_state_dict()) == {"weight", "bias"}
    engine.destroy()
