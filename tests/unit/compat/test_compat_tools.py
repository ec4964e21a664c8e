"""What scripts take from DeepSpeed besides the engine: estimates, gates, groups of parameters, checkpoint tools."""

from __future__ import annotations

import json
import re
from collections import OrderedDict, namedtuple
from importlib.metadata import version

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import trilithon
from trilithon.compat.deepspeed import env_report, moe, utils, zero
from trilithon.compat.deepspeed.checkpoint import clone_tensors_for_torch_save, ds_to_universal
from trilithon.compat.deepspeed.moe.layer import MoE
from trilithon.compat.deepspeed.moe.sharded_moe import top1gating, top2gating, topkgating
from trilithon.compat.deepspeed.refused import RefusedError
from trilithon.compat.deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from trilithon.compat.deepspeed.runtime.zero import stage3, stage_1_and_2
from trilithon.compat.deepspeed.utils import zero_to_fp32
from trilithon.compat.deepspeed.utils.torch import required_torch_version
from trilithon.errors import CheckpointError, ConfigError
from trilithon.testing.models import MLP

# Rows as DeepSpeed 0.19.8 returned them: (nodes, devices, optimizer, parameters off the device, zero.Init) -> bytes of
# CPU and device, for 1000 parameters, 77 in the largest layer, and a buffer factor of 2.
ESTIMATES = {
    (3, 5, False, False, True): (3080, 1508),
    (3, 5, False, False, False): (40000, 1508),
    (3, 5, True, False, True): (10666, 441),
    (1, 6, True, False, False): (48000, 641),
    (4, 1, True, True, False): (9000, 308),
    (2, 8, True, True, True): (18000, 308),
}


@pytest.mark.parametrize("given", ESTIMATES)
def test_memory_estimates_are_deepspeeds(given):
    nodes, devices, optimizer, params, init = given
    cpu, device, layer = stage3.estimate_zero3_model_states_mem_needs(
        1000, 77, devices, nodes, cpu_offload=optimizer, cpu_offload_params=params, zero_init=init,
        additional_buffer_factor=2.0,
    )  # fmt: skip
    assert (cpu, device, layer) == (*ESTIMATES[given], 308)


def test_memory_estimates_of_stage_2_and_tables(capsys):
    needs = stage_1_and_2.estimate_zero2_model_states_mem_needs
    assert needs(1000, 5, 3, True, 2.0) == (120000, 2000) and needs(1000, 5, 3, False, 2.0) == (40000, 3200)
    assert needs(1000, 1, 4, True, 2.0) == (32000, 2000)
    model = nn.Sequential(nn.Linear(1000, 2000), nn.Linear(2000, 500))
    stage3.estimate_zero3_model_states_mem_needs_all_live(model, num_gpus_per_node=2, num_nodes=2)
    stage_1_and_2.estimate_zero2_model_states_mem_needs_all_live(model)
    told = capsys.readouterr().out
    assert "3M total params, 2M largest layer params" in told and told.count("offload_optimizer=cpu") == 5
    assert "0.04GB |   0.01GB | offload_param=cpu, offload_optimizer=cpu, zero_init=1" in told


def test_gates_give_dense_tables():
    torch.manual_seed(0)
    logits = torch.randn(12, 4)
    probs = logits.softmax(1)
    first = probs.argmax(1)
    share = torch.bincount(first, minlength=4) / 12
    loss, weights, mask, counts = top1gating(logits, 1.0, 2, use_rts=False)
    assert weights.shape == (12, 4, 3) and mask.sum() == 11 and counts.tolist() == (share * 12).int().tolist()
    assert torch.allclose(loss, 4 * (probs.mean(0) * share).sum())
    assert torch.equal(mask, weights != 0) and torch.allclose(weights.sum((1, 2))[:3], probs.max(1).values[:3])
    assert mask.sum(0).max() == 1  # a slot has one token
    loss2, weights, _, _ = top2gating(logits, 1.0, 2, top2_2nd_expert_sampling=False)
    assert torch.allclose(loss2, loss) and weights.shape == (12, 4, 6)
    loss3, weights, _, counts = topkgating(logits, 3, 1.0, 2, drop_tokens=False)
    assert (
        counts.sum() == 36 and weights.shape[2] == counts.max() and torch.allclose(weights.sum((1, 2)), torch.ones(12))
    )
    chosen = torch.bincount(probs.topk(3).indices.reshape(-1), minlength=4) / 12
    assert torch.allclose(loss3, 4 * (probs.mean(0) * chosen / 3).sum())
    _, _, mask, counts = top1gating(logits, 1.0, 2, torch.tensor([1] * 6 + [0] * 6), use_rts=False)
    assert counts.sum() == 6 and not mask[6:].any()
    with pytest.raises(ConfigError, match="ep_group"):
        top1gating(logits, 1.0, 2, ep_group=object())


