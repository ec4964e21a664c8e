from __future__ import annotations

import pytest

from trilithon.errors import ConfigError
from trilithon.launch import Host, parse_filter, select

HOSTS = [Host("worker-1", (0, 1, 2, 3)), Host("worker-2", (0, 1)), Host("fe80::1", (0,))]


def left(include=None, exclude=None):
    return {host.name: host.slots for host in select(HOSTS, include, exclude)}


def test_filters_read_names_slots_and_several_hosts():
    assert parse_filter("worker-1:0,2@worker-2", "--include") == {"worker-1": (0, 2), "worker-2": None}
    assert parse_filter("[FE80::1]:3,1", "--include") == {"fe80::1": (1, 3)}
    assert parse_filter(" a : 0 , 1 ", "--include") == {"a": (0, 1)}


@pytest.mark.parametrize(
    "text, told",
    [
        ("", "is not NAME"),
        ("a@", "is not NAME"),
        ("a@a:1", "appears twice"),
        ("a:", "is not a slot number"),
        ("a:1,,2", "is not a slot number"),
        ("a:0-3", "is not a slot number"),
        ("a:1,1", "slot 1 appears twice"),
        (":0", "is not NAME"),
        ("a b", "is not NAME"),
    ],
)
def test_malformed_filters_are_refused(text, told):
    with pytest.raises(ConfigError, match=told):
        parse_filter(text, "--include")


def test_include_keeps_what_it_names_in_the_order_of_the_file():
    assert left(include="worker-2@worker-1:3,0") == {"worker-1": (0, 3), "worker-2": (0, 1)}


def test_exclude_drops_what_it_names():
    assert left(exclude="worker-2@worker-1:3") == {"worker-1": (0, 1, 2), "fe80::1": (0,)}
    assert left(exclude="worker-2:0,1") == {"worker-1": (0, 1, 2, 3), "fe80::1": (0,)}


def test_no_filter_keeps_everything():
    assert list(left()) == ["worker-1", "worker-2", "fe80::1"]


@pytest.mark.parametrize(
    "filters, told",
    [
        ({"include": "worker-9"}, "names worker-9, which is not there"),
        ({"include": "worker-2:2"}, "names slot 2 of worker-2"),
        ({"exclude": "worker-1@worker-2@[fe80::1]"}, "leaves no slot"),
        ({"include": "worker-1", "exclude": "worker-2"}, "both given"),
    ],
)
def test_filters_that_do_not_fit_are_refused(filters, told):
    with pytest.raises(ConfigError, match=told):
        left(**filters)
