"""Exports: what is written is the model, in files that any program reads, and never more of it in memory than a bit."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tables import contents, whole
from torch import nn

from trilithon.checkpoint import Alone, Contents, export, read_weights, save
from trilithon.checkpoint import export as package_export
from trilithon.checkpoint.asked import bytes_asked
from trilithon.checkpoint.manifest import Entry
from trilithon.errors import CheckpointError


class Tied(nn.Module):
    """A tied head, frozen weights, buffers of two types, one of them not persistent."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(13, 6)
        self.norm = nn.BatchNorm1d(6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scratch", torch.ones(2), persistent=False)


def saved(folder, *, low=torch.bfloat16, scale=1.0):
    """The model as a run in `low` saves it: masters in fp32, frozen weights in `low`, buffers as they are."""
    model = Tied()
    holdings, views = [], []
    for name, param in model.named_parameters():
        if param.requires_grad:
            holdings.append(whole("master", name, param.detach() * scale))
            views.append(Entry("param", name, str(low).removeprefix("torch."), tuple(param.shape), of="master"))
        else:
            holdings.append(whole("frozen", name, param.detach().to(low)))
        holdings.append(whole("exp_avg", name, torch.zeros_like(param)))
    holdings += [whole("buffer", name, model.norm.get_buffer(name.partition(".")[2])) for name in (
        "norm.running_mean", "norm.running_var", "norm.num_batches_tracked")]  # fmt: skip
    table: Contents = contents(holdings, views=views, aliases={"head.weight": "embed.weight"})
    save(folder, "one", table, Alone())
    return model


def read(folder):
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


@pytest.mark.parametrize("shard_bytes", [10**9, 300, 1])
def test_the_export_loads_strictly_into_the_plain_model(tmp_path, shard_bytes):
    model = saved(tmp_path / "run")
    done = export(tmp_path / "run", tmp_path / "out", shard_bytes=shard_bytes)
    weights = read(done.folder)
    fresh = Tied()
    for param in fresh.parameters():
        nn.init.zeros_(param)
    assert fresh.load_state_dict(weights, strict=True)
    for name, value in model.state_dict().items():
        kept = value.bfloat16().float() if name.startswith("frozen") else value
        assert torch.equal(fresh.state_dict()[name], kept), name
    assert done.tensors == len(weights) == 9 and done.bytes == sum(t.nbytes for t in weights.values())
    assert not any(name.startswith("exp_avg") for name in weights)


def test_several_files_have_the_names_and_the_index_of_hugging_face(tmp_path):
    saved(tmp_path / "run")
    done = export(tmp_path / "run", tmp_path / "out", shard_bytes=400)
    count = len(done.files) - 1
    assert list(done.files) == [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)] + [
        "model.safetensors.index.json"
    ]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": done.bytes}
    assert set(index["weight_map"].values()) == set(done.files[:-1]) and count > 2
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "out" / file, framework="pt") as opened:
            assert name in opened.keys() and opened.metadata()["format"] == "pt"  # noqa: SIM118
    sizes = [path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")]
    assert max(sizes) < 400 + 1000  # the header comes on top


def test_one_file_has_no_index(tmp_path):
    saved(tmp_path / "run")
    done = export(tmp_path / "run", tmp_path / "out")
    assert done.files == ("model.safetensors",) and [p.name for p in (tmp_path / "out").iterdir()] == list(done.files)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, None])
def test_sixteen_bits_are_the_masters_rounded_and_buffers_keep_their_type(tmp_path, dtype):
    model = saved(tmp_path / "run")
    weights = read(export(tmp_path / "run", tmp_path / "out", dtype=dtype).folder)
    low = dtype or torch.bfloat16
    assert torch.equal(weights["embed.weight"], model.embed.weight.detach().to(low))
    assert torch.equal(weights["frozen.weight"], model.frozen.weight.bfloat16().to(low))
    assert weights["norm.running_mean"].dtype == torch.float32
    assert weights["norm.num_batches_tracked"].dtype == torch.int64


def test_a_weight_that_fp16_cannot_hold_stops_the_export(tmp_path):
    saved(tmp_path / "run", scale=1e5)
    with pytest.raises(CheckpointError, match=r"'\w+\.weight' holds .*float16 ends at 65504.*bfloat16"):
        export(tmp_path / "run", tmp_path / "out", dtype=torch.float16)
    assert not (tmp_path / "out").exists()


def test_tied_weights_once_are_noted_in_the_metadata(tmp_path):
    saved(tmp_path / "run")
    done = export(tmp_path / "run", tmp_path / "out", tied="once")
    weights = read(done.folder)
    assert "head.weight" not in weights and done.aliases == {"head.weight": "embed.weight"}
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as opened:
        assert opened.metadata()["head.weight"] == "embed.weight"
    fresh = Tied()  # the safetensors library ties again what the model ties
    from safetensors.torch import load_model

    assert load_model(fresh, tmp_path / "out" / "model.safetensors", strict=True) == (set(), [])


def test_patterns_select_names(tmp_path):
    saved(tmp_path / "run")
    done = export(tmp_path / "run", tmp_path / "out", include=["*.weight"], exclude=["frozen.*"])
    assert set(read(done.folder)) == {"embed.weight", "norm.weight", "head.weight"}
    with pytest.raises(CheckpointError, match="nothing to export"):
        export(tmp_path / "run", tmp_path / "other", include=["nothing*"])


