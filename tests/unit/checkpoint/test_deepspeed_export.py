"""Checkpoints in DeepSpeed's layout: file by file what DeepSpeed itself wrote, and read back the same values."""

from __future__ import annotations

import io
import pickletools
import re
import zipfile
from pathlib import Path

import pytest
import torch

import trilithon
from trilithon.checkpoint import differences, export_deepspeed, open_checkpoint
from trilithon.checkpoint.deepspeed_pickle import LossScaler, Stage, load_file
from trilithon.errors import CheckpointError

GOLDEN = Path(__file__).parents[2] / "data" / "deepspeed"
NAMES = {  # everything that the pickles may name
    "collections OrderedDict", "torch._utils _rebuild_tensor_v2", "torch Size", "torch float16",
    "torch FloatStorage", "torch HalfStorage", "torch BFloat16Storage", "torch LongStorage",
    "deepspeed.runtime.fp16.loss_scaler LossScaler", "deepspeed.runtime.fp16.loss_scaler DynamicLossScaler",
    "deepspeed.runtime.zero.config ZeroStageEnum", "deepspeed.utils.tensor_fragment fragment_address",
}  # fmt: skip


def apart(mine, theirs, where=""):
    """Places where two files differ, apart from the run's configuration and settings that only some optimizers have."""
    if isinstance(theirs, torch.Tensor):
        same = isinstance(mine, torch.Tensor) and mine.dtype == theirs.dtype and torch.equal(mine, theirs)
        return [] if same else [where]
    if hasattr(theirs, "items"):
        skipped = {"ds_config", "clip_grad", "bias_correction", "step" if "param_groups" in where else None}
        keys = (set(mine) | set(theirs)) - skipped
        missing = [f"{where}.{key}" for key in keys if key not in mine or key not in theirs]
        missing += [f"{where}.{key} decides for the run that reads it" for key in {"clip_grad"} & set(mine)]
        return missing + [
            p for key in keys & set(mine) & set(theirs) for p in apart(mine[key], theirs[key], f"{where}.{key}")
        ]
    if isinstance(theirs, (list, tuple)) and not isinstance(theirs, torch.Size):
        if len(mine) != len(theirs):
            return [f"{where} has {len(mine)} items for {len(theirs)}"]
        return [place for i, (a, b) in enumerate(zip(mine, theirs)) for place in apart(a, b, f"{where}[{i}]")]
    if type(theirs).__module__.startswith("trilithon") and not isinstance(theirs, Stage):
        return ([] if type(mine) is type(theirs) else [f"{where} type"]) + apart(vars(mine), vars(theirs), where)
    numbers = isinstance(mine, int | float) and isinstance(theirs, int | float) and not isinstance(theirs, bool)
    alike = mine == theirs and (type(mine) is type(theirs) or numbers)
    return [] if alike else [where]


SAME = [  # what DeepSpeed wrote, and how to ask for the same
    ("zero1_fp32", {}),
    ("zero1_fp16", {}),
    ("zero2_bf16", {}),
    ("zero2_fp32_four_ranks", {}),
    ("zero3_fp32_three_ranks", {}),
    ("zero3_bf16", {"sub_group_numel": 20}),
    ("universal_from_zero1_fp16", {"universal": True}),
    ("universal_from_zero3_bf16", {"universal": True, "sub_group_numel": 20}),
]


@pytest.mark.parametrize(("case", "options"), SAME)
def test_files_hold_what_deepspeed_itself_wrote(case, options, tmp_path):
    done = export_deepspeed(GOLDEN / case, tmp_path, **options)
    golden = next((GOLDEN / case).glob("global_step3*"))
    assert done.folder.name == golden.name
    assert (tmp_path / ("latest_universal" if options.get("universal") else "latest")).read_text() == golden.name
    theirs = {str(path.relative_to(golden)) for path in golden.rglob("*.pt")}
    passed_over = {name for name in theirs - set(done.files) if options.get("universal")}  # buffers and second names
    assert all(name.split("/")[1] in ("seen", "mean", "head.weight") for name in passed_over)
    assert theirs - passed_over == set(done.files)
    for name in done.files:
        if name == "zero/optimizer_state.pt" and "zero3" in case:  # holds what was left of one rank's state
            continue
        mine, other = load_file(done.folder / name), load_file(golden / name)
        if re.match(r"zero_pp_rank_[1-9]\d*_.*_model_states", name):
            for content in (mine, other):  # each rank's own buffers there; and padding that holds anything
                content["module"] = {key: value for key, value in content["module"].items() if not value.numel()}
                content.pop("frozen_param_fragments")
        if "zero3" in case and re.search(r"zero_pp_rank_[1-9]\d*_.*_optim_states", name):  # padding of any value again
            flat = [content["optimizer_state_dict"].pop("fp32_flat_groups") for content in (mine, other)]
            assert [len(group) for group in flat[0]] == [len(group) for group in flat[1]]
        assert apart(mine, other) == [], name


