"""`trilithon moe`: two models joined, one pruned, and what is refused."""

import subprocess

import pytest
import torch

from trilithon.data.tokenizer import ByteTokenizer
from trilithon.models import GPT, preset
from trilithon.parallel.moe import layers
from trilithon.pretrain import load_model
from trilithon.pretrain.artifacts import save_model
from warm_python import python


@pytest.fixture
def runs(tmp_path):
    for name, seed, experts in (("a", 0, 2), ("b", 1, 2), ("dense", 2, 0)):
        torch.manual_seed(seed)
        shape = preset("nano", 257, num_layers=2, width=16, num_heads=2, context=16, experts=experts)
        (tmp_path / name).mkdir()
        model = GPT(shape)
        save_model(tmp_path / name, model.state_dict(), shape, ByteTokenizer())
    return tmp_path


def call(*arguments):
    command = [python(), "-m", "trilithon.cli.main", "moe", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_aggregate_then_prune(runs):
    done = call("aggregate", runs / "a", runs / "b", "--out", runs / "both")
    assert done.returncode == 0, done.stderr
    assert "4 experts in 1 layers" in done.stdout
    both, first = load_model(runs / "both")[0], load_model(runs / "a")[0]
    (_, layer), (_, half) = *layers(both), *layers(first)
    assert torch.equal(layer.experts.get_parameter("up.weight")[:2], half.experts.get_parameter("up.weight"))
    (runs / "text.txt").write_text("some text " * 30)
    done = call("prune", runs / "both", "--keep", 1, "--data", runs / "text.txt", "--out", runs / "small")
    assert done.returncode == 0, done.stderr
    small, tokenizer = load_model(runs / "small")
    assert [layer.num_experts for _, layer in layers(small)] == [1]
    tokens = torch.tensor(tokenizer.encode("some text " * 30)[:16]).unsqueeze(0)
    both.eval()(tokens)
    kept = int(done.stdout.splitlines()[0].rpartition("kept ")[2])
    assert layer.last.routed[kept] > 0
    assert small.eval()(tokens).isfinite().all()


def test_what_cannot_be_done_says_why(runs):
    for arguments, said in (
        (("aggregate", runs / "a", runs / "dense", "--out", runs / "x"), "has no experts"),
        (("prune", runs / "a", "--keep", 1, "--out", runs / "x"), "give --data FILE"),
        (("prune", runs / "a", "--keep", 1, "--data", runs / "none", "--out", runs / "x"), "none cannot be read"),
        (("prune", runs / "a", "--keep", 0, "--by", "random", "--out", runs / "x"), "as many have to stay"),
        (("prune", runs / "a", "--keep", 1, "--by", "random", "--out", runs / "b"), "already holds a model"),
        (("prune", runs / "a", "--keep", 1, "--by", "luck", "--out", runs / "x"), "--by luck"),
        (("aggregate", runs / "a", runs / "b", "--dense", "max", "--out", runs / "x"), "--dense max"),
    ):
        done = call(*arguments)
        assert done.returncode == 1
        assert said in done.stderr, done.stderr
    assert not (runs / "x").exists()
