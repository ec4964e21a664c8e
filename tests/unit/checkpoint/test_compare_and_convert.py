"""diff, convert, prune and verify: what they report, and what they leave alone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tables import contents, model_contents, whole

from trilithon.checkpoint import Alone, convert, differences, open_checkpoint, save, tags, verify
from trilithon.checkpoint.removal import prune_now
from trilithon.errors import CheckpointError

GOLDEN = Path(__file__).parents[2] / "data" / "deepspeed"


def keep(folder, tensors, part="master"):
    save(folder, "one", contents([whole(part, name, tensor) for name, tensor in tensors.items()]), Alone())
    return folder


def test_equal_checkpoints_do_not_differ(tmp_path):
    tensors = {"w": torch.randn(5, 7), "n": torch.tensor(3), "nan": torch.tensor([float("nan"), float("inf")])}
    a, b = keep(tmp_path / "a", tensors), keep(tmp_path / "b", tensors)
    assert list(differences(a, b, tolerance=0)) == list(differences(a, b)) == []


def test_the_first_element_that_differs_is_named_with_both_values(tmp_path):
    value = torch.ones(5, 7)
    other = value.clone()
    other[2, 3], other[4, 0] = 1.5, -1.0
    (found,) = differences(keep(tmp_path / "a", {"w": value}), keep(tmp_path / "b", {"w": other}))
    assert (found.first, found.a, found.b, found.elements, found.largest) == ((2, 3), "1", "1.5", 2, 2.0)
    assert "master/w: first at [2, 3]: 1 and 1.5; 2 elements differ" in str(found)
    value[4, 0] = -1.0
    (found,) = differences(keep(tmp_path / "c", {"w": value}), tmp_path / "b")
    assert "1 and 1.5; 1 element differs, by" in str(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_few_roundings_are_let_through_unless_bits_are_asked_for(tmp_path, dtype):
    value = torch.rand(1000).to(dtype)
    near = (value.float() * (1 + 2 * torch.finfo(dtype).eps)).to(dtype)
    far = (value.float() * (1 + 20 * torch.finfo(dtype).eps)).to(dtype)
    a, b, c = (keep(tmp_path / name, {"w": tensor}) for name, tensor in (("a", value), ("b", near), ("c", far)))
    assert list(differences(a, b)) == []
    assert [found.name for found in differences(a, b, tolerance=0)] == ["w"]
    assert [found.name for found in differences(a, c)] == ["w"]
    assert list(differences(a, c, tolerance=0.5)) == []


def test_names_shapes_and_integers(tmp_path):
    a = keep(tmp_path / "a", {"w": torch.ones(4), "only": torch.ones(1), "n": torch.tensor(1)})
    b = keep(tmp_path / "b", {"w": torch.ones(2, 2), "new": torch.ones(1), "n": torch.tensor(2)})
    found = {one.name: one.kind for one in differences(a, b)}
    assert found == {"w": "shape", "only": "only in A", "n": "values", "new": "only in B"}
    assert {one.name for one in differences(a, b, parts=["buffer"])} == set()


def test_infinities_and_nan_differ_from_numbers(tmp_path):
    a = keep(tmp_path / "a", {"w": torch.tensor([1.0, 2.0])})
    b = keep(tmp_path / "b", {"w": torch.tensor([1.0, float("nan")])})
    (found,) = differences(a, b, tolerance=1.0)
    assert found.first == (1,) and found.largest == float("inf")


@pytest.mark.parametrize("case", ["zero1_fp16", "zero3_bf16", "universal_from_zero3_bf16", "zero0_fp32"])
def test_a_converted_checkpoint_holds_the_same_to_the_bit(tmp_path, case):
    path = convert(GOLDEN / case, tmp_path)
    assert verify(path) == [] and list(differences(GOLDEN / case, path, tolerance=0)) == []
    with open_checkpoint(path) as ours, open_checkpoint(GOLDEN / case) as theirs:
        assert dict(ours.extra) == dict(theirs.extra)
        assert ours.manifest.aliases == theirs.manifest.aliases
        assert ours.manifest.step == 3 and "(converted from DeepSpeed 0.19.8)" in ours.manifest.library


def test_sixteen_bit_weights_alone(tmp_path):
    path = convert(GOLDEN / "zero1_fp32", tmp_path, dtype=torch.bfloat16, out_tag="half")
    with open_checkpoint(path) as ours, open_checkpoint(GOLDEN / "zero1_fp32") as theirs:
        assert path.name == "half" and set(ours.parts) == {"param", "master", "frozen", "buffer"}
        for name in ("embed.weight", "gain"):
            assert torch.equal(ours.read("master", name), theirs.read("master", name).bfloat16())
        assert ours.read("buffer", "mean").dtype == torch.float32
        assert ours.extra["ranks"][0]["client_state"] == {"note": "golden", "epoch": 2}
        assert "update" not in ours.extra["ranks"][0]


def test_a_conversion_does_not_replace_what_is_there(tmp_path):
    convert(GOLDEN / "zero1_fp32", tmp_path)
    with pytest.raises(CheckpointError, match="global_step3 is there already"):
        convert(GOLDEN / "zero1_fp32", tmp_path)
    with pytest.raises(CheckpointError, match="global_step3 is there already"):
        convert(tmp_path, tmp_path)


def test_pruning_keeps_the_newest_and_the_one_that_latest_names(tmp_path):
    for step in range(1, 7):
        save(tmp_path, f"step-{step}", model_contents(step), Alone())
    (tmp_path / "latest").write_text("step-2\n")
    assert prune_now(tmp_path, 2, keep_every=3, dry_run=True) == ["step-1", "step-4"]
    assert len(tags(tmp_path)) == 6
    assert prune_now(tmp_path, 2, keep_every=3) == ["step-1", "step-4"]
    assert tags(tmp_path) == ["step-2", "step-3", "step-5", "step-6"]
    assert prune_now(tmp_path, 1) == ["step-3", "step-5"]
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        prune_now(tmp_path / "nothing", 1)


def test_verify_names_the_file_the_bytes_and_the_tensors(tmp_path):
    save(tmp_path, "one", model_contents(1), Alone())
    payload = next((tmp_path / "one").glob("data*"))
    intact = payload.read_bytes()
    raw = bytearray(intact)
    raw[-1] ^= 0x40
    payload.write_bytes(raw)
    (problem,) = verify(tmp_path)
    assert problem.file == payload.name and "do not match their digest" in problem.text
    assert set(problem.tensors) == {"master/layer.weight", "master/layer.bias", "master/count"}
    payload.write_bytes(intact[:-1])
    assert "was cut or replaced" in verify(tmp_path)[0].text
    payload.unlink()
    assert verify(tmp_path)[0].text == "is missing"
    payload.write_bytes(intact)
    (tmp_path / "one" / "stranger").write_text("")
    assert [problem.file for problem in verify(tmp_path, "one")] == ["stranger"]
    with pytest.raises(CheckpointError, match="stranger is a file"):
        verify(tmp_path / "one" / "stranger")


def test_every_byte_of_the_manifest_and_the_state_counts(tmp_path):
    save(tmp_path, "one", model_contents(1), Alone())
    for name in ("MANIFEST.json", "state.json"):
        path = tmp_path / "one" / name
        intact = path.read_bytes()
        for position in range(0, len(intact), 7):
            path.write_bytes(intact[:position] + bytes([intact[position] ^ 0x01]) + intact[position + 1 :])
            assert name in {problem.file for problem in verify(tmp_path)}, position
        path.write_bytes(intact)
    assert verify(tmp_path) == []


def test_there_must_be_something_to_verify(tmp_path):
    with pytest.raises(CheckpointError, match="neither a latest file nor a MANIFEST"):
        verify(tmp_path)
    save(tmp_path, "one", model_contents(1), Alone())
    shutil.rmtree(tmp_path / "one")
    with pytest.raises(CheckpointError, match="one does not exist"):
        verify(tmp_path)
