"""What `monitor` in the configuration asks for is recorded by the engine itself, on rank 0, once per period."""

import json
import os
from pathlib import Path

import pytest
import torch

import trilithon
from trilithon.errors import ConfigError
from trilithon.testing import run_ranks
from trilithon.testing.models import MLP
from trilithon.testing.parity import vector_batches


def train(folder, every):
    engine = trilithon.initialize(
        MLP(), {"optimizer": {"kind": "sgd", "lr": 0.1}, "monitor": {"folder": folder, "every": every, "quiet": True}}
    )
    seen = []
    for micro_batches in vector_batches(steps=4, rows=4):
        loss = engine.train_step(micro_batches)
        seen.append((loss, engine.grad_norm))
    engine.close()
    return seen


def test_every_second_step_is_written_once_with_the_values_of_the_engine(tmp_path):
    seen = run_ranks(train, 2, str(tmp_path), 2)[0]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [2, 4]
    for row in rows:
        loss, norm = seen[row["step"] - 1]
        assert (row["loss"], row["grad_norm"], row["lr"]) == (loss, norm, 0.1)


def refuse(folder):
    with pytest.raises(ConfigError, match=r"monitor\.folder"):
        train(folder, 1)
    return True


def test_a_folder_that_cannot_be_written_stops_every_rank(tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert run_ranks(refuse, 2, str(tmp_path / "file" / "below")) == [True, True]


def test_an_engine_that_was_told_nothing_writes_and_prints_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    engine = trilithon.initialize(MLP(), {"optimizer": {"kind": "sgd", "lr": 0.1}})
    torch.manual_seed(0)
    for micro_batches in vector_batches(steps=12, rows=4):
        engine.train_step(micro_batches)
    engine.close()
    assert capsys.readouterr().out == ""
    assert os.listdir(Path.cwd()) == []
