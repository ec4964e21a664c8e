import pytest

from trilithon.data import BpeTokenizer, ByteTokenizer, load_tokenizer
from trilithon.data.tokenizer import END
from trilithon.errors import ConfigError, DataError

TEXTS = [
    "",
    "plain words, twice: plain words\n",
    "tabs\tand   spaces\r\n\n  indented",
    "Grüße, 世界, \U0001f600 e\u0301",
    f"a text that spells {END} literally",
    "\x01\x7f",
]
CORPUS = ["def add(first, second):\n    return first + second\n" * 20, "the theory of the thing\n" * 20, *TEXTS]


@pytest.fixture(scope="module")
def bpe() -> BpeTokenizer:
    return BpeTokenizer.train(CORPUS, vocab_size=300)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_decoding_returns_the_text(kind, text, bpe):
    tokenizer = ByteTokenizer() if kind == "bytes" else bpe
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids.tolist()) == text
    assert tokenizer.end not in ids
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


def test_bytes_are_the_bytes():
    assert ByteTokenizer().encode("aé").tolist() == [97, 0xC3, 0xA9]
    assert ByteTokenizer().decode([104, 105, ByteTokenizer.end]) == "hi"


def test_bpe_needs_fewer_tokens_than_bytes(bpe):
    text = CORPUS[0]
    assert len(bpe.encode(text)) < len(text.encode()) / 2
    assert bpe.vocab_size == 300


def test_equal_texts_give_an_equal_vocabulary(bpe):
    assert BpeTokenizer.train(CORPUS, vocab_size=300).to_json() == bpe.to_json()


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_a_saved_tokenizer_encodes_alike(kind, bpe, tmp_path):
    tokenizer = ByteTokenizer() if kind == "bytes" else bpe
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer.to_json())
    again = load_tokenizer(path)
    assert again.kind == kind and again.end == tokenizer.end and again.vocab_size == tokenizer.vocab_size
    for text in TEXTS:
        assert again.encode(text).tolist() == tokenizer.encode(text).tolist()


def test_a_vocabulary_larger_than_the_data_names_what_it_can_be():
    with pytest.raises(DataError, match=r"5000 is larger than the data can fill.* at most (\d+)") as caught:
        BpeTokenizer.train(["abab abab"], vocab_size=5000)
    possible = int(str(caught.value).split("at most ")[1].split(",")[0])
    assert BpeTokenizer.train(["abab abab"], vocab_size=possible).vocab_size == possible


def test_a_vocabulary_below_the_bytes_is_refused():
    with pytest.raises(ConfigError, match="at least 258"):
        BpeTokenizer.train(CORPUS, vocab_size=200)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"other": 1}'])
def test_a_file_that_is_no_tokenizer_is_an_error_that_names_it(tmp_path, content):
    path = tmp_path / "broken.json"
    path.write_text(content)
    with pytest.raises(DataError, match=r"broken\.json"):
        load_tokenizer(path)
