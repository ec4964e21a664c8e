"""With an accumulation of 1, several backwards before one step add up, at every stage.

A system kept only the last of three backwards at stage 2 and summed all three at stage 3. Here they are summed as plain
autograd sums `.grad`, which `Engine.backward` documents; nobody has to say which one is the last.
https://github.com/allenai/open-instruct/issues/1498
"""

from __future__ import annotations

import pytest
import torch

from trilithon import initialize
from trilithon.testing import ranks
from trilithon.testing.models import MLP
from trilithon.testing.parity import rank_part, vector_batches


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@ranks(2)
def test_three_backwards_are_three_gradients(stage: int, local: bool, world_size: int):
    """local: the first two say that they are not the last one, through `no_sync`."""
    batches = [micro[0] for micro in vector_batches(3, rows=4 * world_size)]
    engine = initialize(MLP(), {"zero": {"stage": stage}, "optimizer": {"kind": "sgd", "lr": 1.0}})
    for number, batch in enumerate(batches):
        if local and number < 2:
            with engine.no_sync():
                engine.backward(engine(*rank_part(batch, engine.rank, world_size)))
        else:
            engine.backward(engine(*rank_part(batch, engine.rank, world_size)))
    assert engine.step()
    got = dict(engine.full_parameters())
    engine.close()

    plain = MLP()
    for batch in batches:
        plain(*batch).backward()
    torch.optim.SGD(plain.parameters(), lr=1.0).step()
    for name, param in plain.named_parameters():
        torch.testing.assert_close(got[name], param.detach(), rtol=1e-5, atol=1e-6, msg=name)
