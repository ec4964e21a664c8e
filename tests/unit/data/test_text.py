import errno
import json
import os
import shutil
import threading
import time
from collections import Counter
from math import log
from pathlib import Path

import numpy as np
import pytest

from trilithon.data import ByteTokenizer, TextCorpus, TokenBlocks, prepare_text, text, token_cache
from trilithon.data.token_cache import CacheBuild, TokenWriter, read_manifest, token_dtype, unigram_entropy
from trilithon.errors import ConfigError, DataError

END = ByteTokenizer.end


@pytest.fixture
def source(tmp_path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number:02}.txt").write_text(f"file {number} says hello\n" * (5 + number % 3))
    return folder


def documents(ids: np.ndarray) -> list[bytes]:
    """The texts between ends; what follows the last end must be nothing."""
    parts, current = [], []
    for i in ids.tolist():
        if i == END:
            parts.append(bytes(current))
            current = []
        else:
            current.append(i)
    assert not current
    return parts


def test_every_file_is_in_exactly_one_side_and_whole(source, tmp_path):
    corpus = TextCorpus.open(prepare_text([source], cache=tmp_path / "cache", held_out=0.1))
    train, kept = documents(corpus.train), documents(corpus.held_out)
    assert sorted(train + kept) == sorted(path.read_bytes() for path in source.iterdir())
    assert len(kept) == 4
    assert corpus.manifest.split == "files"
    assert corpus.manifest.train_bytes == sum(map(len, train)) and corpus.manifest.train_tokens == len(corpus.train)
    assert corpus.manifest.held_out_bytes == sum(map(len, kept))


def test_few_files_give_their_tails(tmp_path):
    content = "0123456789" * 10 + "\u20ac" * 100
    (tmp_path / "one").write_text(content)
    corpus = TextCorpus.open(prepare_text([tmp_path / "one"], cache=tmp_path / "cache", held_out=0.25))
    (head,), (tail,) = documents(corpus.train), documents(corpus.held_out)
    assert (head + tail).decode() == content
    head.decode(), tail.decode()  # no character is cut
    assert 298 <= len(head) <= 300  # three quarters of 400 bytes, less a cut character of three


def test_a_second_run_reuses_the_tokens(source, tmp_path, monkeypatch):
    first = prepare_text([source], cache=tmp_path / "cache")
    monkeypatch.setattr(text, "_build", lambda *_: pytest.fail("built again"))
    assert prepare_text([source], cache=tmp_path / "cache") == first


@pytest.mark.parametrize("change", ["content", "name", "held_out", "max_tokens"])
def test_whatever_changes_the_tokens_changes_the_key(source, tmp_path, change):
    options = {"cache": tmp_path / "cache"}
    first = prepare_text([source], **options)
    if change == "content":
        (source / "00.txt").write_text((source / "00.txt").read_text().replace("hello", "hullo"))
    elif change == "name":
        (source / "00.txt").rename(source / "zz.txt")
    else:
        options[change] = {"held_out": 0.2, "max_tokens": 500}[change]
    assert prepare_text([source], **options) != first


def test_two_builds_are_equal_bit_for_bit_wherever_the_folder_lies(source, tmp_path):
    moved = tmp_path / "elsewhere" / "moved"
    shutil.copytree(source, moved)
    first = prepare_text([source], cache=tmp_path / "one", tokenizer="bpe", vocab_size=280)
    second = prepare_text([moved], cache=tmp_path / "two", tokenizer="bpe", vocab_size=280)
    files = sorted(path.name for path in first.parent.iterdir())
    assert files == sorted(path.name for path in second.parent.iterdir()) and len(files) == 4
    for name in files:
        assert (first.parent / name).read_bytes() == (second.parent / name).read_bytes()


def test_bpe_tokens_decode_to_the_files(source, tmp_path):
    corpus = TextCorpus.open(prepare_text([source], cache=tmp_path / "cache", tokenizer="bpe", vocab_size=280))
    assert corpus.manifest.vocab_size == 280
    ids = corpus.train.tolist()
    first = corpus.tokenizer.decode(ids[: ids.index(corpus.tokenizer.end)])
    assert first.encode() in {path.read_bytes() for path in source.iterdir()}


def test_a_limit_stops_at_exactly_that_many_tokens(source, tmp_path):
    whole = TextCorpus.open(prepare_text([source], cache=tmp_path / "cache"))
    limited = TextCorpus.open(prepare_text([source], cache=tmp_path / "cache", max_tokens=1000))
    assert len(limited.train) == 1000 and len(limited.held_out) == 50
    assert limited.train.tolist() == whole.train[:1000].tolist()
    ends = sum(1 for i in limited.train.tolist() if i == END)
    assert limited.manifest.train_bytes == 1000 - ends


def test_the_entropy_is_that_of_the_training_tokens(source, tmp_path):
    corpus = TextCorpus.open(prepare_text([source], cache=tmp_path / "cache"))
    counts = Counter(corpus.train.tolist())
    total = sum(counts.values())
    reference = -sum(n / total * log(n / total) for n in counts.values())
    assert corpus.manifest.unigram_entropy == pytest.approx(reference, rel=1e-12)


def test_the_entropy_of_equal_shares_is_the_log_of_their_number():
    assert unigram_entropy(np.array([3, 0, 3, 3, 3])) == pytest.approx(log(4), rel=1e-12)
    assert unigram_entropy(np.array([7, 0])) == 0.0


