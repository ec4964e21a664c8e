"""`trilithon train` with experts spread over two ranks: balance and drops are shown, and the model can be loaded."""

import json

import torch
from test_train_ranks import SMALL, end, start

from trilithon.parallel.moe import layers
from trilithon.pretrain import load_model


def test_experts_over_two_ranks(tmp_path):
    (tmp_path / "a.txt").write_text("some text to learn from, again and again.\n" * 200)
    out = tmp_path / "run"
    options = ("--experts", 4, "--top-k", 1, "--ep-size", 2, "--zero-stage", 2, "--steps", 3, "--nproc", 2)
    cache = ("--cache", tmp_path / "cache", "--set", "monitor.every=1")
    status, said, err = end(start("--data", tmp_path / "a.txt", "--out", out, *SMALL, *options, *cache))
    assert status == 0, err
    assert "balance" in said and "drops" in said
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert any("experts/balance" in record and 0 <= record["experts/drops"] < 1 for record in records)
    model, _ = load_model(out)
    assert [layer.num_experts for _, layer in layers(model)] == [4]
    assert model.eval()(torch.zeros(1, 5, dtype=torch.int64)).shape == (1, 5, 257)
