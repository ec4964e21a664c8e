"""What DeepSpeed wrote with experts and of pipelines is read: every value bit for bit, under our names."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from trilithon.checkpoint import convert, differences, export, open_checkpoint, verify
from trilithon.checkpoint.deepspeed_experts import is_expert, native_name, pools
from trilithon.checkpoint.deepspeed_pickle import load_file as load_pickle
from trilithon.checkpoint.deepspeed_pickle import plain
from trilithon.checkpoint.deepspeed_pipeline import renamed, tied_places
from trilithon.errors import CheckpointError

GOLDEN = Path(__file__).parents[2] / "data" / "deepspeed"
MOE = ["moe_zero1_fp32", "moe_zero2_bf16", "moe_zero2_fp32_four_ranks"]
PIPE = ["pipe_zero1_fp32", "pipe_zero1_bf16_four_ranks"]
WEIGHTS_ALONE = ["moe_zero0_fp32", "pipe_zero0_fp32"]


def expected(case):
    """(part, our name, expert or None, value) of every tensor that the live engine held when it saved."""
    for key, value in load_file(GOLDEN / case / "expected.safetensors").items():
        part, _, name = key.partition(".")
        if part != "continued":
            expert = re.search(r"deepspeed_experts\.(\d+)\.", name)
            yield part, native_name(renamed(name, {"embed": 0})), int(expert[1]) if expert else None, value


@pytest.mark.parametrize("case", MOE + PIPE + WEIGHTS_ALONE)
def test_every_tensor_is_what_the_live_engine_held(case):
    seen = 0
    with open_checkpoint(GOLDEN / case) as saved:
        for part, name, expert, value in expected(case):
            if case in WEIGHTS_ALONE and part != "master":
                continue
            whole = saved.read(part, name).reshape(saved.entry(part, name).shape)
            assert torch.equal(whole if expert is None else whole[expert], value), (part, name, expert)
            seen += 1
        low = torch.bfloat16 if "bf16" in case else torch.float32
        assert {entry.torch_dtype for entry in saved.entries("param")} <= {low}
        assert not any("deepspeed" in entry.name for entry in saved.entries())
    assert seen >= 11


@pytest.mark.parametrize("case", MOE + PIPE + WEIGHTS_ALONE)
def test_whole_golden_checkpoints_have_no_problem(case):
    assert verify(GOLDEN / case) == []


def test_experts_are_stacked_by_their_number_among_all():
    with open_checkpoint(GOLDEN / "moe_zero2_fp32_four_ranks") as saved:
        assert saved.entry("exp_avg", "moes.1.experts.up.weight").shape == (4, 6, 4)
        assert saved.entry("master", "moes.0.gate.weight").shape == (4, 4)
        names = [name for group in saved.extra["groups"] for name in group["names"]]
        assert len(names) == len(set(names)) == 15 and "moes.0.experts.down.bias" in names
        assert [group["settings"]["weight_decay"] for group in saved.extra["groups"]] == [0.1, 0.1, 0.1]
        assert saved.extra["ranks"][0]["client_state"] == {"note": "golden"}
        assert saved.manifest.world_size == len(saved.extra["ranks"]) == 4
        row = saved.read("master", "moes.0.experts.up.weight", start=2 * 24 + 4, numel=4)
        assert torch.equal(row, saved.read("master", "moes.0.experts.up.weight").view(4, 6, 4)[2, 1])


def test_layers_are_named_by_their_place_and_tied_ones_by_their_first():
    with open_checkpoint(GOLDEN / "pipe_zero1_fp32") as saved:
        names = [entry.name for entry in saved.entries("master")]
        assert names[0] == "0.weight" and "3.weight" not in names and "2.linear.bias" in names
        assert [entry.name for entry in saved.entries("buffer")] == ["1.offset", "2.offset"]
        assert saved.extra["groups"][0]["names"].count("0.weight") == 1
        assert saved.manifest.world_size == 2 and saved.extra["ranks"][0]["update"]["updates"] == 3
        assert saved.extra["counters"]["micro_steps"] == 6


@pytest.mark.parametrize("case", ["moe_zero2_bf16", "pipe_zero1_bf16_four_ranks"])
def test_they_are_converted_and_exported_like_others(case, tmp_path):
    convert(GOLDEN / case, tmp_path / "ours")
    assert list(differences(GOLDEN / case, tmp_path / "ours", tolerance=0)) == []
    assert export(GOLDEN / case, tmp_path / "plain").tensors >= 10


# ---------------------------------------------------------------------------------------------------------- what is off
@pytest.fixture
def copied(tmp_path):
    def copy(case):
        return Path(shutil.copytree(GOLDEN / case, tmp_path / case))

    return copy


@pytest.mark.parametrize(
    ("case", "gone", "text"),
    [
        ("moe_zero0_fp32", "layer_0_expert_2_*", "expert 2 is missing, of experts up to 3"),
        ("moe_zero2_fp32_four_ranks", "zero_pp_rank_3_*", "4 data-parallel ranks, and 3 of their"),
        ("pipe_zero1_fp32", "layer_00-*", r"no file layer_\*-model_states.pt holds the tied layer 'embed' \(weight\)"),
        ("pipe_zero1_bf16_four_ranks", "*zero_pp_rank_1_mp_rank_01*", "2 data-parallel ranks, and 1 of their"),
    ],
)
def test_a_partial_copy_is_refused_with_what_is_missing(copied, case, gone, text):
    folder = copied(case)
    for path in (folder / "global_step3").glob(gone):
        path.unlink()
    with pytest.raises(CheckpointError, match=text):
        open_checkpoint(folder)
    assert len(verify(folder)) == 1


def test_a_pipeline_with_experts_is_refused_by_name(copied):
    folder = copied("pipe_zero0_fp32")
    torch.save({}, folder / "global_step3" / "layer_0_expert_0_mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match="of a pipeline with experts, which is not read"):
        open_checkpoint(folder)


def test_ranks_that_do_not_name_the_same_groups_are_refused(copied):
    folder = copied("moe_zero1_fp32")
    path = folder / "global_step3" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    content = plain(load_pickle(path))
    content["optimizer_state_dict"]["base_optimizer_state"]["param_groups"][1]["name"] = "another"
    torch.save(content, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)
    with pytest.raises(CheckpointError, match=r"the group 'ep_size_2' with experts is not on all ranks"):
        open_checkpoint(folder)


# ------------------------------------------------------------------------------------------------------------ by hand
def groups_of(*names, counts):
    groups = [{"name": name} for name in names]
    flat = [None] * len(names)
    base = {"base_optimizer_state": {"param_groups": groups}, "single_partition_of_fp32_groups": flat}
    return {**base, "partition_count": counts}


@pytest.mark.parametrize(("data_first", "first"), [(False, [(0, 1), (2, 0)]), (True, [(0, 1), (1, 1)])])
def test_who_shares_a_group_of_experts(data_first, first):
    """Four ranks, degree 2, and groups that ranks 2 and 3 list the other way round."""
    states = [groups_of("dense", "ep_size_2", counts=[4, 2])] * 2 + [groups_of("ep_size_2", "dense", counts=[2, 4])] * 2
    shapes = {f"a.deepspeed_moe.experts.deepspeed_experts.{e}.w": torch.Size([3]) for e in (0, 1)}
    found = list(pools(shapes, 1, states, data_first=data_first))
    assert found[0][0] == first
    assert [list(named) for _, named in found] == [
        [f"a.deepspeed_moe.experts.deepspeed_experts.{e}.w" for e in pair] for pair in ((0, 1), (2, 3))
    ]
    ((everyone, _),) = pools({"body.weight": torch.Size([3])}, 0, states[:2], data_first=data_first)
    assert everyone == [(0, 0), (1, 0)]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("blocks.3.moe.deepspeed_moe.experts.deepspeed_experts.12.up.weight", "blocks.3.moe.experts.up.weight"),
        ("deepspeed_moe.experts.deepspeed_experts.0.w", "experts.w"),
        ("blocks.3.moe.deepspeed_moe.gate.wg.weight", "blocks.3.moe.gate.weight"),
        ("blocks.3.moe.coefficient.weight", "blocks.3.moe.coefficient.weight"),
        ("embed.weight", "embed.weight"),
    ],
)
def test_names_of_layers_with_experts(theirs, ours):
    assert native_name(theirs) == ours
    assert is_expert(theirs) == ("experts" in theirs)


def test_two_tied_layers_are_told_apart_by_their_shapes():
    layers = {0: {"weight": torch.zeros(5, 2)}, 1: {"weight": torch.zeros(2, 2)}, 2: {"weight": torch.zeros(7, 2)}}
    shapes = {"tied_modules.a.weight": torch.Size([7, 2]), "tied_modules.b.weight": torch.Size([5, 2])}
    assert tied_places(layers, {**shapes, "1.weight": torch.Size([2, 2])}) == {"a": 2, "b": 0}