@pytest.mark.parametrize(
    ("case", "stage", "ranks", "universal"),
    [
        ("zero1_fp16", 3, 5, False),
        ("zero3_bf16", 1, 3, False),
        ("zero2_fp32_four_ranks", 3, 1, False),
        ("zero3_fp32_three_ranks", 2, 4, False),
        ("zero2_fp32_round_robin", 1, 2, True),
        ("zero3_fp32", 2, 1, True),
    ],
)
def test_any_stage_and_number_of_ranks_reads_back_bit_for_bit(case, stage, ranks, universal, tmp_path):
    done = export_deepspeed(GOLDEN / case, tmp_path, zero_stage=stage, ranks=ranks, universal=universal)
    assert (done.zero_stage, done.ranks) == (stage, ranks)
    parts = ("master", "exp_avg", "exp_avg_sq", "param", "buffer")
    assert list(differences(GOLDEN / case, tmp_path, tolerance=0, parts=parts)) == []
    with open_checkpoint(tmp_path) as mine, open_checkpoint(GOLDEN / case) as theirs:
        for key in ("counters", "scaler", "schedule"):
            assert mine.extra[key] == theirs.extra[key]
        assert mine.manifest.zero_stage == stage and mine.manifest.aliases == theirs.manifest.aliases
        assert [group["names"] for group in mine.extra["groups"]] == [
            group["names"] for group in theirs.extra["groups"]
        ]
        assert mine.extra["ranks"][0]["client_state"] == {"note": "golden", "epoch": 2}
        for entry in theirs.entries("frozen"):
            assert torch.equal(mine.read("frozen", entry.name).to(entry.torch_dtype), theirs.read("frozen", entry.name))


def engine(**config):
    torch.manual_seed(0)
    return trilithon.initialize(torch.nn.Linear(5, 3), {"optimizer": "adamw", **config})


def trained(folder, **config):
    with engine(**config) as run:
        for _ in range(2):
            run.backward(run(torch.ones(2, 5)).float().square().mean())
            run.step()
        run.save(folder, client_state={"epoch": 7})
    return folder


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "lion", "adagrad", "lamb", {"kind": "sgd", "momentum": 0.9}])
def test_a_run_of_ours_goes_there_and_back(optimizer, tmp_path):
    folder = trained(tmp_path / "ours", optimizer=optimizer, precision="bf16", zero={"stage": 2})
    done = export_deepspeed(folder, tmp_path / "theirs", ranks=2)
    assert done.folder.name == "global_step2"
    assert list(differences(folder, tmp_path / "theirs", tolerance=0, parts=("master", "param"))) == []
    with open_checkpoint(folder) as mine, open_checkpoint(tmp_path / "theirs") as theirs:
        for part in [part for part in mine.parts if part not in ("param", "master")]:
            for entry in mine.entries(part):
                assert torch.equal(mine.read(part, entry.name), theirs.read(part, entry.name))
        kind = optimizer if isinstance(optimizer, str) else optimizer["kind"]
        update = theirs.extra["ranks"][0]["update"]
        assert (update["rule"], update["updates"]) == (kind, 2)
    with engine(optimizer=optimizer, precision="bf16") as again:
        again.load(tmp_path / "theirs")
        assert again.steps == 2


