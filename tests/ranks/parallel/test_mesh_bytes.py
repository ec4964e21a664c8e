"""The ledger's bytes on each axis equal the formulas of docs/parallel.md, to the byte."""

from __future__ import annotations

import pytest
from mesh_runs import GPT_SHAPE, LENGTH, ROWS, VOCAB, batches, make

from trilithon.comm.ledger import all_gather_bytes, all_reduce_bytes, sent_to_others_bytes
from trilithon.engine.build import initialize
from trilithon.testing import run_ranks

F32 = 4
D, LAYERS = GPT_SHAPE.width, GPT_SHAPE.num_layers


def measure(axes, cut_norms):
    """Bytes by (group, kind) of exactly one step after the first."""
    config = {
        "mesh": axes,
        **({"tensor": {"cut_norms": True}} if cut_norms else {}),
        "optimizer": {"kind": "sgd", "lr": 0.1},
        "batch": {"global_size": ROWS},
    }
    with initialize(make("gpt"), config) as engine:
        engine.hooks.clear()  # the comparison of replicas belongs to single steps
        place, parts = engine.mesh.data_rank, engine.mesh.data_size
        counts = []
        for batch in batches("gpt", 1)[:2]:
            engine.train_step([tuple(x[place * ROWS // parts :][: ROWS // parts] for x in batch[0])])
            counts.append(totals(engine.ledger))
        return {key: value - counts[0].get(key, 0) for key, value in counts[1].items()}


def totals(ledger):
    found = {}
    for row in ledger.rows():
        found[row.group, row.kind] = found.get((row.group, row.kind), 0) + row.sent_bytes
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_tensor_slices_send_four_sums_a_block_and_three_numbers_a_token(ranks):
    tokens = ROWS * LENGTH
    sum_of_all = all_reduce_bytes(tokens * D, F32, ranks)
    expected = (4 * LAYERS + 2) * sum_of_all  # and the embedding's in forward, the output matrix's in backward
    expected += all_reduce_bytes(tokens, F32, ranks) + all_reduce_bytes(2 * tokens, F32, ranks)
    sent = run_ranks(measure, ranks, {"tensor": ranks}, False)[0]
    assert sent["tensor", "all_reduce"] == expected
    assert {kind for group, kind in sent if group == "tensor" and sent[group, kind]} == {"all_reduce"}


@pytest.mark.parametrize("ranks", [2, 4])
def test_cut_norms_send_the_same_as_gathers_and_scatters_and_gather_inputs_again(ranks):
    tokens = ROWS * LENGTH
    part = all_gather_bytes(tokens * D // ranks, F32, ranks)  # of a gather, and of a reduce-scatter
    sent = run_ranks(measure, ranks, {"tensor": ranks}, True)[0]
    # per product pair forward: a gather and a scatter; backward: their transposes, and the column's input once more
    assert sent["tensor", "all_gather"] == (2 * LAYERS * 3 + 2 + 1) * part
    assert sent["tensor", "reduce_scatter"] == (2 * LAYERS * 2 + 1 + 1) * part
    assert sent["tensor", "all_reduce"] == all_reduce_bytes(tokens, F32, ranks) + all_reduce_bytes(
        2 * tokens, F32, ranks
    )
    # the norms' gradients, parts of a sum, in one bucket with ZeRO's reductions over all ranks
    bucket = -(-(2 * LAYERS + 1) * 64 // (64 * ranks)) * 64  # 32 channels take 64 elements in a bucket
    assert sent["summed reduce", "reduce_scatter"] == sent["summed gather", "all_gather"] == (ranks - 1) * bucket * F32


@pytest.mark.parametrize("ranks", [2, 4])
def test_sequence_slices_send_four_exchanges_a_block_in_each_direction(ranks):
    numel = ROWS * LENGTH * D // ranks
    exchange = sent_to_others_bytes([numel // ranks] * ranks, F32, 0)
    sent = run_ranks(measure, ranks, {"sequence": ranks}, False)[0]
    assert sent["sequence", "all_to_all"] == 2 * LAYERS * 4 * exchange
    assert sent["sequence", "all_reduce"] == all_reduce_bytes(2, 8, ranks)  # loss and number of tokens


def test_the_data_axis_sends_what_zero_sends_for_the_smaller_model():
    """Stage 0: a reduce-scatter and an all-gather of the parameters that are here, padded."""
    axes = {"data": 2, "tensor": 2}
    sent, engine_padded = run_ranks(padded_and_sent, 4, axes)[0]
    assert sent["reduce", "reduce_scatter"] == sent["gather", "all_gather"] == engine_padded // 2 * F32


def padded_and_sent(axes):
    with initialize(make("gpt"), {"mesh": axes, "batch": {"global_size": ROWS}, "optimizer": "sgd"}) as engine:
        padded = sum(unit.layout.padded for unit in engine._sharding.units)
        cut = sum(param.numel() for name, param in engine.module.named_parameters() if name in engine.slices)
        whole = sum(param.numel() for param in engine.module.parameters()) - cut
    vocabulary = -(-VOCAB // 2) * D
    block = (3 * D * D + D * D + 8 * D * D) // 2
    assert (cut, whole) == (vocabulary + LAYERS * block, (2 * LAYERS + 1) * D)
    return measure(axes, False), padded


def test_one_process_sends_nothing():
    assert sum(measure({}, False).values()) == 0
