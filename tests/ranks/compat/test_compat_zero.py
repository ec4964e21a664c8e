"""DeepSpeed's names around parameters of stage 3: Init, GatheredParameters, attributes, safe_get and safe_set."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import trilithon
from against_plain import STAGES, engine_for, train_engine
from trilithon.compat.deepspeed import utils, zero
from trilithon.compat.deepspeed.runtime.zero import partition_parameters
from trilithon.compat.deepspeed.runtime.zero.parameter_offload import adopt, release
from trilithon.compat.deepspeed.utils import groups
from trilithon.engine.owners import engine_of
from trilithon.errors import ConfigError, ProtocolError, ShardedParameterError
from trilithon.testing import ranks
from trilithon.testing.models import MLP
from trilithon.testing.parity import vector_batches
from trilithon.zero import is_cut

ADAM = {"optimizer": {"kind": "adamw", "lr": 0.01}}


def adopted(model: nn.Module, stage: int, **changes: object) -> trilithon.Engine:
    engine = engine_for(model, stage, **changes)
    adopt(engine)
    return engine


def whole(engine: trilithon.Engine, kind: str, name: str) -> Tensor:
    return dict(engine.view(kind, name))[name]


@ranks(1, 2)
def test_a_model_built_under_init_is_cut_read_and_trained(world_size):
    torch.manual_seed(5)
    plain = MLP()
    torch.manual_seed(5)
    with zero.Init(config_dict_or_path={"train_batch_size": "auto", "zero_optimization": {"stage": 3}}):
        model = MLP()
    weight = model.last.weight
    assert is_cut(weight) == (world_size > 1)
    cut = zero.ZeroParamStatus.NOT_AVAILABLE if world_size > 1 else zero.ZeroParamStatus.AVAILABLE
    assert weight.ds_status is cut and weight.ds_numel == 64 and tuple(weight.ds_shape) == (4, 16)
    assert len({p.ds_id for p in model.parameters()}) == len(list(model.parameters()))
    assert weight.partition_numel() == 64 // world_size
    with zero.GatheredParameters(model.parameters()):
        assert weight.ds_status is zero.ZeroParamStatus.AVAILABLE
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    own = weight.ds_tensor
    assert torch.equal(own, plain.last.weight.detach().view(-1)[dist.get_rank() * own.numel() :][: own.numel()])
    names = {name: tuple(value.shape) for name, value in model.state_dict().items()}  # reads nothing
    assert names == {name: tuple(value.shape) for name, value in plain.state_dict().items()}
    if world_size > 1:
        assert model.state_dict()["last.weight"].is_meta
        with pytest.raises(ShardedParameterError):
            weight.detach()
    with adopted(model, 3) as engine:
        train_engine(engine, vector_batches(2, 2 * world_size))
        assert engine_of(weight)[1] == "last.weight" and hasattr(weight, "ds_id")
        release(engine)
        assert not hasattr(weight, "ds_id") and "ds_external_parameters" not in vars(model)


@ranks(2)
def test_init_refuses_what_it_cannot_do_and_takes_what_it_is_told():
    with zero.Init(enabled=False):
        model = MLP()
    assert not hasattr(model.last.weight, "ds_id")
    with zero.Init(dtype=torch.bfloat16):
        layer = nn.Linear(4, 4)
        assert torch.arange(3.0).dtype is torch.bfloat16
    assert layer.weight.dtype is torch.bfloat16 and torch.zeros(1).dtype is torch.float32
    zero.Init(module=model)
    assert all(is_cut(p) for p in model.parameters())
    with pytest.raises(ConfigError, match="zero_quantized_weights"):
        zero.Init(zero_quantized_weights=True)
    with pytest.raises(TypeError, match="zero_quantised"):
        zero.Init(zero_quantised=False)
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    with pytest.raises(ConfigError, match="a part of the ranks"):
        zero.Init(data_parallel_group=alone)
    with pytest.raises(ConfigError, match="nvme_path"):
        zero.Init(remote_device="nvme")


@ranks(2)
def test_constructors_are_wrapped_by_what_the_module_names_when_init_is_entered(monkeypatch):
    seen = []

    def without_arange(fn, *args, **kwargs):
        seen.append(fn)
        if fn is partition_parameters._orig_torch_arange:
            return fn
        return original(fn, *args, **kwargs)

    original = partition_parameters.zero_wrapper_for_fp_tensor_constructor
    monkeypatch.setattr(partition_parameters, "zero_wrapper_for_fp_tensor_constructor", without_arange)
    with zero.Init(dtype=torch.float16):
        assert torch.arange(3, dtype=torch.float32).dtype is torch.float32
        assert torch.ones(3, dtype=torch.float32).dtype is torch.float16
    assert partition_parameters._orig_torch_arange in seen
    assert callable(partition_parameters.get_accelerator)


@ranks(2)
def test_one_rank_writes_and_all_go_on_from_it():
    for stage in STAGES:
        with adopted(MLP(), stage, precision="bf16") as engine:
            model = engine.module
            train_engine(engine, vector_batches(1, 4))
            with zero.GatheredParameters([model.last.weight, torch.ones(2), model.last.weight], modifier_rank=1):
                if engine.rank == 0:
                    with zero.GatheredParameters(model.last.weight, modifier_rank=0):  # inside: nobody else has to come
                        model.last.weight.data.fill_(7.0)
                else:
                    model.last.weight.data.fill_(0.25)
            assert whole(engine, "param", "last.weight").unique().tolist() == [0.25]
            assert (whole(engine, "master", "last.weight") - 0.25).abs().max() < 2**-10
            with (
                zero.GatheredParameters([], modifier_rank=0),
                zero.GatheredParameters(model.layers[0].weight, enabled=False),
            ):
                assert is_cut(model.layers[0].weight) == (stage == 3)
            assert hasattr(model.last.weight, "ds_id") == (stage == 3)
            release(engine)


@ranks(2)
def test_a_write_without_a_modifier_rank_raises_on_all_ranks():
    with zero.Init():
        model = MLP()
    with pytest.raises(ProtocolError, match="opened for reading"), zero.GatheredParameters(model.parameters()):
        if dist.get_rank() == 0:
            model.last.weight.data.zero_()


@ranks(2)
def test_a_parameter_replaced_inside_the_context_stays_replaced():
    with zero.Init():
        model = MLP()
    new = nn.Linear(16, 4)
    with zero.GatheredParameters([model.last.weight, new.weight], modifier_rank=0):
        new.weight.data.copy_(model.last.weight.data * 2)
        model.last.weight = new.weight
    with adopted(model, 3) as engine:
        assert whole(engine, "param", "last.weight").shape == (4, 16)
        release(engine)


@ranks(2)
def test_all_gather_and_partition_by_hand():
    with adopted(MLP(), 3) as engine:
        weight = engine.module.last.weight
        before = whole(engine, "master", "last.weight")
        weight.all_gather()
        assert not is_cut(weight) and torch.equal(weight, before)
        weight.data.zero_()
        weight.partition()
        assert is_cut(weight) and torch.equal(whole(engine, "master", "last.weight"), before)
        weight.all_gather(param_list=[weight, engine.module.last.bias])
        weight.data.add_(1.0)
        weight.partition(param_list=[weight, engine.module.last.bias], has_been_updated=True)
        assert torch.equal(whole(engine, "master", "last.weight"), before + 1.0)
        assert weight.ds_summary()["status"] == "NOT_AVAILABLE"
        release(engine)


@ranks(1, 2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_whole_tensors_are_read_and_written_at_every_stage(world_size, precision):
    batches = vector_batches(2, 2 * world_size)
    for stage in STAGES:
        with adopted(MLP(), stage, precision=precision, **ADAM) as engine:
            train_engine(engine, batches[:1])
            weight = engine.module.last.weight
            assert utils.safe_get_full_grad(weight) is None
            target = torch.arange(64.0).view(4, 16) / 640 + 1e-5
            others = {name: p for name, p in engine.full_parameters() if name != "last.weight"}
            utils.safe_set_full_fp32_param(weight, target)
            assert torch.equal(utils.safe_get_full_fp32_param(weight), target)
            assert torch.equal(whole(engine, "param", "last.weight"), target.to(weight.dtype))
            assert all(torch.equal(p, others[name]) for name, p in engine.full_parameters() if name in others)
            moment = utils.safe_get_full_optimizer_state(weight, "exp_avg")
            assert moment is not None and moment.abs().max() > 0
            utils.safe_set_full_optimizer_state(weight, moment * 3, "exp_avg")
            assert torch.equal(utils.safe_get_full_optimizer_state(weight, "exp_avg"), moment * 3)
            assert utils.safe_get_full_optimizer_state(weight, "no_such_state") is None
            part = batches[1][0]
            rows = slice(engine.rank * 2, engine.rank * 2 + 2)
            engine.backward(engine(*(tensor[rows] for tensor in part)))
            gradient = utils.safe_get_full_grad(weight)
            assert gradient is not None and gradient.shape == (4, 16)
            utils.safe_set_full_grad(weight, torch.zeros(4, 16))
            utils.safe_update_full_grad_vectorized([engine.module.last.bias], lambda grad, _: grad * 0)
            engine.step()
            after = utils.safe_get_full_optimizer_state(weight, "exp_avg")
            assert torch.allclose(after, moment * 3 * 0.9, rtol=1e-5)
            release(engine)
            engine.close()
            assert utils.safe_get_full_fp32_param(weight) is None


@ranks(2)
def test_local_parts_make_up_the_whole():
    with adopted(MLP(), 3, **ADAM) as engine:
        train_engine(engine, vector_batches(1, 4))
        for name, param in engine.module.named_parameters():
            mine = utils.safe_get_local_fp32_param(param)
            expected = whole(engine, "master", name).view(-1)
            start = engine.own_part("master", name)[1]
            assert torch.equal(mine, expected[start : start + mine.numel()])
            sizes = [torch.zeros((), dtype=torch.int64) for _ in range(2)]
            dist.all_gather(sizes, torch.tensor(mine.numel()))
            assert sum(int(size) for size in sizes) == expected.numel()
            utils.safe_set_local_fp32_param(param, mine * 2)
            assert torch.equal(whole(engine, "master", name).view(-1), expected * 2)
        utils.safe_set_local_optimizer_state(
            param, utils.safe_get_local_optimizer_state(param, "exp_avg") * 0, "exp_avg"
        )
        assert utils.safe_get_full_optimizer_state(param, "exp_avg").abs().max() == 0
        release(engine)
    with adopted(MLP(), 2, **ADAM) as engine:
        with pytest.raises(AssertionError, match="stage 3 only"):
            utils.safe_get_local_fp32_param(engine.module.last.weight)
        release(engine)


@ranks(2)
def test_hooks_are_taken_off_for_generation_and_put_on_again():
    with adopted(MLP(), 3) as engine:
        x, y = torch.randn(2, 16), torch.randn(2, 4)
        offload = zero.DeepSpeedZeRoOffload(engine.module)
        expected = engine.eval_step((x, y))
        with zero.GatheredParameters(engine.module.parameters()):
            for _, param in [*offload.module.named_parameters(), *offload.module.ds_external_parameters()]:
                param.ds_active_sub_modules.clear()
            for hook in [*offload.forward_hooks, *offload.backward_hooks]:
                hook.remove()
            offload.forward_hooks, offload.backward_hooks = [], []
            for _ in range(1 + 2 * engine.rank):  # not as often on every rank
                out = engine.module(x, y)
            if not offload.param_coordinator.is_invalid_trace():
                offload.param_coordinator._invalidate_trace()
            offload._register_deepspeed_module(offload.module)
        assert torch.equal(out, expected)
        train_engine(engine, vector_batches(1, 4))
        release(engine)


@ranks(2)
def test_groups_are_those_of_the_newest_engine():
    with adopted(MLP(), 1) as engine:
        assert groups._get_data_parallel_world_size() == 2 and groups._get_data_parallel_rank() == engine.rank
        assert dist.get_process_group_ranks(groups._get_data_parallel_group()) == [0, 1]
        assert groups._get_sequence_parallel_world_size() == 1 and groups._get_sequence_parallel_rank() == 0
        assert groups._get_model_parallel_world_size() == 1
        with pytest.raises(ProtocolError, match="no expert group"):
            groups._get_expert_parallel_group("ep_size_2")
        release(engine)