def test_ids_take_two_bytes_while_they_fit():
    assert token_dtype(1 << 16).itemsize == 2 and token_dtype((1 << 16) + 1).itemsize == 4


def test_a_build_that_dies_leaves_nothing(source, tmp_path, monkeypatch):
    def die(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(text, "_tokenise", die)
    with pytest.raises(KeyboardInterrupt):
        prepare_text([source], cache=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_full_disk_says_how_many_bytes_are_needed_and_leaves_nothing(source, tmp_path, monkeypatch):
    def full(self, ids):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(TokenWriter, "write", full)
    size = sum(path.stat().st_size for path in source.iterdir())
    with pytest.raises(DataError, match=rf"full: the token cache needs up to {2 * (size + 2 * 40):,} bytes"):
        prepare_text([source], cache=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_disk_that_is_full_only_at_the_rename_leaves_no_manifest(source, tmp_path, monkeypatch):
    def full(self, target):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(DataError, match="is full"):
        prepare_text([source], cache=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cache_folder_that_cannot_be_made_is_named(source, tmp_path):
    (tmp_path / "cache").write_text("a file, not a folder")
    with pytest.raises(DataError, match=r"cannot be written to .*cache.*another cache folder"):
        prepare_text([source], cache=tmp_path / "cache")


def test_a_cut_token_file_is_noticed_and_built_again(source, tmp_path):
    manifest = prepare_text([source], cache=tmp_path / "cache")
    entry = read_manifest(manifest)
    whole = entry.train_file(manifest.parent).read_bytes()
    entry.train_file(manifest.parent).write_bytes(whole[:-2])
    with pytest.raises(DataError, match=rf"has {len(whole) - 2} bytes where its manifest says {len(whole)}"):
        TextCorpus.open(manifest)
    assert prepare_text([source], cache=tmp_path / "cache") == manifest
    assert entry.train_file(manifest.parent).read_bytes() == whole


@pytest.mark.parametrize("content", ["", "{}", '{"format": 99}', '{"format": 1, "key": "x"}'])
def test_a_damaged_manifest_is_named(tmp_path, content):
    (tmp_path / "k.json").write_text(content)
    with pytest.raises(DataError, match=r"k\.json is damaged"):
        read_manifest(tmp_path / "k.json")


def test_another_process_is_waited_for_and_not_for_ever(source, tmp_path):
    manifest = prepare_text([source], cache=tmp_path / "cache")
    hidden = manifest.rename(manifest.with_suffix(".hidden"))
    started = time.monotonic()
    with pytest.raises(DataError, match=r"after waiting 0\.2 s"):
        TextCorpus.open(manifest, wait_s=0.2)
    assert 0.2 <= time.monotonic() - started < 20
    writer = threading.Timer(0.2, hidden.rename, [manifest])
    writer.start()
    try:
        assert len(TextCorpus.open(manifest, wait_s=10).train) > 0
    finally:
        writer.join()


def test_the_manifest_appears_after_the_tokens(source, tmp_path, monkeypatch):
    order = []
    plain = Path.replace
    monkeypatch.setattr(Path, "replace", lambda self, target: (order.append(Path(target).name), plain(self, target)))
    prepare_text([source], cache=tmp_path / "cache")
    assert len(order) == 4 and order[-1].count(".") == 1 and order[-1].endswith(".json")


def test_a_manifest_is_plain_json(source, tmp_path):
    content = json.loads(prepare_text([source], cache=tmp_path / "cache").read_text())
    assert content["num_files"] == 40 and content["dtype"] == "uint16" and content["format"] == token_cache.FORMAT


def test_building_twice_at_once_is_harmless(source, tmp_path):
    cache = tmp_path / "cache"
    with token_cache.building(cache, "key", 0) as one, token_cache.building(cache, "other", 0) as two:
        for build in (one, two):
            with build.open(cache / f"{id(build)}.bin") as stream:
                stream.write(b"x")
        assert isinstance(one, CacheBuild)
    assert list(cache.iterdir()) == []


def test_blocks_are_the_stream_and_its_next_tokens():
    tokens = np.arange(23, dtype=np.uint16)
    blocks = TokenBlocks(tokens, context=5)
    assert len(blocks) == 4
    inputs, targets = zip(*(blocks[i] for i in range(len(blocks))))
    assert [t for block in inputs for t in block.tolist()] == list(range(20))
    assert [t for block in targets for t in block.tolist()] == list(range(1, 21))
    with pytest.raises(IndexError):
        blocks[4]


def test_too_few_tokens_for_a_block_name_the_context_that_fits():
    with pytest.raises(DataError, match=r"5 tokens do not fill one block of context 5 .*at most 4"):
        TokenBlocks(np.arange(5), context=5)
    assert len(TokenBlocks(np.arange(5), context=4)) == 1


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"held_out": 0.0}, ConfigError, "held_out=0.0"),
        ({"vocab_size": 1000}, ConfigError, "no meaning for the tokenizer 'bytes'"),
        ({"tokenizer": "bpe"}, ConfigError, "needs a vocabulary size"),
        ({"tokenizer": "bpe", "vocab_size": 100_000}, DataError, "larger than the data can fill"),
    ],
)
def test_settings_that_cannot_be_met_are_refused(source, tmp_path, options, error, words):
    with pytest.raises(error, match=words):
        prepare_text([source], cache=tmp_path / "cache", **options)


def test_one_character_cannot_be_split(tmp_path):
    (tmp_path / "one").write_text("x")
    with pytest.raises(DataError, match="too little"):
        prepare_text([tmp_path / "one"], cache=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
