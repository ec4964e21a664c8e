"""3 micro-batches under no_sync and a 4th outside it give what accumulation 4 gives, at every stage."""

from contextlib import nullcontext

import pytest

from against_plain import STAGES, engine_for, train_plainly
from trilithon.testing import ranks
from trilithon.testing.models import SharedLayerNet
from trilithon.testing.parity import assert_same_training, rank_part, tolerance, vector_batches


@ranks(2)
@pytest.mark.parametrize("outside", [(3,), (1, 3), ()])
def test_no_sync_equals_accumulation(outside):
    batches = vector_batches(2, 4, 4)
    reference = train_plainly(SharedLayerNet, batches, 2)
    for stage in STAGES:
        engine = engine_for(SharedLayerNet(), stage, accumulation=4)
        losses, norms = [], []
        for micro_batches in batches:
            for index, batch in enumerate(micro_batches):
                with nullcontext() if index in outside else engine.no_sync():
                    engine.backward(engine(*rank_part(batch, engine.rank, 2)))
            assert engine.step()
            losses.append(engine.loss)
            norms.append(engine.grad_norm)
        got = dict(engine.full_parameters())
        engine.close()
        assert_same_training(reference, losses, got, tolerance("fp32", 2, optimizer="sgd"), norms)


@ranks(2)
def test_no_sync_saves_the_reductions():
    """The reductions of 3 of 4 micro-batches are not sent: what is sent is what one micro-batch sends."""
    for stage in (2, 3):
        sent = {}
        for quiet in (False, True):
            engine = engine_for(SharedLayerNet(), stage, accumulation=4)
            with engine.ledger.measure() as measured:
                for index, batch in enumerate(vector_batches(1, 4, 4)[0]):
                    with engine.no_sync() if quiet and index < 3 else nullcontext():
                        engine.backward(engine(*rank_part(batch, engine.rank, 2)))
                engine.step()
            sent[quiet] = measured.reduce_scatter_bytes
            engine.close()
        assert sent[True] > 0 and sent[False] == 4 * sent[True], (stage, sent)
