import errno
from pathlib import Path

import pytest

from trilithon.data import find_text_files
from trilithon.errors import DataError


def write(folder: Path, **contents: str | bytes) -> None:
    for name, content in contents.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def names(found) -> set[str]:
    return {file.name for file in found.files}


def test_files_folders_and_patterns_are_found_once_each(tmp_path):
    write(tmp_path, a_dot_txt="a", sub__b_dot_py="b", sub__c_dot_txt="c")
    found = find_text_files([tmp_path, tmp_path / "a.txt", f"{tmp_path}/**/*.py", tmp_path / "sub"])
    assert sorted(file.path.name for file in found.files) == ["a.txt", "b.py", "c.txt"]


def test_suffixes_choose_inside_folders_and_not_among_named_files(tmp_path):
    write(tmp_path, a_dot_txt="a", b_dot_py="b", sub__c_dot_py="c")
    assert names(find_text_files([tmp_path], suffixes=["py"])) == {"b.py", "sub/c.py"}
    assert names(find_text_files([tmp_path / "a.txt"], suffixes=[".py"])) == {"a.txt"}


def test_hidden_and_excluded_folders_are_not_entered(tmp_path):
    write(tmp_path, keep__a="a")
    for folder in (".git", "__pycache__", "site-packages"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "b").write_text("b")
    assert names(find_text_files([tmp_path])) == {"keep/a"}


def test_order_depends_on_names_under_the_root_only(tmp_path):
    for root in ("one", "two/deeper"):
        for number in range(30):
            write(tmp_path / root, **{f"f{number}": f"text {number}"})
    first = [file.name for file in find_text_files([tmp_path / "one"]).files]
    assert first == [file.name for file in find_text_files([tmp_path / "two" / "deeper"]).files]
    assert first != sorted(first)


def test_binary_undecodable_and_empty_files_are_reported(tmp_path):
    write(tmp_path, good="text", nul=b"a\0b", latin="caf\xe9".encode("latin-1"), empty="", cut="\u20ac".encode()[:2])
    found = find_text_files([tmp_path])
    assert names(found) == {"good"}
    reasons = {file.path.name: file.reason for file in found.skipped}
    assert "NUL" in reasons["nul"] and "UTF-8" in reasons["latin"] and reasons["empty"] == "empty"
    assert "UTF-8" in reasons["cut"], "a character cut off at the end of the file is not text either"


def test_a_character_across_two_reads_is_text(tmp_path):
    (tmp_path / "f").write_bytes(b"x" * ((1 << 20) - 1) + "\u20ac\n".encode())
    (file,) = find_text_files([tmp_path]).files
    assert "".join(file.pieces()).endswith("x\u20ac\n")


def test_pieces_keep_every_character_of_the_file(tmp_path):
    text = "one\r\ntwo\rthree\n" * 150_000
    (tmp_path / "f").write_bytes(text.encode())
    (file,) = find_text_files([tmp_path]).files
    pieces = list(file.pieces())
    assert "".join(pieces) == text and len(pieces) > 1


def test_an_unreadable_file_is_reported(tmp_path, monkeypatch):
    write(tmp_path, good="text", secret="x")
    plain = Path.open

    def refuse(self, *args, **kwargs):
        if self.name == "secret":
            raise PermissionError(errno.EACCES, "Permission denied")
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    found = find_text_files([tmp_path])
    assert names(found) == {"good"} and found.skipped[0].reason == "unreadable (Permission denied)"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: [folder / "absent"], "absent does not exist"),
        (lambda folder: [f"{folder}/*.absent"], "matches no file"),
        (lambda folder: [folder], "No file under"),
        (lambda folder: [], "at least one file"),
    ],
)
def test_paths_without_data_are_an_error_that_names_them(tmp_path, make, words):
    with pytest.raises(DataError, match=words):
        find_text_files(make(tmp_path))


def test_a_folder_of_binaries_says_why_none_can_be_used(tmp_path):
    write(tmp_path, a=b"\0", b=b"\xff\xff")
    with pytest.raises(DataError, match=r"2 files were found and none can be used .*NUL"):
        find_text_files([tmp_path])


def test_suffixes_that_match_nothing_are_named(tmp_path):
    write(tmp_path, a_dot_txt="a")
    with pytest.raises(DataError, match=r"No file ending in \.py"):
        find_text_files([tmp_path], suffixes=[".py"])