def test_expert_parameters_are_marked_and_grouped():
    model = nn.Sequential(nn.Linear(8, 8), MoE(8, nn.Linear(8, 8), num_experts=4, k=1))
    assert moe.utils.has_moe_layers(model) == (True, 4) and moe.utils.has_moe_layers(nn.Linear(2, 2)) == (False, 0)
    shared, expert = moe.utils.split_params_into_shared_and_expert_params(model.parameters())
    assert {id(p) for p in expert} == {id(p) for p in model[1].experts.parameters()} and len(shared) == 3
    assert all(p.group_name == "ep_size_1" and moe.utils.is_moe_param(p) for p in expert)
    groups = moe.utils.split_params_into_different_moe_groups_for_optimizer(
        {"params": list(model.parameters()), "name": "all", "lr": 0.5}
    )
    assert [(g["name"], g.get("moe"), g["lr"], len(g["params"])) for g in groups] == [
        *(("all", None, 0.5, 3), ("ep_size_1", True, 0.5, 2)),
    ]
    small = moe.utils.split_params_into_different_moe_groups_for_optimizer(
        {"params": expert, "name": "x"}, max_group_size=4
    )
    assert [len(group["params"]) for group in small] == [0, 1, 1]
    assert moe.utils.is_moe_param_group(moe.utils.configure_moe_param_groups(model.parameters())[1])
    with pytest.raises(ConfigError, match="name"):
        moe.utils.split_params_into_different_moe_groups_for_optimizer({"params": expert})
    output, loss, counts = model(torch.randn(6, 8))
    assert output.shape == (6, 8) and loss.ndim == 0 and counts.sum() == 6
    assert model[1].deepspeed_moe.gate.weight.shape == (4, 8)


def test_tiled_linear_computes_what_the_plain_layer_does():
    plain = nn.Linear(10, 6)
    tiled = zero.TiledLinear(10, 6, in_splits=3, out_splits=2, init_linear=plain)
    x = torch.randn(4, 10)
    assert torch.allclose(tiled(x), plain(x), atol=1e-6)
    parts = zero.TiledLinear(10, 6, in_splits=2, out_splits=2, input_is_already_split=True, combine_out_splits=False)
    parts.copy_params_from(plain)
    out = parts(list(x.split(5, dim=-1)))
    assert [piece.shape[-1] for piece in out] == [3, 3] and torch.allclose(torch.cat(out, -1), plain(x), atol=1e-6)
    with pytest.raises(ConfigError, match="plain linear layers only"):
        zero.TiledLinear(4, 4, linear_cls=MLP)
    with pytest.raises(RefusedError, match="TiledLinearReturnBias"):
        zero.TiledLinearReturnBias(4, 4)


def test_leaf_modules_are_marked_by_class_name_and_place():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    assert utils.set_z3_leaf_modules(model, [nn.ReLU]) == [model[1][1]] and utils.z3_leaf_module(model[1][1])
    assert utils.unset_z3_leaf_modules(model, ["ReLU"]) == [model[1][1]] and not utils.get_z3_leaf_modules(model)
    assert utils.set_z3_leaf_modules_by_name(model, ["1.0", "none"]) == ([model[1][0]], ["none"])
    assert utils.z3_leaf_parameter(model[1][0].weight) and not utils.z3_leaf_parameter(model[0].weight)
    assert utils.get_z3_leaf_modules(model) == [model[1][0]]
    assert utils.set_z3_leaf_modules_by_suffix(model, ["1"])[0] == [model[1], model[1][1]]
    with pytest.raises(ValueError, match="Conv2d"):
        utils.set_z3_leaf_modules(model, [nn.Conv2d])
    with pytest.raises(ValueError, match="Linear"):  # the classes that there are
        utils.set_z3_leaf_modules_by_name(model, ["nowhere"])


def test_external_parameters_are_listed():
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    zero.register_external_parameter(one, other.weight)
    assert list(zero.partition_parameters.external_parameters(one).values()) == [other.weight]
    zero.unregister_external_parameter(one, other.weight)
    assert not zero.partition_parameters.external_parameters(one)
    with pytest.raises(RuntimeError, match="Tensor"):
        zero.register_external_parameter(one, torch.ones(2))
    with pytest.raises(RuntimeError, match="not a parameter"):
        zero.unregister_external_parameter(one, other.weight)


def test_new_parameters_are_made_on_the_ranks_own_gpu(monkeypatch):
    where = zero.partition_parameters.device_of_new_parameters
    assert where(None) is None or torch.cuda.is_available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert where(None) == torch.device("cuda", 1) and where("cpu") is None and where("nvme") is None


def test_tensors_are_made_with_a_type_on_a_device():
    with utils.OnDevice(torch.float16, device="meta"):
        layer = nn.Linear(2, 2)
    assert layer.weight.is_meta and layer.weight.dtype is torch.float16
    with utils.OnDevice(torch.float16, enabled=False):
        assert torch.zeros(1).dtype is torch.float32
    assert torch.get_default_dtype() is torch.float32


