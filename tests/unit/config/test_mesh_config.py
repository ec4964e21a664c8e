"""The mesh of a configuration: sizes that fit the ranks, groups over several axes, and how it is drawn."""

from __future__ import annotations

import itertools

import pytest

from trilithon.config import Config, MeshConfig
from trilithon.config.mesh import AXES, REPLICAS, Axes, draw
from trilithon.errors import ConfigError


def test_the_rank_follows_the_formula_of_the_docstring():
    sizes = {"pipe": 2, "data": 3, "sequence": 2, "tensor": 4}
    axes = MeshConfig(pipe=2, sequence=2, tensor=4).axes(48)
    assert dict(zip(axes.names, axes.sizes)) == sizes
    for p, d, q, t in itertools.product(*(range(size) for size in sizes.values())):
        assert axes.rank(dict(zip(AXES, (p, d, q, t)))) == ((p * 3 + d) * 2 + q) * 4 + t


def test_groups_over_two_axes_hold_the_ranks_that_differ_on_those_only():
    axes = Axes(AXES, (2, 2, 2, 2))
    for rank in range(16):
        here = axes.coordinates(rank)
        expected = tuple(
            other
            for other in range(16)
            if all(axes.coordinates(other)[name] == here[name] for name in AXES if name not in REPLICAS)
        )
        group = axes.group_of(REPLICAS, rank)
        assert group == expected
        assert group[axes.index(REPLICAS, rank)] == rank
        assert axes.size(REPLICAS) == len(group)
    assert sorted(rank for group in axes.groups(REPLICAS) for rank in group) == list(range(16))


@pytest.mark.parametrize(
    ("mesh", "ranks", "words"),
    [
        (MeshConfig(tensor=4), 6, r"mesh.tensor=4 does not divide 6 ranks.*Start 4 or 8 ranks"),
        (MeshConfig(tensor=4), 2, r"Start 4 ranks"),
        (MeshConfig(data=3, tensor=2), 4, r"has 6 ranks, but 4 are running"),
        (MeshConfig(pipe=2, data=1), 4, r"has 2 ranks, but 4 are running"),
    ],
)
def test_a_mesh_that_does_not_fit_says_what_would(mesh, ranks, words):
    with pytest.raises(ConfigError, match=words):
        mesh.axes(ranks)


def test_the_drawing_names_every_rank_and_every_group():
    text = draw(MeshConfig(pipe=2, tensor=2).axes(8))
    assert "8 ranks = 2 pipe x 2 data x 1 sequence x 2 tensor" in text
    assert "   5     1     0         0       1" in text.splitlines()
    assert "groups of pipe                    [0, 4] [1, 5] [2, 6] [3, 7]" in text
    assert "groups of sequence                each rank by itself" in text
    assert len(draw(MeshConfig(tensor=8).axes(1024)).splitlines()) < 80


def test_settings_of_tensor_slices_without_slices_are_noted():
    config = Config.load({"tensor": {"cut_norms": True, "plan": {"*.up": "column"}}})
    assert [note for note in config.notes if "mesh.tensor is 1" in note]
    assert not Config.load({"mesh": {"tensor": 2}, "tensor": {"cut_norms": True}}).notes
