"""The compressed all-reduce on real ranks: what is conserved, what is equal, what is sent.

Every rank can build every rank's input, so a plain float version of the two phases stands beside the packed one.
"""

import pytest
import torch
import torch.distributed as dist

from trilithon.comm.blockwise import Blockwise
from trilithon.comm.cast import Cast
from trilithon.comm.collectives import Group
from trilithon.comm.compressed import CompressedAllReduce, conserved, padded_numel
from trilithon.comm.ledger import Ledger
from trilithon.comm.sign import Sign
from trilithon.comm.topk import TopK
from trilithon.contracts import Tag
from trilithon.testing import ranks

TAG = Tag("momentum", step=1)
COMPRESSORS = {
    "sign": Sign(),
    "sign l1 per chunk": Sign("l1", "chunk"),
    "topk": TopK(0.05),
    "uniform 4": Blockwise(4),
    "blockwise 8": Blockwise(8, 256),
    "bf16": Cast("bf16"),
}


def data_group():
    return Group(dist.group.WORLD, name="data", ledger=Ledger())


def inputs(numel, padded, world_size, step):
    generator = torch.Generator().manual_seed(step)
    values = torch.zeros(world_size, padded)
    values[:, :numel] = torch.randn(world_size, numel, generator=generator)
    return values


def sign_of(z, count):
    """(C(z), what is left) by the plain formula."""
    scale = (z.double().square().sum() / count).sqrt().float() if count else torch.tensor(0.0)
    sent = torch.where(z >= 0, scale, -scale)
    return sent, z - sent


class PlainOneBit:
    """The two phases in floats on all ranks at once: sign and root-mean-square scale, one scale per rank and chunk."""

    def __init__(self, numel, world_size):
        self.numel, self.size = numel, world_size
        self.padded = padded_numel(numel, world_size)
        self.residuals, self.server = torch.zeros(world_size, self.padded), torch.zeros(self.padded)

    def __call__(self, us):
        chunk, out = self.padded // self.size, torch.zeros(self.padded)
        real = (torch.arange(self.padded) < self.numel).float()
        sent = torch.empty_like(us)
        for rank in range(self.size):
            sent[rank], self.residuals[rank] = sign_of(self.residuals[rank] + us[rank], self.numel)
            self.residuals[rank] *= real
        mean = sent[0].clone()
        for rank in range(1, self.size):
            mean += sent[rank]
        y = (mean / self.size + self.server) * real
        for j in range(self.size):
            part = slice(j * chunk, (j + 1) * chunk)
            out[part], self.server[part] = sign_of(y[part], int(real[part].sum()))
        self.server *= real
        return out[: self.numel]


def run(reduce, group, us):
    u = us[group.rank].clone()
    reduce(u, TAG)
    assert not u[reduce.numel :].any()
    return u[: reduce.numel]


def gather(group, tensor):
    full = torch.empty(group.world_size * tensor.numel())
    group.all_gather(full, tensor, TAG).wait()
    return list(full.view(group.world_size, -1))


@ranks(2, 3, 4)
def test_it_equals_the_plain_version_bit_for_bit_on_all_ranks(world_size):
    group = data_group()
    for numel in (1, 7, 64, 1003, 100_001):
        reduce, plain = CompressedAllReduce(group, numel, Sign()), PlainOneBit(numel, world_size)
        for step in range(5):
            us = inputs(numel, reduce.padded, world_size, step)
            out, expected = run(reduce, group, us), plain(us)
            assert torch.equal(out, expected)
            assert torch.equal(reduce.residual, plain.residuals[group.rank])
            mine = slice(group.rank * reduce.chunk, (group.rank + 1) * reduce.chunk)
            assert torch.equal(reduce.server_residual, plain.server[mine])


@ranks(2, 3, 4)
@pytest.mark.parametrize("name", COMPRESSORS)
def test_what_is_sent_and_kept_is_what_was_to_be_sent(world_size, name):
    """mean(u + e) + E before is out + mean(e) + E after, at every step; summed over steps, what was sent is right."""
    group, numel = data_group(), 1003
    reduce = CompressedAllReduce(group, numel, COMPRESSORS[name])
    total_in, total_out, largest = torch.zeros(numel), torch.zeros(numel), 1.0
    before = torch.zeros(numel)
    for step in range(30):
        us = inputs(numel, reduce.padded, world_size, step)
        out = run(reduce, group, us)
        after = conserved(gather(group, reduce.residual), gather(group, reduce.server_residual), numel)
        largest = max(largest, float(reduce.residual.abs().max()), float(out.abs().max()))
        mean = us[:, :numel].mean(0)
        # worker: one addition and one subtraction of values below `largest`; server: as many, and world_size sums
        limit = (6 + world_size) * 2.0**-24 * 4 * largest
        assert (before + mean - out - after).abs().max() <= limit
        total_in, total_out, before = total_in + mean, total_out + out, after
    assert (total_in - total_out - after).abs().max() <= 30 * limit + 30 * 2.0**-22 * total_in.abs().max()
    outs = gather(group, out.contiguous())
    assert all(torch.equal(one, outs[0]) for one in outs)


