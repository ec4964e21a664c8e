"""A generator and a discriminator, with different stages, clip values and optimizers, alternate as in a GAN.

The generator's loss passes through the discriminator's forward. Both match plain PyTorch; closing one leaves the other.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import trilithon
from against_plain import config, train_engine
from trilithon.testing import ranks
from trilithon.testing.models import MLP
from trilithon.testing.parity import rank_part, vector_batches


def generator_model() -> nn.Module:
    return MLP(width=16, out=16, seed=1)


def discriminator_model() -> nn.Module:
    return MLP(width=16, out=1, seed=2)


def play(noise, real, generate, judge):
    """The two losses of a step, in turn: the caller updates with one before the other is computed."""
    yield -F.logsigmoid(judge(real)).mean() - F.logsigmoid(-judge(generate(noise).detach())).mean()
    yield -F.logsigmoid(judge(generate(noise))).mean()


def plainly(batches):
    generator, discriminator = generator_model(), discriminator_model()
    turns = [
        (discriminator, torch.optim.SGD(discriminator.parameters(), lr=0.05), 0.05),
        (generator, torch.optim.SGD(generator.parameters(), lr=0.1, momentum=0.9), 0.02),
    ]
    for ((noise, real),) in batches:
        losses = play(noise, real, generator, discriminator)
        for (model, update, clip), loss in zip(turns, losses, strict=True):
            generator.zero_grad()
            discriminator.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            update.step()
    return dict(generator.named_parameters()), dict(discriminator.named_parameters())


@ranks(2)
@pytest.mark.parametrize("stages", [(2, 3), (3, 2), (3, 3), (0, 1)])
def test_alternating_engines(stages):
    batches = vector_batches(3, 4, out=16)
    expected = plainly(batches)
    generator = trilithon.initialize(generator_model(), config(stages[0], clip_norm=0.02))
    discriminator = trilithon.initialize(
        discriminator_model(), {**config(stages[1], clip_norm=0.05), "optimizer": {"kind": "sgd", "lr": 0.05}}
    )

    for (batch,) in batches:
        noise, real = rank_part(batch, generator.rank, 2)
        for engine, loss in zip((discriminator, generator), play(noise, real, generator, discriminator), strict=True):
            engine.backward(loss)
            assert engine.step()
    for engine, plain in zip((generator, discriminator), expected, strict=True):
        for name, got in engine.full_parameters():
            torch.testing.assert_close(got, plain[name].detach(), rtol=1e-5, atol=1e-6, msg=f"{stages} {name}")
    generator.close()
    more = vector_batches(1, 4, out=1)
    train_engine(discriminator, more)
    assert discriminator.steps == 4
    generator.module(torch.ones(1, 16)).sum().backward()
    discriminator.close()