def test_the_dynamic_loss_scale_has_the_settings_of_its_run(tmp_path):
    scale = {"kind": "fp16", "initial_scale_power": 5, "window": 7, "hysteresis": 3, "min_scale": 2.0}
    folder = trained(tmp_path / "ours", precision=scale)
    done = export_deepspeed(folder, tmp_path / "theirs", zero_stage=1)
    states = load_file(done.folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")["optimizer_state_dict"]
    scaler = states["loss_scaler"]
    assert isinstance(scaler, LossScaler) and states["dynamic_loss_scale"] is True
    told = (scaler.cur_scale, scaler.cur_iter, scaler.scale_window, scaler.delayed_shift, scaler.min_scale)
    assert told == (32.0, 2, 7, 3, 2.0)


def test_the_pickles_name_nothing_but_torch_and_three_classes_of_deepspeed(tmp_path):
    for case, stage in (("zero1_fp16", 1), ("zero3_bf16", 3)):
        done = export_deepspeed(GOLDEN / case, tmp_path / case, zero_stage=stage)
        for name in done.files:
            with zipfile.ZipFile(done.folder / name) as archive:
                raw = next(archive.read(member) for member in archive.namelist() if member.endswith("data.pkl"))
            found = {str(arg) for op, arg, _ in pickletools.genops(io.BytesIO(raw)) if op.name == "GLOBAL"}
            assert found <= NAMES and "STACK_GLOBAL" not in {op.name for op, _, _ in pickletools.genops(raw)}


def test_stage_0_holds_weights_alone(tmp_path):
    done = export_deepspeed(GOLDEN / "zero3_bf16", tmp_path, zero_stage=0)
    assert done.files == ("mp_rank_00_model_states.pt",)
    module = load_file(done.folder / done.files[0])["module"]
    assert module["hidden.weight"].dtype == torch.bfloat16 and module["head.weight"] is not None
    with open_checkpoint(GOLDEN / "zero3_bf16") as saved:
        assert torch.equal(module["hidden.weight"].reshape(-1), saved.read("param", "hidden.weight").reshape(-1))


# ------------------------------------------------------------------------------------------------------ what is refused
def test_a_tag_that_is_there_and_wrong_numbers_are_refused(tmp_path):
    export_deepspeed(GOLDEN / "zero1_fp32", tmp_path)
    with pytest.raises(CheckpointError, match=r"global_step3 is there already.*out_tag"):
        export_deepspeed(GOLDEN / "zero1_fp32", tmp_path)
    export_deepspeed(GOLDEN / "zero1_fp32", tmp_path, out_tag="again")
    assert (tmp_path / "latest").read_text() == "again"
    for wrong, text in (({"ranks": 0}, "ranks=0: give"), ({"zero_stage": 4}, "zero_stage=4: it is 0")):
        with pytest.raises(CheckpointError, match=text):
            export_deepspeed(GOLDEN / "zero1_fp32", tmp_path / "other", **wrong)
    with pytest.raises(CheckpointError, match="universal=True holds optimizer state"):
        export_deepspeed(GOLDEN / "zero1_fp32", tmp_path / "other", zero_stage=0, universal=True)
    assert not (tmp_path / "other").exists()


def test_state_without_a_place_is_refused_and_its_weights_are_not(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3)
    with trilithon.initialize(model, {}, optimizer=torch.optim.RMSprop(model.parameters())) as run:
        run.backward(run(torch.ones(2, 5)).square().mean())
        run.step()
        run.save(tmp_path / "ours")
    with pytest.raises(CheckpointError, match=r"optimizer state of .*RMSprop, which has no place.*zero_stage=0"):
        export_deepspeed(tmp_path / "ours", tmp_path / "theirs", zero_stage=1)
    assert export_deepspeed(tmp_path / "ours", tmp_path / "theirs", zero_stage=0).files


def test_an_open_window_and_taken_names_are_refused(tmp_path):
    with engine(batch={"accumulation": 2}) as run:
        run.backward(run(torch.ones(2, 5)).square().mean())
        run.save(tmp_path / "open")
    with pytest.raises(CheckpointError, match="inside of an accumulation window"):
        export_deepspeed(tmp_path / "open", tmp_path / "theirs", zero_stage=1)
    with engine() as run:
        run.save(tmp_path / "taken", client_state={"global_steps": 3})
    with pytest.raises(CheckpointError, match="client_state holds global_steps"):
        export_deepspeed(tmp_path / "taken", tmp_path / "theirs", zero_stage=0)


def test_a_failure_leaves_nothing_behind(tmp_path, monkeypatch):
    from trilithon.checkpoint import deepspeed_export

    def failing(content, path):
        if "optim" in path.name:
            raise CheckpointError("the disk is full")
        return deepspeed_write(content, path)

    deepspeed_write = deepspeed_export.write_file
    monkeypatch.setattr(deepspeed_export, "write_file", failing)
    with pytest.raises(CheckpointError, match="the disk is full"):
        export_deepspeed(GOLDEN / "zero1_fp32", tmp_path / "theirs")
    assert not (tmp_path / "theirs").exists()
