"""Damaged checkpoints: each kind has its own error, every flipped byte is seen, and nothing is unpickled."""

from __future__ import annotations

import json
import pickle
import random
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file
from tables import contents, model_contents, on_thread_ranks, whole

from trilithon.checkpoint import Alone, open_checkpoint, save
from trilithon.checkpoint.manifest import VERSION, encode, read_manifest
from trilithon.errors import CheckpointError


def read_all(folder, tag="a"):
    with open_checkpoint(folder, tag) as reader:
        values = [reader.read(entry.part, entry.name) for entry in reader.entries()]
        return values, reader.extra


@pytest.fixture
def saved(tmp_path):
    save(tmp_path, "a", model_contents(1), Alone())
    return tmp_path


def payload(saved):
    return next((saved / "a").glob("*.safetensors"))


def flip(path, at):
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1 << random.Random(at).randrange(8)
    path.write_bytes(raw)


def rewrite(saved, **changes):
    """A manifest with other contents and a digest that fits them."""
    path = saved / "a" / "MANIFEST.json"
    manifest = read_manifest(saved / "a")
    for key, value in changes.items():
        object.__setattr__(manifest, key, value)
    path.write_bytes(encode(manifest))


def shortened(saved):
    path = payload(saved)
    path.write_bytes(path.read_bytes()[:-3])


def without_an_entry_chunk(saved):
    manifest = read_manifest(saved / "a")
    entries = list(manifest.entries)
    object.__setattr__(entries[0], "chunks", ())
    rewrite(saved, entries=tuple(entries))


def past_the_end(saved):
    manifest = read_manifest(saved / "a")
    chunk = manifest.entries[0].chunks[0]
    object.__setattr__(chunk, "offset", 10**6)
    rewrite(saved, entries=manifest.entries)


DAMAGES = {
    "no checkpoint there": (lambda s: shutil.rmtree(s / "a"), r"holds no checkpoint 'a'. There are: none"),
    "no manifest": (lambda s: (s / "a" / "MANIFEST.json").unlink(), r"holds no MANIFEST.json: .* Name another tag"),
    "manifest cut short": (
        lambda s: (s / "a" / "MANIFEST.json").write_bytes((s / "a" / "MANIFEST.json").read_bytes()[:-40]),
        r"MANIFEST.json is damaged: it is not a JSON document",
    ),
    "manifest changed": (
        lambda s: (s / "a" / "MANIFEST.json").write_bytes(
            (s / "a" / "MANIFEST.json").read_bytes().replace(b'"step": 1', b'"step": 2')
        ),
        r"its own digest does not match",
    ),
    "another program's JSON": (
        lambda s: (s / "a" / "MANIFEST.json").write_text(json.dumps({"weight_map": {}})),
        r"not the manifest of a checkpoint of this library",
    ),
    "written by a newer release": (lambda s: rewrite(s, version=VERSION + 1), r"Install a newer trilithon"),
    "file missing": (lambda s: payload(s).unlink(), r"is incomplete: .*safetensors is missing"),
    "file cut short": (shortened, r"is incomplete: .*safetensors has \d+ bytes instead of \d+"),
    "values changed": (lambda s: flip(payload(s), -5), r"safetensors is damaged: bytes 0 to \d+ do not match"),
    "state changed": (lambda s: flip(s / "a" / "state.json", 3), r"state.json is damaged"),
    "tensor without bytes": (without_an_entry_chunk, r"'layer.weight' is incomplete in the manifest: 0 of 24"),
    "bytes that no file has": (past_the_end, r"are not in the manifest"),
    "a checkpoint of torch": (
        lambda s: ((s / "a" / "MANIFEST.json").unlink(), (s / "a" / ".metadata").write_bytes(b"x")),
        r"looks like a checkpoint of torch.distributed.checkpoint",
    ),
    "a checkpoint of DeepSpeed": (
        lambda s: (
            (s / "a" / "MANIFEST.json").unlink(),
            (s / "a" / "mp_rank_00_model_states.pt").write_bytes(b"x"),
        ),
        r"cannot be read as a file of torch.save",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_each_damage_has_its_own_error(damage, saved):
    make, message = DAMAGES[damage]
    read_all(saved)
    make(saved)
    with pytest.raises(CheckpointError, match=message) as refusal:
        read_all(saved)
    others = [text for name, (_, text) in DAMAGES.items() if name != damage]
    assert not any(re.search(text, str(refusal.value)) for text in others)


@pytest.mark.parametrize("file", ["MANIFEST.json", "state.json", "data-00000-000.safetensors"])
def test_every_flipped_byte_is_refused(file, saved):
    path = saved / "a" / file
    size, intact = path.stat().st_size, path.read_bytes()
    rng = random.Random(0)
    for at in [0, 1, size - 1, *(rng.randrange(size) for _ in range(150))]:
        flip(path, at)
        with pytest.raises(CheckpointError):
            read_all(saved)
        path.write_bytes(intact)
    read_all(saved)


def test_a_hostile_pickle_in_a_checkpoint_does_not_run(saved, tmp_path):
    class Hostile:
        def __reduce__(self):
            return open, (str(tmp_path / "ran"), "w")

    for name in ("MANIFEST.json", "state.json", payload(saved).name):
        intact = (saved / "a" / name).read_bytes()
        (saved / "a" / name).write_bytes(pickle.dumps(Hostile()))
        with pytest.raises(CheckpointError):
            read_all(saved)
        (saved / "a" / name).write_bytes(intact)
    assert not (tmp_path / "ran").exists()


def test_nothing_found_is_told_from_found_but_broken(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"holds no checkpoint\. Nothing has been saved there"):
        open_checkpoint(tmp_path)
    save(tmp_path, "a", model_contents(1), Alone())
    (tmp_path / "a" / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"holds checkpoints, but none that is complete.*state.json is missing"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("pointer", [None, "", "gone\n", b"\xff\xfe"])
def test_a_bad_pointer_leads_to_the_newest_complete_checkpoint(pointer, tmp_path, caplog):
    for step in (1, 2, 3):
        save(tmp_path, f"s{step}", model_contents(step), Alone())
    (tmp_path / "s3" / "state.json").unlink()
    if pointer is None:
        (tmp_path / "latest").unlink()
    else:
        (tmp_path / "latest").write_bytes(pointer if isinstance(pointer, bytes) else pointer.encode())
    with open_checkpoint(tmp_path) as reader:
        assert reader.manifest.step == 2
    assert "the newest complete checkpoint, s2, is loaded instead" in caplog.text


def test_other_programs_read_the_files(saved):
    found = load_file(payload(saved))
    assert {key: tuple(value.shape) for key, value in found.items()} == {
        "master/layer.weight": (6, 4),
        "master/layer.bias": (4,),
        "master/count": (),
    }
    assert torch.equal(found["master/layer.weight"], torch.full((6, 4), 1.0))


def test_replicas_are_written_once_and_shared_out(tmp_path):
    tensors = {f"w{i}": torch.randn(2**20 + i) for i in range(12)}

    def body(rank):
        return save(tmp_path, "a", contents([whole("master", n, t) for n, t in tensors.items()]), rank)

    on_thread_ranks(4, body)
    total = sum(tensor.nbytes for tensor in tensors.values())
    sizes = [path.stat().st_size for path in (tmp_path / "a").glob("*.safetensors")]
    assert len(sizes) == 4
    assert total <= sum(sizes) < 1.001 * total
    assert max(sizes) <= 1.1 * total / 4
