"""deepspeed.checkpointing: gradients of ordinary training, and settings read where DeepSpeed reads them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trilithon import checkpointing as native
from trilithon.compat import deepspeed
from trilithon.errors import ProtocolError

checkpointing = deepspeed.checkpointing


@pytest.fixture(autouse=True)
def as_before():
    yield
    native.unconfigure()


@pytest.mark.parametrize("call", [checkpointing.checkpoint, checkpointing.non_reentrant_checkpoint])
def test_gradients_are_those_of_ordinary_training(call):
    block = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4))
    x = torch.randn(3, 4, requires_grad=True)
    found = []
    for run in (lambda *args: args[0](*args[1:]), call):
        torch.manual_seed(2)
        block.zero_grad()
        x.grad = None
        run(block, x).square().sum().backward()
        found.append([x.grad.clone(), *(p.grad.clone() for p in block.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    output, said = call(lambda value, word: (value * 2, word), x, "as it is")
    assert torch.equal(output, x * 2) and said == "as it is"


def test_arguments_win_over_the_configuration(tmp_path):
    assert not checkpointing.is_configured()
    block = {"activation_checkpointing": {"cpu_checkpointing": True, "profile": True, "partition_activations": True}}
    checkpointing.configure(None, deepspeed_config=block, profile=False)
    assert checkpointing.is_configured()
    settings = native.configured()
    assert (settings.tier, settings.profile, settings.partition) == ("host", False, False)  # no ranks to cut over
    checkpointing.configure(mpu_=None, partition_activations=None, checkpoint_in_cpu=None)
    assert native.configured().tier == "device"
    checkpointing.set_num_layers(3)
    checkpointing.partition_activations_in_checkpoint(False)
    checkpointing.reset()
    for wrong in (
        {"contiguous_checkpointing": True},
        {"contiguous_checkpointing": True, "partition_activations": True},
    ):
        with pytest.raises(AssertionError, match="contiguous_checkpointing"):
            checkpointing.configure(None, **wrong)


def test_streams_of_random_numbers_are_apart():
    checkpointing.model_parallel_cuda_manual_seed(5)
    tracker = checkpointing.get_cuda_rng_tracker()
    with tracker.fork():
        first = torch.rand(2)
    checkpointing.model_parallel_cuda_manual_seed(5)
    outside = torch.rand(2)
    with checkpointing.get_cuda_rng_tracker().fork():
        assert torch.equal(torch.rand(2), first)
    assert not torch.equal(outside, first)
    with pytest.raises(ProtocolError, match="add"):
        checkpointing.model_parallel_reconfigure_tp_seed(1)