@ranks(3)
def test_without_error_feedback_sums_are_wrong(world_size):
    group = data_group()
    good, bad = CompressedAllReduce(group, 999, Sign()), CompressedAllReduce(group, 999, Sign(), error_feedback=False)
    us = inputs(999, good.padded, world_size, 0)
    mean = us[:, :999].mean(0)
    apart = {}
    for name, reduce in (("good", good), ("bad", bad)):
        total = sum(run(reduce, group, us) for _ in range(50))
        apart[name] = float((total / 50 - mean).norm() / mean.norm())
    assert apart["good"] < 0.1
    assert apart["bad"] > 0.5
    assert not bad.residual.any()


@ranks(2, 4)
@pytest.mark.parametrize("name", ["sign", "topk", "uniform 4"])
def test_bytes_are_those_of_the_formula(world_size, name):
    group, numel = data_group(), 100_003
    reduce = CompressedAllReduce(group, numel, COMPRESSORS[name])
    with group.ledger.measure() as sent:
        run(reduce, group, inputs(numel, reduce.padded, world_size, 0))
    assert sent.calls == 2
    assert sent.total_bytes == sent.all_to_all_bytes + sent.all_gather_bytes == reduce.sent_bytes()
    if name == "sign":
        padded = -(-numel // (8 * world_size)) * 8 * world_size
        exact = 2 * (world_size - 1) * padded // (8 * world_size) + 8 * (world_size - 1)
        assert sent.total_bytes == exact
        assert 4 * 2 * (world_size - 1) / world_size * numel / exact > 31.9  # against an fp32 ring


@ranks(3)
@pytest.mark.parametrize("name", COMPRESSORS)
def test_zero_vectors_stay_zero_and_nothing_divides(world_size, name):
    group = data_group()
    reduce = CompressedAllReduce(group, 50, COMPRESSORS[name])
    assert not run(reduce, group, torch.zeros(world_size, reduce.padded)).any()
    assert not reduce.residual.any() and not reduce.server_residual.any()
    nothing = CompressedAllReduce(group, 0, COMPRESSORS[name])
    nothing(torch.zeros(0), TAG)


@ranks(3)
@pytest.mark.parametrize("name", COMPRESSORS)
def test_inactive_elements_keep_their_residuals_and_do_not_change_the_rest(world_size, name):
    group, numel = data_group(), 203
    reduce = CompressedAllReduce(group, numel, COMPRESSORS[name])
    run(reduce, group, inputs(numel, reduce.padded, world_size, 0))
    inactive = torch.tensor([0, 5, 6, 7, 100, 101, 202])
    kept, server = reduce.residual.clone(), gather(group, reduce.server_residual)
    u = inputs(numel, reduce.padded, world_size, 1)[group.rank].clone()
    reduce(u, TAG, inactive)
    assert not u[inactive].any() and u.any()
    assert torch.equal(reduce.residual[inactive], kept[inactive])
    assert torch.equal(torch.cat(gather(group, reduce.server_residual))[inactive], torch.cat(server)[inactive])
    assert not torch.equal(reduce.residual, kept)
    outs = gather(group, u)
    assert all(torch.equal(one, outs[0]) for one in outs)


@ranks(2)
def test_masked_elements_stay_out_of_the_scale(world_size):
    group = data_group()
    reduce = CompressedAllReduce(group, 64, Sign())
    u = torch.ones(64)
    u[32:] = 1e6
    reduce(u, TAG, torch.arange(32, 64))
    assert torch.equal(u[:32], torch.ones(32))


@ranks(1)
def test_a_group_of_one_keeps_no_residual_and_changes_nothing(world_size):
    for group in (data_group(), Group(None, name="alone")):
        reduce = CompressedAllReduce(group, 10, Sign())
        u = torch.randn(16)
        before = u.clone()
        reduce(u, TAG)
        assert torch.equal(u, before) and reduce.bytes() == 0 and reduce.sent_bytes() == 0
        reduce(u, TAG, torch.tensor([3]))
        assert u[3] == 0


@ranks(2, 3)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_all_to_all_brings_every_rank_its_slices(world_size, dtype):
    group = data_group()
    full = (100 * group.rank + torch.arange(world_size * 5)).to(dtype)
    out = torch.zeros_like(full)
    with group.ledger.measure() as sent:
        group.all_to_all(out, full, TAG).wait()
    mine = torch.arange(5 * group.rank, 5 * group.rank + 5)
    assert torch.equal(out, torch.cat([100 * rank + mine for rank in range(world_size)]).to(dtype))
    assert sent.all_to_all_bytes == (world_size - 1) * 5 * dtype.itemsize
