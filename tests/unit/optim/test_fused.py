"""One vector for many parameters: its order, its gaps, and what a checkpoint's residuals become in it."""

import pytest
import torch

from trilithon.comm.collectives import Group
from trilithon.comm.compressed import CompressedAllReduce, conserved, padded_numel
from trilithon.comm.sign import Sign
from trilithon.contracts import Shard, Slice
from trilithon.errors import CheckpointError
from trilithon.kernels import adam_step, preconditioned_step
from trilithon.optim.fused import Fused
from trilithon.optim.residuals import SavedResiduals

SHAPES = {"b": torch.Size([3]), "a": torch.Size([2, 2]), "none": torch.Size([0]), "c": torch.Size([5])}
CPU = torch.device("cpu")


def test_the_order_is_that_of_the_names_and_empty_parameters_are_left_out():
    fused = Fused(SHAPES, ["b", "a", "none"], 16, CPU)
    assert fused.names == ["a", "b"] and fused.numel == 7 and fused.flat.numel() == 16
    fused.view("b").fill_(1.0)
    assert fused.flat.tolist() == [0.0] * 4 + [1.0] * 3 + [0.0] * 9
    assert fused.indices({"b", "c"}).tolist() == [4, 5, 6] and fused.indices({"c"}) is None
    assert fused.layout() == [("a", 4), ("b", 3)] and "c" not in fused


def test_pieces_of_a_slice_are_views_of_the_vector():
    fused = Fused(SHAPES, ["a", "b"], 16, CPU)
    shards = [Shard("a", 2, 2, 0, SHAPES["a"]), Shard("c", 0, 5, 8, SHAPES["c"]), Shard("b", 0, 1, 16, SHAPES["b"])]
    slice_ = Slice("key", 0, torch.zeros(24), torch.zeros(24), None, shards)
    for number, (shard, here) in enumerate(fused.pieces(slice_), start=1):
        assert here.numel() == shard.numel
        here.fill_(number)
    assert fused.flat[:7].tolist() == [0, 0, 1, 1, 2, 0, 0]


@pytest.mark.parametrize("sizes", [(4, 2), (2, 4), (3, 3)])
def test_folding_conserves_the_sum_and_needs_no_order_of_calls(sizes):
    numel = 203
    padded = padded_numel(numel, sizes[0])
    residuals = [torch.randn(padded) for _ in range(sizes[0])]
    servers = list(torch.randn(padded).chunk(sizes[0]))
    before = conserved(residuals, servers, numel)
    ranks = [{"residual": e, "server_residual": s} for e, s in zip(residuals, servers, strict=True)]
    states = []
    for rank in range(sizes[1]):
        saved = SavedResiduals()
        for name in ("server_residual", "residual"):
            saved.take({}, [{name: one[name]} for one in ranks], numel)
        states.append(saved.pending(numel, rank, sizes[1]))
    after = conserved([s["residual"] for s in states], [s["server_residual"] for s in states], numel)
    assert torch.allclose(after, before, atol=1e-6)
    assert len({s["server_residual"].numel() for s in states}) == 1


def test_a_single_rank_gets_all_of_it_to_send():
    saved = SavedResiduals()
    saved.take({}, [{"residual": torch.ones(16), "server_residual": torch.full((8,), 2.0)}] * 2, 10)
    alone = CompressedAllReduce(Group(None, name="alone"), 10, Sign())
    assert saved.hand_over(alone, 0).tolist() == [3.0] * 10
    assert saved.hand_over(alone, 0) is None


def test_too_few_elements_are_refused():
    with pytest.raises(CheckpointError, match="cover 6 elements, and the model has 10 trainable ones"):
        SavedResiduals().take({}, [{"residual": torch.ones(6)}], 10)


@pytest.mark.parametrize("low", [None, torch.bfloat16])
@pytest.mark.parametrize("kernels", ["torch", "numba"])
def test_a_step_along_a_known_momentum_ends_where_adam_would(low, kernels, monkeypatch):
    """Adam whose gradient is its own momentum leaves momentum as it is; with beta2 near one, the variance too."""
    monkeypatch.setenv("TRILITHON_KERNELS", kernels)
    p, m, v = torch.randn(70_001), torch.randn(70_001), torch.rand(70_001)
    copies = [None if low is None else torch.zeros(70_001, dtype=low) for _ in range(2)]
    one, two, variance = p.clone(), p.clone(), v.clone()
    adam_step(one, m, m.clone(), variance, copies[0], lr=0.01, betas=(0.9, 0.5), eps=1e-8, weight_decay=0.1, step=3)
    scalars = {"keep": 1 - 0.01 * 0.1, "step_size": 0.01 / (1 - 0.9**3), "inv_sqrt_c2": (1 - 0.5**3) ** -0.5}
    preconditioned_step(two, m, variance, copies[1], eps=1e-8, **scalars)
    assert torch.equal(one, two)
    assert low is None or torch.equal(copies[0], copies[1])
