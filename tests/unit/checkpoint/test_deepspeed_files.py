"""Checkpoints that DeepSpeed 0.19.8 wrote are read to the bit, and nothing in such a file is ever run."""

from __future__ import annotations

import argparse
import math
import os
import shutil
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from trilithon.checkpoint import open_checkpoint, verify
from trilithon.checkpoint.deepspeed_pickle import load_file as load_pickle
from trilithon.checkpoint.deepspeed_pickle import plain
from trilithon.checkpoint.deepspeed_pieces import assemble, flat_places, sharded_places
from trilithon.checkpoint.deepspeed_state import rule_of
from trilithon.checkpoint.deepspeed_tensors import Found
from trilithon.errors import CheckpointError

GOLDEN = Path(__file__).parents[2] / "data" / "deepspeed"
CASES = sorted(
    path.name
    for path in GOLDEN.iterdir()
    if (path / "expected.safetensors").exists() and not path.name.startswith(("moe", "pipe"))
)
ZERO = [case for case in CASES if not case.startswith("zero0")]


def expected(case):
    tensors = load_file(GOLDEN / case / "expected.safetensors")
    for key, value in tensors.items():
        part, _, name = key.partition(".")
        if part != "continued":
            yield part, name, value


def test_every_kind_of_checkpoint_is_among_the_golden_ones():
    assert len(CASES) == 12


@pytest.mark.parametrize("case", ZERO)
def test_every_tensor_is_what_the_live_engine_held(case):
    with open_checkpoint(GOLDEN / case) as saved:
        for part, name, value in expected(case):
            read = saved.read(part, name)
            assert read.dtype == value.dtype and torch.equal(read, value), (part, name)


@pytest.mark.parametrize("case", ZERO)
def test_any_range_of_a_tensor_is_that_range(case):
    with open_checkpoint(GOLDEN / case) as saved:
        whole = saved.read("master", "embed.weight").reshape(-1)
        for start, count in [(0, 1), (3, 0), (20, 30), (45, 3), (54, 1), (0, 55)]:
            assert torch.equal(saved.read("master", "embed.weight", start, count), whole[start : start + count])
        with pytest.raises(CheckpointError, match="has 55 elements; 50 to 60 was asked"):
            saved.read("master", "embed.weight", 50, 10)


@pytest.mark.parametrize("case", ZERO)
def test_tied_names_counters_groups_and_client_state(case):
    with open_checkpoint(GOLDEN / case) as saved:
        assert saved.manifest.aliases == {"head.weight": "embed.weight"}
        assert torch.equal(saved.read("master", "head.weight"), saved.read("master", "embed.weight"))
        assert [set(group["names"]) for group in saved.extra["groups"]] == [
            {"embed.weight", "hidden.weight"},
            {"gain", "norm.weight", "norm.bias", "hidden.bias"},
        ]
        assert [group["settings"]["lr"] for group in saved.extra["groups"]] == [0.01, 0.005]
        assert saved.extra["counters"]["steps"] == saved.manifest.step == 3
        assert saved.extra["schedule"] == {"updates": 3, "scheduler": None, "lr": [0.01, 0.005]}
        assert saved.extra["ranks"][0]["update"] == {"rule": "adamw", "updates": 3, "missed": {}}
        assert saved.extra["ranks"][0]["client_state"] == {"note": "golden", "epoch": 2}
        assert saved.extra["scaler"]["kind"] == ("dynamic" if "fp16" in case else "none")


def test_the_loss_scale_and_its_counters_come_along():
    with open_checkpoint(GOLDEN / "zero1_fp16") as saved:
        assert saved.extra["scaler"] == {
            "kind": "dynamic",
            "scale": 256.0,
            "iteration": 3,
            "last_overflow": -1,
            "hysteresis_left": 2,
            "in_a_row_at_min": 0,
            "non_finite": 0,
        }


@pytest.mark.parametrize("case", CASES)
def test_whole_golden_checkpoints_have_no_problem(case):
    assert verify(GOLDEN / case) == []


def test_without_zero_weights_are_read_and_state_by_position_is_not(caplog):
    with open_checkpoint(GOLDEN / "zero0_fp32") as saved:
        assert saved.parts == ["param", "buffer", "master"]
        assert {entry.name for entry in saved.entries("master")} >= {"embed.weight", "frozen.weight"}
        for part, name, value in expected("zero0_fp32"):
            if part in ("master", "frozen"):
                assert torch.equal(saved.read("master", name), value)
    assert "no optimizer state that has names" in caplog.text