def test_structures_are_cloned_for_saving():
    pair = namedtuple("pair", "a b")
    whole = torch.arange(8.0)
    item = {"x": [whole[:2], 3], "y": OrderedDict(z=(whole[4:], "s")), "p": pair(whole[:1], 1)}
    made = clone_tensors_for_torch_save(item)
    assert type(made["y"]) is OrderedDict and made["p"].b == 1 and made["x"][1] == 3
    assert torch.equal(made["y"]["z"][0], whole[4:]) and made["x"][0].untyped_storage().nbytes() == 8


@pytest.fixture
def run(tmp_path):
    model = MLP()
    model.layers[0].bias.requires_grad_(False)
    with trilithon.initialize(model, {"optimizer": {"kind": "adamw", "lr": 0.1}, "precision": "bf16"}) as engine:
        engine.save(tmp_path / "run", tag="global_step3")
        return tmp_path / "run", dict(engine.full_parameters())


def test_plain_weights_come_out_of_a_checkpoint(run, tmp_path):
    folder, expected = run
    found = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(folder))
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], value) and value.dtype is torch.float32 for name, value in expected.items())
    without = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(folder), exclude_frozen_parameters=True)
    assert set(expected) - set(without) == {"layers.0.bias"}
    zero_to_fp32.main([str(folder), str(tmp_path / "bin"), "--max_shard_size", "1KB"])
    index = json.loads((tmp_path / "bin" / "pytorch_model.bin.index.json").read_text())
    files = {name: torch.load(tmp_path / "bin" / name) for name in set(index["weight_map"].values())}
    assert len(files) > 1
    assert all(torch.equal(files[index["weight_map"][name]][name], value) for name, value in expected.items())
    zero_to_fp32.main([str(folder), str(tmp_path / "safe"), "--safe_serialization", "--exclude_frozen_parameters"])
    assert set(load_file(tmp_path / "safe" / "model.safetensors")) == set(without)
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(str(folder), str(tmp_path / "one"), max_shard_size=None)
    assert set(torch.load(tmp_path / "one" / "pytorch_model.bin")) == set(expected)
    fresh = zero_to_fp32.load_state_dict_from_zero_checkpoint(MLP(), str(folder), "global_step3")
    assert all(torch.equal(value, expected[name]) for name, value in fresh.named_parameters())
    with pytest.raises(FileNotFoundError, match="DeepSpeed did not write it"):
        zero_to_fp32.get_optim_files(str(folder / "global_step3"))
    with pytest.raises(CheckpointError, match="no size"):
        zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(str(folder), str(tmp_path / "x"), max_shard_size="much")


def test_files_of_deepspeed_are_found_in_order(tmp_path):
    for rank in (10, 2, 0):
        (tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
    (tmp_path / "mp_rank_00_model_states.pt").touch()
    found = zero_to_fp32.get_optim_files(str(tmp_path))
    assert [path.split("rank_")[1].split("_")[0] for path in found] == ["0", "2", "10"]
    assert zero_to_fp32.get_model_state_file(str(tmp_path), 2).endswith("mp_rank_00_model_states.pt")
    with pytest.raises(FileNotFoundError):
        zero_to_fp32.get_model_state_file(str(tmp_path), 3)


def test_a_checkpoint_is_written_anew_as_a_universal_one(run):
    folder, expected = run
    flags = ["--input_folder", str(folder / "global_step3"), "--output_folder", str(folder / "global_step3_universal")]
    ds_to_universal.main(ds_to_universal.parse_arguments(flags))
    assert (folder / "latest_universal").read_text() == "global_step3_universal"
    with trilithon.checkpoint.open_checkpoint(folder, "global_step3_universal") as reader:
        assert torch.equal(reader.read("master", "last.weight"), expected["last.weight"])
    flags[1] = str(folder / "nothing")
    with pytest.raises(CheckpointError, match="does not exist"):
        ds_to_universal.main(ds_to_universal.parse_arguments(flags))


def test_small_things():
    assert required_torch_version(min_version=2.1) and not required_torch_version(max_version=1.13)
    with pytest.raises(RefusedError, match=r"mesh\.sequence"):
        UlyssesSPAttentionHF.register_with_transformers(model_name_or_path="x")
    assert not isinstance(object(), UlyssesSPAttentionHF)

    @utils.instrument_w_nvtx
    def twice(x: int) -> int:
        return 2 * x

    assert twice(4) == 8
    with pytest.raises(ValueError, match="LOUD"):
        utils.set_log_level_from_string("loud")
    utils.set_log_level_from_string("warning")
    assert utils.logger.level == 30


def test_the_report_tells_versions_and_leaves_out_what_is_hidden(capsys):
    env_report.main(["--hide_operator_status", "--hide_errors_and_warnings"])
    told = capsys.readouterr().out
    assert re.search(rf"^torch \.+ {re.escape(version('torch'))}$", told, re.MULTILINE)
    assert re.search(r"^trilithon \.+ \d", told, re.MULTILINE) and re.search(r"^cuda of torch \.+ ", told, re.MULTILINE)
    assert "operators" not in told and "training is" not in told
    env_report.main(["--hide_errors_and_warnings"])
    assert capsys.readouterr().out.startswith("operators: none is compiled ahead")
