"""Adding 1 to a slice of a parameter gathered for reading raises on leaving, on all ranks; the engine stays usable."""

import pytest
import torch

from against_plain import engine_for, train_engine, train_plainly
from trilithon.errors import ProtocolError
from trilithon.testing import ranks
from trilithon.testing.models import MLP
from trilithon.testing.parity import assert_same_training, tolerance, vector_batches
from trilithon.zero import gathered


@ranks(2)
def test_write_without_modify():
    batches = vector_batches(1, 4)
    reference = train_plainly(MLP, batches, 2)
    model = MLP()
    engine = engine_for(model, 3)
    with pytest.raises(ProtocolError, match=r"'last\.weight'.*gathered\(params, modify=0\)"):
        with gathered([model.last.weight, model.layers[0].weight]), torch.no_grad():
            if engine.rank == 1:
                model.last.weight[1:3] += 1
    losses, norms = train_engine(engine, batches)
    got = dict(engine.full_parameters())
    engine.close()
    assert_same_training(reference, losses, got, tolerance("fp32", 1, optimizer="sgd"), norms)