# ------------------------------------------------------------------------------------------------------------- layouts
def shapes_of(seed):
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(0, 9, (torch.randint(1, 7, (1,), generator=generator).item(), 2), generator=generator)
    return {f"p{index}": torch.Size(size.tolist()) for index, size in enumerate(sizes)}


@pytest.mark.parametrize("seed", range(40))
def test_flat_partitions_are_put_together_again(seed):
    """Against the layout written down: concatenate (with gaps), pad, cut evenly, strip what the file strips."""
    shapes, ranks = shapes_of(seed), 1 + seed % 5
    gaps = [(seed * 3 + index) % 4 for index in range(len(shapes))]
    values = {name: torch.arange(math.prod(shape)).float() + 100 * i for i, (name, shape) in enumerate(shapes.items())}
    flat = torch.cat([part for value, gap in zip(values.values(), gaps) for part in (value, torch.full((gap,), -1.0))])
    padded = torch.cat([flat, torch.full((-len(flat) % (2 * ranks),), -1.0)])
    parts = list(padded.split(max(len(padded) // ranks, 1))) if len(padded) else [padded] * ranks
    if seed % 2:  # padding stripped from the end of the last rank's part
        parts[-1] = parts[-1][: max(0, len(flat) - sum(len(part) for part in parts[:-1]))]
    places = flat_places(shapes, [len(part) for part in parts], gaps)
    found = assemble(shapes, list(zip(places, parts)), "value")
    for name, value in values.items():
        out = torch.empty(value.numel())
        found[name].copy(0, out)
        assert torch.equal(out, value)


@pytest.mark.parametrize("seed", range(40))
def test_sharded_parameters_are_put_together_again(seed):
    """Against the layout written down: ceil(n / ranks) elements a rank, padded, sub-group after sub-group."""
    shapes, ranks = shapes_of(seed), 1 + seed % 5
    values = {name: torch.arange(math.prod(shape)).float() + 100 * i for i, (name, shape) in enumerate(shapes.items())}
    cut = len(shapes) // 2
    parts = []
    for rank in range(ranks):
        shares = []
        for value in values.values():
            share = -(-value.numel() // ranks)
            padded = torch.cat([value, torch.full((share * ranks - value.numel(),), -1.0)])
            shares.append(padded[rank * share : (rank + 1) * share])
        groups = [torch.cat(group) for group in (shares[:cut], shares[cut:]) if group]
        places = sharded_places([shapes], [len(group) for group in groups], rank, ranks)
        parts += list(zip(places, groups))
    found = assemble(shapes, parts, "value")
    for name, value in values.items():
        out = torch.empty(value.numel())
        found[name].copy(0, out)
        assert torch.equal(out, value)


# ---------------------------------------------------------------------------------------------------------- what is off
@pytest.fixture
def copied(tmp_path):
    def copy(case):
        shutil.copytree(GOLDEN / case, tmp_path / case)
        return tmp_path / case

    return copy


def rewrite(content, path):
    """A new file in place of the one that the tensors of `content` are still mapped from."""
    torch.save(content, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


class Hostile:
    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.mark.parametrize("where", ["model", "optimizer", "deepspeed's own module"])
def test_a_hostile_pickle_does_not_run(copied, where, tmp_path, monkeypatch):
    folder, sign = copied("zero1_fp32"), tmp_path / "it ran"
    pattern = "mp_rank*" if where == "model" else "*_optim_states.pt"
    path = next((folder / "global_step3").glob(pattern))
    content = plain(load_pickle(path))
    content["extra"] = Hostile(f"touch '{sign}'")
    if where == "deepspeed's own module":  # a function whose last name is on the list, in another package
        monkeypatch.setattr(os, "LossScaler", os.system, raising=False)
        content["extra"] = Renamed("os", "LossScaler", f"touch '{sign}'")
    rewrite(content, path)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert str(path) in str(caught.value)
    assert ("os.LossScaler" if "own" in where else "posix.system") in str(caught.value)
    assert [problem for problem in verify(folder) if "not plain data" in problem.text]
    assert not sign.exists()


class Renamed:
    """Pickles as a call of `module.name`."""

    def __init__(self, module, name, argument):
        self._function, self._argument = _named(module, name), argument

    def __reduce__(self):
        return self._function, (self._argument,)


def _named(module, name):
    def function(*arguments):
        raise AssertionError

    function.__module__, function.__qualname__, function.__name__ = module, name, name
    import importlib

    setattr(importlib.import_module(module), name, function)
    return function


def test_parsed_arguments_in_the_client_state_come_back(copied):
    folder = copied("zero2_bf16")
    path = folder / "global_step3" / "mp_rank_00_model_states.pt"
    rewrite({**plain(load_pickle(path)), "args": argparse.Namespace(seed=3, names=["a"])}, path)
    with open_checkpoint(folder) as saved:
        assert saved.extra["ranks"][0]["client_state"]["args"] == argparse.Namespace(seed=3, names=["a"])


def test_an_object_of_the_users_in_the_client_state_is_named(copied):
    folder = copied("zero2_bf16")
    path = folder / "global_step3" / "mp_rank_00_model_states.pt"
    rewrite({**plain(load_pickle(path)), "run": Path("x")}, path)
    with pytest.raises(CheckpointError, match=r"mp_rank_00_model_states.pt asks for pathlib.*Path.*client_state"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "case, gone, text",
    [
        ("zero1_fp32", "zero_pp_rank_0_mp_rank_00_optim_states.pt", "up to rank 1, but none of rank 0"),
        ("zero1_fp32", "zero_pp_rank_1_mp_rank_00_optim_states.pt", "2 data-parallel ranks, and 1 of their"),
        ("zero3_fp32", "zero_pp_rank_*_optim_states.pt", "is of stage 3, where the weights are in the optim_states"),
        ("zero3_fp32_three_ranks", "zero_pp_rank_2_*_optim_states.pt", "3 data-parallel ranks, and 2 of their"),
        ("universal_from_zero1_fp16", "zero/gain/fp32.pt", "holds no 'gain'"),
    ],
)
def test_a_partial_copy_is_refused_with_what_is_missing(copied, case, gone, text):
    folder = copied(case)
    for path in next(folder.glob("global_step3*")).glob(gone):
        path.unlink()
    with pytest.raises(CheckpointError, match=text):
        open_checkpoint(folder)
    assert len(verify(folder)) == 1


def test_weights_alone_can_be_read_where_the_model_file_has_them(copied):
    folder = copied("zero2_bf16")
    for path in (folder / "global_step3").glob("*optim*"):
        path.unlink()
    with open_checkpoint(folder) as saved, open_checkpoint(GOLDEN / "zero2_bf16") as whole:
        assert torch.equal(saved.read("master", "hidden.bias"), whole.read("param", "hidden.bias"))


def test_one_flipped_byte_of_any_record_is_named(copied):
    folder = copied("zero3_bf16")
    path = folder / "global_step3" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    intact = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        records = [record for record in archive.infolist() if record.file_size]
    assert len(records) > 10
    for record in records:
        names = struct.unpack("<HH", intact[record.header_offset + 26 : record.header_offset + 30])
        begin = record.header_offset + 30 + sum(names)  # after the local header, its name and its extra field
        for position in (begin, begin + record.file_size - 1):
            path.write_bytes(intact[:position] + bytes([intact[position] ^ 0x10]) + intact[position + 1 :])
            (problem,) = verify(folder)
            assert problem.file == path.name and record.filename in problem.text


@pytest.mark.parametrize("share", [0, 0.5, 0.99])
def test_a_file_that_was_cut_is_named(copied, share):
    folder = copied("zero3_bf16")
    path = folder / "global_step3" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    raw = path.read_bytes()
    path.write_bytes(raw[: int(share * len(raw))])
    assert [problem.file for problem in verify(folder)] == [path.name]
    with pytest.raises(CheckpointError, match=path.name):
        open_checkpoint(folder)


def test_values_in_the_wrong_order_are_noticed(copied):
    folder = copied("zero2_bf16")
    path = folder / "global_step3" / "mp_rank_00_model_states.pt"
    content = plain(load_pickle(path))
    vectors = content["param_shapes"][1]
    content["param_shapes"][1] = {name: vectors[name] for name in ("gain", "norm.bias", "norm.weight", "hidden.bias")}
    rewrite(content, path)
    (problem,) = verify(folder)
    assert problem.tensors == ("master/norm.bias", "master/norm.weight")


@pytest.mark.parametrize(
    "name, text",
    [
        ("layer_00-model_01-model_states.pt", "of a pipeline with tensor-parallel ranks.*ds_to_universal"),
        ("expert_1_mp_rank_00_model_states.pt", "with experts in the old form.*save it again"),
        ("mp_rank_01_model_states.pt", "of several model-parallel ranks.*ds_to_universal"),
        ("offloaded_tensors", "with optimizer state in swap files.*with the state on the host"),
    ],
)
def test_what_is_not_read_is_refused_by_name(copied, name, text):
    folder = copied("zero1_fp32")
    torch.save({}, folder / "global_step3" / name)
    with pytest.raises(CheckpointError, match=text):
        open_checkpoint(folder)


def test_which_tag_is_opened(copied):
    folder = copied("zero1_fp32")
    shutil.copytree(folder / "global_step3", folder / "other")
    (folder / "latest").write_text("other")
    assert open_checkpoint(folder).manifest.tag == "other"
    assert open_checkpoint(folder, "global_step3").manifest.tag == "global_step3"
    assert open_checkpoint(folder / "global_step3").manifest.tag == "global_step3"
    with pytest.raises(CheckpointError, match="holds no checkpoint 'global_step9'"):
        open_checkpoint(folder, "global_step9")


# ---------------------------------------------------------- by hand, from the layout that other releases are known for
def edit_optimizer_files(folder, change):
    for path in (folder / "global_step3").glob("*_optim_states.pt"):
        content = plain(load_pickle(path))
        change(content["optimizer_state_dict"])
        rewrite(content, path)


def test_an_optimizer_that_counts_in_its_groups(copied):
    """The fused Adam of older releases has no step in its state."""
    folder = copied("zero3_bf16")

    def change(state):
        inner = state["optimizer_state_dict"]
        for own in inner["state"].values():
            own.pop("step")
        inner["param_groups"][0]["step"] = 7

    edit_optimizer_files(folder, change)
    with open_checkpoint(folder) as saved:
        assert saved.extra["ranks"][0]["update"]["updates"] == 7
        assert "step" not in saved.extra["groups"][0]["settings"]


def test_state_in_a_list_as_elastic_checkpoints_had_it(copied):
    folder = copied("zero1_fp32")

    def change(state):
        inner = state["base_optimizer_state"]["state"]
        for own in inner.values():
            own.pop("step")
        state["base_optimizer_state"] = [inner[0], inner[1]]
        state["base_optimizer_state_step"] = 5

    edit_optimizer_files(folder, change)
    with open_checkpoint(folder) as saved, open_checkpoint(GOLDEN / "zero1_fp32") as intact:
        assert torch.equal(saved.read("exp_avg", "gain"), intact.read("exp_avg", "gain"))
        assert saved.extra["ranks"][0]["update"]["updates"] == 5


def test_a_universal_layout_of_two_tensor_parallel_ranks_is_read_whole(copied):
    """Model files hold halves; the atoms are whole, and so is what is read, frozen parameters included."""
    folder = copied("universal_from_zero1_fp16")
    path = folder / "global_step3_universal" / "mp_rank_00_model_states.pt"
    content = plain(load_pickle(path))
    for rank in (0, 1):
        half = {
            **content,
            "module": dict(content["module"]),
            "param_shapes": [dict(g) for g in content["param_shapes"]],
        }
        for name in ("hidden.bias", "frozen.weight"):
            half["module"][name] = content["module"][name].chunk(2)[rank].clone()
        half["param_shapes"][1]["hidden.bias"] = torch.Size(half["module"]["hidden.bias"].shape)
        rewrite(half, path.with_name(f"mp_rank_{rank:02d}_model_states.pt"))
    with open_checkpoint(folder) as saved, open_checkpoint(GOLDEN / "universal_from_zero1_fp16") as intact:
        for part, name in [("master", "hidden.bias"), ("exp_avg", "hidden.bias"), ("master", "embed.weight")]:
            assert torch.equal(saved.read(part, name), intact.read(part, name))
        assert torch.equal(saved.read("frozen", "frozen.weight"), intact.read("frozen", "frozen.weight").float())
        assert {entry.name for entry in saved.entries("buffer")} == {"seen", "mean"}
        assert saved.find("frozen", "seen") is None and not saved.find("frozen", "head.weight")


@pytest.mark.parametrize(
    ("section", "group", "rule"),
    [
        ({"type": "Adam", "params": {"lr": 1.0}}, {}, "adamw"),
        ({"type": "Adam", "params": {"adam_w_mode": False}}, {}, "adam"),
        ({"type": "AdamW", "params": {"adam_w_mode": False}}, {}, "adamw"),
        ({"type": "Lamb"}, {}, "lamb"),
        (None, {"decoupled_weight_decay": False}, "adam"),
        (None, {"decoupled_weight_decay": True}, "adamw"),
        (None, {"weight_decay": 0.1}, "adamw"),
    ],
)
def test_the_rule_is_what_the_configuration_or_the_groups_say(section, group, rule):
    fields = {(part, "w"): None for part in ("master", "exp_avg", "exp_avg_sq")}
    found = Found(tensors=fields, config={"optimizer": section}, optimizer={"param_groups": [group]})
    assert rule_of(found) == rule
