import pytest
import torch
import torch.distributed as dist

from trilithon.comm.mesh import Axes, axes_of, init_distributed, make_mesh, own_process_group
from trilithon.errors import ConfigError

CUBE = Axes(("pipe", "data", "tensor"), (2, 3, 2))


def test_coordinates_count_with_the_last_axis_fastest():
    expected = [(p, d, t) for p in range(2) for d in range(3) for t in range(2)]
    assert [tuple(CUBE.coordinates(rank).values()) for rank in range(12)] == expected


def test_rank_is_the_inverse_of_coordinates():
    assert [CUBE.rank(CUBE.coordinates(rank)) for rank in range(12)] == list(range(12))


@pytest.mark.parametrize("axis", ["pipe", "data", "tensor"])
def test_the_groups_of_an_axis_cut_the_ranks_and_differ_on_that_axis_only(axis):
    groups = CUBE.groups(axis)
    assert sorted(rank for group in groups for rank in group) == list(range(12))
    for group in groups:
        places = [CUBE.coordinates(rank) for rank in group]
        assert [place.pop(axis) for place in places] == list(range(len(group)))
        assert all(place == places[0] for place in places)
        assert all(CUBE.group_of(axis, rank) == group for rank in group)


def test_groups_by_hand():
    assert CUBE.groups("tensor")[:2] == [(0, 1), (2, 3)]
    assert CUBE.groups("data")[:2] == [(0, 2, 4), (1, 3, 5)]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: CUBE.coordinates(12), "rank 12 is outside a mesh of 12 ranks pipe=2 x data=3 x tensor=2"),
        (lambda: CUBE.groups("expert"), "no axis 'expert'"),
        (lambda: CUBE.rank({"pipe": 0, "data": 0}), "do not name exactly the axes"),
        (lambda: CUBE.rank({"pipe": 0, "data": 3, "tensor": 0}), "data=3 is outside axis data of size 3"),
        (lambda: Axes(("a", "a"), (1, 2)), "one size for each distinct name"),
        (lambda: Axes(("a",), (0,)), "at least 1"),
    ],
)
def test_wrong_places_are_refused_with_the_values(call, words):
    with pytest.raises(ConfigError, match=words):
        call()


@pytest.fixture
def environment(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_a_plain_process_needs_no_process_group(environment):
    environment.setenv("MASTER_PORT", "29500")  # left over in a shell profile: says nothing about several processes
    assert init_distributed() is False
    assert make_mesh() is None
    assert own_process_group(None) is None


def test_a_plain_process_may_have_a_group_of_its_own(environment):
    assert init_distributed(alone=True) is True
    try:
        assert dist.get_world_size() == 1
        dist.all_reduce(value := torch.ones(2))
        assert value.tolist() == [1.0, 1.0]
    finally:
        dist.destroy_process_group()


def test_a_half_set_environment_names_what_is_missing_and_how_to_start(environment):
    environment.setenv("RANK", "1")
    environment.setenv("MASTER_ADDR", "host")
    with pytest.raises(ConfigError, match=r"RANK=1, MASTER_ADDR=host, but WORLD_SIZE, MASTER_PORT missing.*torchrun"):
        init_distributed()


@pytest.mark.parametrize(
    ("rank", "world_size", "words"), [("2", "2", "RANK=2 does not fit WORLD_SIZE=2"), ("x", "2", "RANK='x'")]
)
def test_contradicting_values_are_refused(environment, rank, world_size, words):
    for name, value in {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "h", "MASTER_PORT": "1"}.items():
        environment.setenv(name, value)
    with pytest.raises(ConfigError, match=words):
        init_distributed()
    assert not dist.is_initialized()


def test_a_mesh_that_does_not_span_the_world_says_what_would():
    with pytest.raises(ConfigError, match=r"data=2 x tensor=2 has 4 ranks, but 1 are running. Start 4 processes"):
        make_mesh({"data": 2, "tensor": 2})


def test_a_plain_process_is_one_data_parallel_rank():
    assert axes_of(None) == Axes(("data",), (1,))


def test_ranks_are_found_by_some_of_their_coordinates():
    axes = Axes(("pipe", "data", "tensor"), (2, 2, 2))
    assert axes.ranks_at({"pipe": 0, "tensor": 1}) == [1, 3] and axes.ranks_at({"data": 0}) == [0, 1, 4, 5]
    assert axes.ranks_at({}) == list(range(8)) and axes.ranks_at({"data": 2}) == []
    with pytest.raises(ConfigError, match="no axis 'sequence'"):
        axes.ranks_at({"sequence": 0})
