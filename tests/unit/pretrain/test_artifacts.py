import pytest
import torch

from trilithon.data import ByteTokenizer
from trilithon.errors import CheckpointError
from trilithon.models import GPT, preset
from trilithon.pretrain import load_model
from trilithon.pretrain.artifacts import save_model, write_whole


@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_model_computes_the_same(tmp_path, tied):
    shape = preset("nano", 257, tie_embeddings=tied)
    model = GPT(shape)
    save_model(tmp_path, model.state_dict(), shape, ByteTokenizer())
    again, tokenizer = load_model(tmp_path)
    tokens = torch.from_numpy(tokenizer.encode("some text")[None])
    assert torch.equal(again(tokens), model(tokens))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.json", "model.pt", "tokenizer.json"]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "model.pt"
    path.write_bytes(b"old")

    def full(stream):
        stream.write(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"model\.pt cannot be written .*No space left"):
        write_whole(path, full)
    assert path.read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("damage", ["missing", "shape", "cut"])
def test_a_folder_without_a_whole_model_is_named(tmp_path, damage):
    shape = preset("nano", 257)
    save_model(tmp_path, GPT(shape).state_dict(), shape, ByteTokenizer())
    if damage == "missing":
        (tmp_path / "model.pt").unlink()
    elif damage == "shape":
        (tmp_path / "model.json").write_text("{}")
    else:
        (tmp_path / "model.pt").write_bytes((tmp_path / "model.pt").read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="holds no model that can be loaded"):
        load_model(tmp_path)
