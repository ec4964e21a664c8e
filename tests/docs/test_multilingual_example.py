"""The multilingual example reads message catalogues, mixes languages and tasks as it says, and runs."""

from __future__ import annotations

import importlib.util
import re
import struct
import sys
from pathlib import Path

import pytest
import torch
from test_examples_run import ROOT, run

SCRIPT = ROOT / "examples" / "multilingual_moe.py"
NUMBERS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
LANGUAGES = {"aa": 12, "bb": 12, "cc": 3}


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("multilingual_moe", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["multilingual_moe"] = module
    spec.loader.exec_module(module)
    return module


def write_catalogue(path: Path, messages: dict[bytes, bytes], order: str = "<") -> None:
    """A .mo file: magic number, version, count, where the two tables are; tables; texts that end in a zero."""
    pairs = sorted(messages.items())
    at = 28 + 16 * len(pairs)
    tables, texts = [], b""
    for column in (0, 1):
        for pair in pairs:
            tables.append((len(pair[column]), at + len(texts)))
            texts += pair[column] + b"\0"
    head = struct.pack(f"{order}7I", 0x950412DE, 0, len(pairs), 28, 28 + 8 * len(pairs), 0, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(head + b"".join(struct.pack(f"{order}2I", *entry) for entry in tables) + texts)


@pytest.fixture
def catalogues(tmp_path):
    """Sentences of three invented languages, which write each word backwards behind their name."""
    for language, number in LANGUAGES.items():
        messages = {b"": b"Content-Type: text/plain; charset=UTF-8\n"}
        for first in NUMBERS[:number]:
            for second in NUMBERS:
                messages[f"{first} {second}".encode()] = f"{language} {first[::-1]} {second[::-1]}".encode()
        write_catalogue(tmp_path / "words" / "locale" / language / "LC_MESSAGES" / "words.mo", messages)
    return tmp_path / "words"


@pytest.mark.parametrize("order", ["<", ">"])
def test_catalogues_of_either_byte_order_with_contexts_and_plurals(example, tmp_path, order):
    messages = {b"menu\x04open": b"auf", b"%d day\0%d days": b"%d Tag\0%d Tage", b"no": b"nein"}
    write_catalogue(tmp_path / "x.mo", messages, order)
    assert set(example.read_catalogue(tmp_path / "x.mo")) == {
        (b"open", b"auf"),
        (b"%d day", b"%d Tag"),
        (b"no", b"nein"),
    }
    (tmp_path / "y.mo").write_bytes(b"no catalogue")
    with pytest.raises(ValueError, match=r"y\.mo is no message catalogue"):
        list(example.read_catalogue(tmp_path / "y.mo"))


def test_a_sentence_is_held_out_in_every_language(example, catalogues):
    training, held_out = example.read_pairs(catalogues)
    assert list(training) == list(held_out) == ["aa", "bb", "cc"]
    assert len(training["aa"]) + len(held_out["aa"]) == 144 and len(training["cc"]) + len(held_out["cc"]) == 36
    learned = {english for pairs in training.values() for english, _ in pairs}
    asked = {english for pairs in held_out.values() for english, _ in pairs}
    assert asked and not asked & learned
    assert list(example.read_pairs(catalogues, 2)[0]) == ["aa", "bb"]


def test_the_temperature_evens_out_languages(example, catalogues):
    training, _ = example.read_pairs(catalogues)
    sizes = torch.tensor([len(pairs) for pairs in training.values()], dtype=torch.float64)
    for temperature in (1.0, 5.0):
        mixture = example.Mixture(training, temperature)
        assert torch.allclose(mixture.shares, sizes ** (1 / temperature) / (sizes ** (1 / temperature)).sum())
    generator, drawn = torch.Generator().manual_seed(0), {}
    for _ in range(600):
        read, _ = mixture.example("translation", generator)
        text = bytes(token for token in read if token < 256)
        drawn[text[:2]] = drawn.get(text[:2], 0) + 1
    into_cc = drawn[b"cc"] / 600  # half of those of this language are read in it
    assert into_cc == pytest.approx(float(mixture.shares[2]) / 2, abs=0.06)  # three standard deviations


def test_examples_ask_for_a_language_and_only_answers_count(example, catalogues):
    mixture = example.Mixture(example.read_pairs(catalogues)[0], 5.0)
    generator = torch.Generator().manual_seed(1)
    for task, first in (("translation", example.TRANSLATE), ("repair", example.REPAIR)):
        read, written = mixture.example(task, generator)
        assert read[0] == first and read[-1] in mixture.tags.values() and written[-1] == example.END
        assert (example.HOLE in read) == (task == "repair")
    tokens, targets = mixture.batch(3, 64, None, generator)
    assert tokens.shape == targets.shape == (3, 64)
    known = targets[:, :-1] >= 0
    assert torch.equal(targets[:, :-1][known], tokens[:, 1:][known])
    ends = (tokens[:, 1:] == example.END) & known
    assert ends.any() and not (targets == example.TRANSLATE).any() and not (targets == example.HOLE).any()


def test_without_django_it_says_where_to_get_catalogues(example, monkeypatch):
    monkeypatch.setattr(example, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"pip install 'trilithon\[examples\]'.*--catalogues"):
        example.installed_catalogues()


def test_it_runs_on_two_ranks(catalogues, tmp_path):
    several = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT))
    sizes = ("--steps", "3", "--rows", "2", "--width", "16", "--layers", "2", "--experts", "2")
    said = run(tmp_path, *several, "--catalogues", str(catalogues), *sizes)
    assert len(re.findall(r"(?:dense|2 experts): 3 steps on 2 ranks.*translation [\d.]+, repair [\d.]+", said)) == 2
    assert re.search(r"[\d]+ sentences in 3 languages besides English", said)


def test_dense_against_experts_at_equal_quality(catalogues, tmp_path):
    out = tmp_path / "rows.jsonl"
    sizes = ("--steps", "4", "--every", "2", "--rows", "2", "--width", "16", "--layers", "2", "--experts", "2")
    command = (str(ROOT / "benchmarks" / "moe_quality.py"), "--catalogues", str(catalogues), *sizes)
    said = run(tmp_path, *command, "--out", str(out), "--held-out-rows", "2", "--patience", "2")
    assert said.count("held_out_nats_per_byte") == 2
    assert '"times_the_processor_seconds"' in said and out.read_text() == said