def test_an_export_is_not_overwritten_by_accident_and_leaves_no_old_file(tmp_path):
    saved(tmp_path / "run")
    export(tmp_path / "run", tmp_path / "out", shard_bytes=100)
    with pytest.raises(CheckpointError, match=r"holds model-00001-of-.* already"):
        export(tmp_path / "run", tmp_path / "out")
    export(tmp_path / "run", tmp_path / "out", overwrite=True)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_a_damaged_checkpoint_stops_the_export_and_leaves_the_old_one(tmp_path):
    saved(tmp_path / "run")
    export(tmp_path / "run", tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    payload = next((tmp_path / "run" / "one").glob("data*"))
    raw = bytearray(payload.read_bytes())
    raw[-1] ^= 1
    payload.write_bytes(raw)
    with pytest.raises(CheckpointError, match=payload.name):
        export(tmp_path / "run", tmp_path / "out", overwrite=True)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before


def test_an_export_that_fails_leaves_no_folder(tmp_path):
    saved(tmp_path / "run")
    payload = next((tmp_path / "run" / "one").glob("data*"))
    raw = bytearray(payload.read_bytes())
    raw[-1] ^= 1
    payload.write_bytes(raw)
    with pytest.raises(CheckpointError, match=payload.name):
        export(tmp_path / "run", tmp_path / "new" / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=payload.name):
        export(tmp_path / "run", tmp_path / "empty" / "out")
    assert (tmp_path / "empty").is_dir() and not list((tmp_path / "empty").iterdir())
    with pytest.raises(CheckpointError, match="out='' names no folder"):
        export(tmp_path / "run", "")


def test_too_little_room_is_told_before_anything_is_written(tmp_path, monkeypatch):
    saved(tmp_path / "run")
    monkeypatch.setattr(package_export.__globals__["durable"], "free_bytes", lambda path: 100)
    with pytest.raises(CheckpointError, match=r"the export needs \d+ bytes and .* has 100 left"):
        export(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


_EXPORT = """
import resource, sys, torch
from trilithon.checkpoint import export
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
export(sys.argv[1], sys.argv[2], dtype=torch.bfloat16, shard_bytes=32 * 2**20)
print(before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_an_export_needs_less_memory_than_one_shard(tmp_path):
    """192 MiB of fp32 weights in tensors of 24 MiB: the peak grows by less than the 32 MiB of one file."""
    tensors = [whole("master", f"layer{index}", torch.full((6 * 2**20,), float(index))) for index in range(8)]
    save(tmp_path / "run", "one", contents(tensors), Alone())
    del tensors
    out = subprocess.run(
        [sys.executable, "-c", _EXPORT, str(tmp_path / "run"), str(tmp_path / "out")],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    before, after = map(int, out.stdout.split())
    assert (after - before) * 1024 < 32 * 2**20
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 4
    assert float(load_file(tmp_path / "out" / "model-00004-of-00004.safetensors")["layer7"][-1]) == 7.0


def test_weights_are_read_without_files_and_tied_names_share_them(tmp_path):
    model = saved(tmp_path)
    found = read_weights(tmp_path)
    assert found["head.weight"] is found["embed.weight"]
    fresh = Tied()
    fresh.load_state_dict(found)
    for name, value in fresh.state_dict().items():
        expected = model.state_dict()[name]
        low = expected.bfloat16() if name.startswith("frozen") else expected
        assert torch.equal(value, low.to(expected.dtype)), name
    assert set(found) - set(read_weights(tmp_path, frozen=False)) == {"frozen.weight", "frozen.bias"}
    assert set(read_weights(tmp_path, include=["embed*"], dtype=torch.float16)) == {"embed.weight"}


def test_pytorchs_own_files_hold_what_safetensors_do(tmp_path):
    saved(tmp_path / "run")
    expected = read_weights(tmp_path / "run")
    done = export(tmp_path / "run", tmp_path / "one", form="bin")
    assert done.files == ("pytorch_model.bin",)
    one = torch.load(tmp_path / "one" / "pytorch_model.bin")
    assert set(one) == set(expected) and all(torch.equal(one[name], expected[name]) for name in expected)
    done = export(tmp_path / "run", tmp_path / "several", form="bin", shard_bytes=200)
    index = json.loads((tmp_path / "several" / done.files[-1]).read_text())
    assert done.files[-1] == "pytorch_model.bin.index.json" and len(done.files) > 2
    for name, file in index["weight_map"].items():
        assert torch.equal(torch.load(tmp_path / "several" / file)[name], expected[name])
    with pytest.raises(CheckpointError, match="holds pytorch_model"):
        export(tmp_path / "run", tmp_path / "several", form="bin")
    with pytest.raises(CheckpointError, match="no place"):
        export(tmp_path / "run", tmp_path / "tied", form="bin", tied="once")


@pytest.mark.parametrize(("text", "size"), [("500MB", 5 * 10**8), ("2 GiB", 2**31), ("1.5k", 1500), (7, 7)])
def test_sizes_are_read(text, size):
    assert bytes_asked(text) == size


@pytest.mark.parametrize("text", ["much", "0", "-1GB", "5 apples"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(CheckpointError, match="no size"):
        bytes_asked(text)
