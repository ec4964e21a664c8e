"""A script in DeepSpeed's style trains as plain PyTorch does on everything at once, at every stage."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from trilithon.compat import deepspeed
from trilithon.testing import ranks

STAGES = (0, 1, 2, 3)
MICRO = 2  # rows of one rank's micro-batch


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


def rows(steps: int, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(count, 6, generator=generator) for _ in range(steps)]


def loss_of(out: Tensor) -> Tensor:
    return out.square().mean()


def config(stage: int, accumulation: int = 1, **more: object) -> dict[str, object]:
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.1}},
        **more,
    }


def plainly(batches: list[Tensor], clip: float) -> tuple[dict[str, Tensor], list[float]]:
    """Whole batches on one process; the norms before clipping."""
    plain = model()
    update, norms = torch.optim.AdamW(plain.parameters(), lr=0.02, weight_decay=0.1), []
    for batch in batches:
        update.zero_grad()
        loss_of(plain(batch)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(plain.parameters(), clip)))
        update.step()
    return plain.state_dict(), norms


def mine(batch: Tensor, rank: int, world_size: int, micro: int, accumulation: int) -> Tensor:
    return batch.view(accumulation, world_size, MICRO, 6)[micro, rank]


@ranks(1, 2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_raw_loop_trains_as_plain_pytorch(stage, world_size):
    batches = rows(3, 2 * world_size * MICRO)
    expected, norms = plainly(batches, 0.3)
    engine, optimizer, loader, scheduler = deepspeed.initialize(
        model=model(), config=config(stage, accumulation=2, gradient_clipping=0.3)
    )
    assert loader is None and scheduler is None and optimizer is engine.optimizer
    assert engine.get_global_grad_norm() is None
    for batch, norm in zip(batches, norms, strict=True):
        for micro in range(2):
            assert engine.is_gradient_accumulation_boundary() == (micro == 1)
            loss = loss_of(engine(mine(batch, engine.global_rank, world_size, micro, 2)))
            returned = engine.backward(loss)
            torch.testing.assert_close(returned, loss.detach() / 2)
            engine.step()
            assert engine.was_step_applied() == (micro == 1)
        torch.testing.assert_close(float(engine.get_global_grad_norm()), norm, rtol=1e-5, atol=0)
    assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (3, 6, 3 * 2 * world_size * MICRO)
    trained = engine.native.state_dict()
    for name, value in expected.items():  # 3 steps of AdamW in fp32; the sum over ranks has another order
        torch.testing.assert_close(trained[name], value, rtol=1e-5, atol=1e-6)
    engine.destroy()


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_boundary_set_by_hand_overrides_counting(stage, world_size):
    """As accelerate calls it: a divided loss, step() at boundaries only, and a window shorter than configured."""
    batches = rows(2, 4 * world_size * MICRO)
    expected, _ = plainly(batches, 1e9)
    engine, *_ = deepspeed.initialize(model=model(), config_params=config(stage, accumulation=8, gradient_clipping=0))
    for batch in batches:
        for micro in range(4):
            engine.set_gradient_accumulation_boundary(is_boundary=micro == 3)
            loss = loss_of(engine(mine(batch, engine.global_rank, world_size, micro, 4))) / 4
            engine.backward(loss, scale_wrt_gas=False)
            if micro == 3:
                engine.step()
    assert (engine.global_steps, engine.micro_steps) == (2, 2)
    trained = engine.native.state_dict()
    for name, value in expected.items():
        torch.testing.assert_close(trained[name], value, rtol=1e-5, atol=1e-6)
    engine.destroy()


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_caller_who_manages_accumulation_steps_whenever_step_is_called(stage, world_size):
    batches = rows(2, 2 * world_size * MICRO)
    expected, _ = plainly(batches, 1e9)
    settings = config(stage, accumulation=2, gradient_clipping=0, managed_gradient_accumulation=False)
    engine, *_ = deepspeed.initialize(model=model(), config=settings)
    for batch in batches:
        for micro in range(2):
            engine.backward(loss_of(engine(mine(batch, engine.global_rank, world_size, micro, 2))))
        engine.step()
    assert engine.global_steps == 2
    trained = engine.native.state_dict()
    for name, value in expected.items():
        torch.testing.assert_close(trained[name], value, rtol=1e-5, atol=1e-6)
    engine.destroy()


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_client_optimizer_keeps_its_groups_and_its_scheduler(stage, world_size):
    """A rate that the client or a torch scheduler writes into the client's own groups is the rate of the next step."""
    batch = rows(1, world_size * MICRO)[0]
    plain, net = model(), model()
    reference = torch.optim.SGD(plain.parameters(), lr=0.5)
    own = torch.optim.SGD(net.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(own, 1, gamma=0.5)
    settings = config(stage, gradient_clipping=0)
    del settings["optimizer"]
    engine, optimizer, _, returned = deepspeed.initialize(
        model=net, optimizer=own, lr_scheduler=schedule, config={**settings, "zero_allow_untested_optimizer": True}
    )
    assert returned is schedule and engine.basic_optimizer is own and optimizer.param_groups is own.param_groups
    for rate in (0.5, 0.25, 2.0):
        if rate == 2.0:
            optimizer.param_groups[0]["lr"] = 2.0
        assert engine.get_lr() == [rate]
        reference.param_groups[0]["lr"] = rate
        engine.backward(loss_of(engine(mine(batch, engine.global_rank, world_size, 0, 1))))
        engine.step()
        reference.zero_grad()
        loss_of(plain(batch)).backward()
        reference.step()
    trained = engine.native.state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(trained[name], value, rtol=1e-5, atol=1e-6)
    engine.destroy()


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_continues_with_its_counters_schedule_and_client_state(stage, world_size, tmp_path):
    settings = config(
        stage, gradient_clipping=0,
        scheduler={"type": "WarmupDecayLR", "params": {"total_num_steps": 9, "warmup_num_steps": 3}},
    )  # fmt: skip
    batches = rows(5, world_size * MICRO)

    def run(engine: deepspeed.DeepSpeedEngine, some: list[Tensor]) -> None:
        for batch in some:
            engine.backward(loss_of(engine(mine(batch, engine.global_rank, world_size, 0, 1))))
            engine.step()

    engine, *_ = deepspeed.initialize(model=model(), config=copy.deepcopy(settings))
    assert engine.load_checkpoint(tmp_path) == (None, None)
    run(engine, batches[:3])
    assert engine.save_checkpoint(str(tmp_path), client_state={"epoch": 7}) is True
    assert (tmp_path / "latest").read_text().strip() == "global_step3" and (tmp_path / "global_step3").is_dir()
    run(engine, batches[3:])
    expected, rates = engine.native.state_dict(), engine.get_lr()
    assert engine.save_checkpoint(tmp_path, tag="unnamed", save_latest=False) is True
    assert (tmp_path / "latest").read_text().strip() == "global_step3"
    engine.destroy()

    again, _, _, scheduler = deepspeed.initialize(model=model(), config=copy.deepcopy(settings))
    path, client_state = again.load_checkpoint(str(tmp_path))
    assert path is not None and client_state["epoch"] == 7 and client_state["ds_version"] == deepspeed.__version__
    assert (again.global_steps, scheduler.last_batch_iteration) == (3, 2)
    run(again, batches[3:])
    assert again.get_lr() == rates
    found = again.native.state_dict()
    for name, value in expected.items():
        assert torch.equal(found[name], value)
    again.destroy()


@ranks(2)
def test_a_leaf_module_is_one_unit_and_others_of_its_class_are_not():
    net = nn.Sequential(nn.Linear(4, 4), *(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)))
    deepspeed.utils.set_z3_leaf_modules_by_name(net, ["1"])
    settings = config(3)
    settings["zero_optimization"] = {"stage": 3, "stage3_param_persistence_threshold": 0}
    engine, *_ = deepspeed.initialize(model=net, config=settings)
    assert {unit.name: len(unit.params) for unit in engine.native._sharding.units} == {"(root)": 6, "1": 4}
    engine.destroy()
