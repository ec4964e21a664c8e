"""Each compressor says what it promises: bytes known beforehand, an exact remainder, and a bound on what is lost."""

import math

import numpy as np
import pytest
import torch

from trilithon.comm.blockwise import Blockwise
from trilithon.comm.cast import Cast
from trilithon.comm.compressor import Rows
from trilithon.comm.sign import Sign
from trilithon.comm.topk import TopK, largest

COMPRESSORS = {
    "sign l2": Sign("l2"),
    "sign l1": Sign("l1"),
    "sign per chunk": Sign("l2", "chunk"),
    "topk 1 %": TopK(0.01),
    "topk 30 % fp16": TopK(0.3, 2),
    "topk all": TopK(1.0),
    "uniform 8": Blockwise(8),
    "uniform 4": Blockwise(4),
    "uniform 2": Blockwise(2),
    "blockwise 8": Blockwise(8, 64),
    "blockwise 4": Blockwise(4, 100),
    "identity": Cast("identity"),
    "fp16": Cast("fp16"),
    "bf16": Cast("bf16"),
}


def vectors(numel=1024):
    generator = torch.Generator().manual_seed(0)
    gauss = torch.randn(numel, generator=generator)
    sparse = gauss * (torch.rand(numel, generator=generator) < 0.02)
    heavy = torch.where(torch.arange(numel) == 7, 1e4, 0.01 * gauss)
    return {"gauss": gauss, "sparse": sparse, "constant": torch.full((numel,), 0.3), "heavy": heavy}


def encoded(compressor, z, real=None):
    """(payload [bytes], decoded [n], remainder [n]) of one row."""
    left, row = z.clone(), torch.empty(1, compressor.nbytes(z.numel()), dtype=torch.uint8)
    real = z.numel() if real is None else real
    compressor.encode_(left.view(1, -1), row, Rows([real], [real]))
    out = torch.full((z.numel(),), float("nan"))
    compressor.decode(row[0], out)
    return row[0], out, left


@pytest.mark.parametrize("name", COMPRESSORS)
@pytest.mark.parametrize("numel", [8, 1024, 70_000])
def test_what_is_sent_plus_what_is_kept_is_what_was_to_be_sent(name, numel):
    for kind, z in vectors(numel).items():
        payload, out, left = encoded(COMPRESSORS[name], z)
        assert payload.numel() == COMPRESSORS[name].nbytes(numel)
        # one subtraction: exact to the rounding of the larger of the two
        limit = 2.0**-23 * torch.maximum(z.abs(), out.abs())
        assert ((out + left - z).abs() <= limit).all(), kind


@pytest.mark.parametrize("name", COMPRESSORS)
def test_accumulating_adds_and_padding_keeps_nothing(name):
    z = vectors(64)["gauss"]
    z[50:] = 0.0
    payload, out, left = encoded(COMPRESSORS[name], z, real=50)
    assert (left[50:] == 0).all()
    total = torch.ones(64)
    COMPRESSORS[name].decode(payload, total, accumulate=True)
    assert torch.equal(total, 1 + out)


@pytest.mark.parametrize("name", COMPRESSORS)
def test_zeros_come_back_as_zeros(name):
    _, out, left = encoded(COMPRESSORS[name], torch.zeros(64))
    assert not out.any() and not left.any()


def test_bounds_on_what_is_lost():
    for kind, z in vectors(1000).items():
        squares = z.square().sum().item()
        lost = {name: encoded(by, z)[2].double().square().sum().item() for name, by in COMPRESSORS.items()}
        rho = z.abs().sum().item() / math.sqrt(1000 * squares)
        slack = 1e-5 * squares
        assert lost["sign l2"] == pytest.approx(2 * (1 - rho) * squares, rel=1e-4, abs=slack), kind
        assert lost["sign l1"] == pytest.approx((1 - rho**2) * squares, rel=1e-4, abs=slack), kind
        assert lost["topk 1 %"] <= (1 - 0.01) * squares + slack
        assert lost["topk all"] == lost["identity"] == 0.0
        for bits in (8, 4, 2):
            step = (z.max() - z.min()).item() / (2**bits - 1)
            limit = step / 2 + 2.0**-22 * z.abs().max().item()
            assert encoded(COMPRESSORS[f"uniform {bits}"], z)[2].abs().max().item() <= limit, (kind, bits)


def test_the_l2_scale_loses_more_than_there_is_when_few_elements_carry_the_length():
    """Known and intended: the published scale is no contraction here, and the l1 scale always is."""
    z = vectors(1000)["heavy"]
    assert encoded(COMPRESSORS["sign l2"], z)[2].norm() > z.norm()
    assert encoded(COMPRESSORS["sign l1"], z)[2].norm() <= z.norm()


def test_signs_are_packed_as_numpy_packs_them_and_zero_is_positive():
    z = torch.tensor([0.0, -0.0, 1.0, -1.0, -2.0, 3.0, -4.0, 5.0])
    payload, out, _ = encoded(Sign(), z)
    assert payload[0].item() == np.packbits(z.numpy() >= 0)[0]
    assert (out > 0).tolist() == [True, True, True, False, False, True, False, True]


@pytest.mark.parametrize("value", [1e-38, 1e-30, 1e30, 3e38])
def test_scales_survive_tiny_and_huge_values(value):
    for norm in ("l2", "l1"):
        _, out, _ = encoded(Sign(norm), torch.full((16,), value))
        assert out.tolist() == pytest.approx([value] * 16, rel=1e-6)


def test_ties_go_to_the_lower_index():
    z = torch.tensor([1.0, -2.0, 2.0, 0.5, 2.0, -2.0, 0.0, 1.0])
    assert largest(z, 2).tolist() == [1, 2]
    assert largest(z, 5).tolist() == [0, 1, 2, 4, 5]


def test_indices_take_two_bytes_up_to_65536_elements():
    assert TopK(0.5).nbytes(65_536) == 32_768 * (2 + 4)
    assert TopK(0.5).nbytes(65_544) == 32_772 * (4 + 4)
    z = torch.zeros(65_536)
    z[65_535], z[40_000] = 3.0, -1.0
    _, out, _ = encoded(TopK(2 / 65_536), z)
    assert out.nonzero().view(-1).tolist() == [40_000, 65_535]


def test_a_block_of_equal_values_is_exact_and_an_outlier_spoils_only_its_own_block():
    z = torch.cat([torch.full((64,), 0.25), 1e-3 * torch.randn(64), torch.full((64,), 0.5)])
    z[64] = 1e3
    left = encoded(Blockwise(4, 64), z)[2]
    assert not left[:64].any() and not left[128:].any()
    assert encoded(Blockwise(4), z)[2][:64].abs().max() > 0
