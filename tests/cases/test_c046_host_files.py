"""C046: valid host files parse; invalid ones fail with file name, line number and the reason."""

from __future__ import annotations

import pytest

from trilithon.errors import ConfigError
from trilithon.launch import read_host_file


def read(tmp_path, text: str | bytes):
    path = tmp_path / "hosts.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return [(host.name, len(host.slots)) for host in read_host_file(path)]


@pytest.mark.parametrize(
    "text, expected",
    [
        ("worker-1 slots=4\nworker-2 slots=2\n", [("worker-1", 4), ("worker-2", 2)]),
        ("# the rack\nworker-1 slots=4 # left\n#worker-2 slots=4\n", [("worker-1", 4)]),
        ("\n\n  \nworker-1 slots=4\n\n", [("worker-1", 4)]),
        ("worker-1\tslots=4\n\tworker-2 \t slots=1\n", [("worker-1", 4), ("worker-2", 1)]),
        ("worker-1 slots=4   \nworker-2 slots=4\t\n", [("worker-1", 4), ("worker-2", 4)]),
        ("fe80::1 slots=2\n[2001:DB8::0:5] slots=3\n", [("fe80::1", 2), ("2001:db8::5", 3)]),
        ("localhost slots=1", [("localhost", 1)]),
        ("10.0.0.7 slots=8\r\nnode_b.cluster.org slots=8\r\n", [("10.0.0.7", 8), ("node_b.cluster.org", 8)]),
        (b"\xef\xbb\xbfworker-1 slots=4\n", [("worker-1", 4)]),
    ],
    ids=["two", "comments", "blank", "tabs", "trailing", "ipv6", "one", "windows", "bom"],
)
def test_valid_files_parse(tmp_path, text, expected):
    assert read(tmp_path, text) == expected


@pytest.mark.parametrize(
    "text, line, reason",
    [
        ("worker-1 slots=4\n\nworker-1 slots=2\n", 3, "worker-1 is already on line 1"),
        ("fe80::1 slots=1\n[fe80:0::1] slots=1\n", 2, "fe80::1 is already on line 1"),
        ("# one\nworker-1\n", 2, "slots are missing for worker-1"),
        ("worker-1 slots=0\n", 1, "slots=0 gives worker-1 nothing to run"),
        ("worker-1 slots=-2\n", 1, "slots=-2 is not a whole number"),
        ("worker-1 slots=four\n", 1, "slots=four is not a whole number"),
        ("worker-1 slots=\n", 1, "slots= is not a whole number"),
        ("worker-1 slots = 4\n", 1, "unexpected '= 4'"),
        ("worker-1 slot=4\n", 1, "'slot=4' is not slots=N"),
        ("worker-1 4\n", 1, "'4' is not slots=N"),
        ("slots=4\n", 1, "the host name is missing"),
        ("worker-1 slots=4 max_slots=8\n", 1, "unexpected 'max_slots=8'"),
        ("worker-1:22 slots=4\n", 1, "is not an IPv6 address"),
        ("[worker-1] slots=4\n", 1, "is not an IPv6 address"),
        ("work;er slots=4\n", 1, "is not a host name"),
        ("-oProxyCommand=x slots=4\n", 1, "is not a host name"),
        ("worker-1 slots=99999\n", 1, "beyond 1024"),
    ],
)
def test_invalid_lines_are_named_with_the_reason(tmp_path, text, line, reason):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert f"hosts.txt, line {line}: " in str(caught.value)
    assert reason in str(caught.value)


def test_every_fault_of_a_file_is_told_at_once(tmp_path):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, "a slots=0\nb slots=2\nc\n")
    told = str(caught.value).splitlines()
    assert [", line 1: " in told[0], ", line 3: " in told[1], len(told)] == [True, True, 2]


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing here\n"])
def test_a_file_without_hosts_is_refused(tmp_path, text):
    with pytest.raises(ConfigError, match=r"hosts\.txt: names no host"):
        read(tmp_path, text)


def test_missing_unreadable_and_binary_files_are_told_apart(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        read_host_file(tmp_path / "absent.txt")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_host_file(tmp_path)
    with pytest.raises(ConfigError, match=r"not UTF-8 text \(byte 0\)"):
        read(tmp_path, b"\xff\xfe")
