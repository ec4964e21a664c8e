"""Recomputation that a model asks for itself: settings of the process, streams of random numbers, times."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trilithon
from trilithon import checkpointing
from trilithon.checkpointing import boundary
from trilithon.errors import ConfigError, ProtocolError
from trilithon.testing.models import TinyGPT


@pytest.fixture(autouse=True)
def as_before():
    yield
    checkpointing.unconfigure()
    checkpointing.random_streams().reset()


class Region(nn.Module):
    """Dropout from torch's generators and from the stream of cut tensors, other arguments, and a tuple.

    x [n, 8], which [n] i64, keep [n] bool -> (y [n, 8], which, None, "text")
    """

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, which: Tensor, keep: Tensor, factor: int, name: str, *, scale: float = 1.0):
        with checkpointing.random_streams().fork():
            h = F.dropout(torch.tanh(self.up(x)), 0.5)
        y = F.dropout(self.down(h), 0.3) * factor * scale
        return y * keep[:, None] + which[:, None], which + 1, None, name


def run(region: Region, call) -> list[Tensor]:
    checkpointing.seed_streams(5, tensor_rank=1)
    x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
    which, keep = torch.arange(4), torch.tensor([True, True, False, True])
    y, which, nothing, name = call(region, x, which, keep, 2, "text", scale=0.5)
    y, which, nothing, name = call(region, y, which, keep, 3, name)
    assert nothing is None and name == "text" and which.tolist() == [2, 3, 4, 5]
    grads = torch.autograd.grad(y.square().sum(), [x, *region.parameters()])
    with checkpointing.random_streams().fork():
        inside = torch.rand(2)
    return [y.detach(), *grads, torch.rand(3), inside]


@pytest.mark.parametrize(
    "settings",
    [None, {}, {"tier": "host"}, {"contiguous": True}, {"tier": "host", "contiguous": True, "number": 1},
     {"policy": "selective"}, {"synchronize": True, "profile": True}],
)  # fmt: skip
def test_every_setting_gives_the_bits_of_an_ordinary_call(settings):
    torch.manual_seed(0)
    region = Region()
    plain = run(region, lambda function, *args, **kwargs: function(*args, **kwargs))
    if settings is not None:
        checkpointing.configure(settings)
        assert checkpointing.is_configured() and checkpointing.configured().tier == settings.get("tier", "device")
    again = run(region, checkpointing.checkpoint)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    if settings and settings.get("profile"):
        times = checkpointing.times()
        assert (times.calls, times.again) == (2, 2) and times.forward_s > 0 and times.again_s > 0


def test_reset_gives_memory_back_and_keeps_the_settings():
    checkpointing.configure({"contiguous": True, "tier": "host"}, num_layers=2)
    layer, x = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
    checkpointing.checkpoint(layer, x).sum().backward()
    assert checkpointing.kept_bytes() == {"host": 2 * 128}
    checkpointing.reset()
    assert checkpointing.kept_bytes() == {} and checkpointing.configured().contiguous
    y = checkpointing.checkpoint(layer, x)
    checkpointing.reset()  # a graph that exists keeps what it needs
    y.sum().backward()
    checkpointing.unconfigure()
    assert not checkpointing.is_configured() and checkpointing.configured() is None


def test_some_settings_change_and_the_others_stay():
    checkpointing.reconfigure(num_layers=3)  # of the defaults
    assert checkpointing.is_configured() and checkpointing.configured().tier == "device"
    checkpointing.configure({"tier": "host", "contiguous": True}, num_layers=2)
    checkpointing.reconfigure({"profile": True})
    settings = checkpointing.configured()
    assert (settings.tier, settings.contiguous, settings.profile) == ("host", True, True)
    layer, x = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
    checkpointing.checkpoint(layer, x).sum().backward()
    assert checkpointing.kept_bytes() == {"host": 2 * 128}
    checkpointing.reconfigure(num_layers=3)
    checkpointing.checkpoint(layer, x).sum().backward()
    assert checkpointing.kept_bytes() == {"host": 3 * 128} and checkpointing.tensor_ranks() == (0, 1)
    with pytest.raises(ConfigError, match=r"got no group of them"):
        checkpointing.reconfigure({"partition": True})


def test_settings_that_do_not_belong_there_are_refused():
    with pytest.raises(ConfigError, match=r"recompute\.classes chooses blocks"):
        checkpointing.configure({"classes": ("Block",)})
    with pytest.raises(ConfigError, match=r"got no group of them"):
        checkpointing.configure({"partition": True})
    assert not checkpointing.is_configured()


def test_streams_differ_between_ranks_and_are_saved():
    drawn = []
    for rank in (0, 1):
        streams = checkpointing.RandomStreams()
        checkpointing.seed_tensor_ranks(streams, 3, rank)
        common = torch.rand(2)
        with streams.fork():
            drawn.append((common, torch.rand(2)))
        saved = streams.state_dict()
        with streams.fork():
            expected = torch.rand(2)
        streams.load_state_dict(saved)
        with streams.fork():
            assert torch.equal(torch.rand(2), expected)
    assert torch.equal(drawn[0][0], drawn[1][0]) and not torch.equal(drawn[0][1], drawn[1][1])
    with pytest.raises(ProtocolError, match="a stream called 'model-parallel-rng' already"):
        streams.add("model-parallel-rng", 9)
    with pytest.raises(ProtocolError, match="with seed 2722 already"):
        streams.add("other", 2722)
    with pytest.raises(ProtocolError, match=r"no stream called 'other', only \['model-parallel-rng'\]"):
        with streams.fork("other"):
            pass


@pytest.mark.parametrize(("settings", "waits"), [({}, 0), ({"synchronize": True}, 4), ({"profile": True}, 4)])
def test_the_device_is_waited_for_at_both_ends_of_each_forward(settings, waits, monkeypatch):
    calls = []
    monkeypatch.setattr(boundary, "wait_for_device", lambda: calls.append(1))
    checkpointing.configure(settings)
    x = torch.randn(4, 8, requires_grad=True)
    checkpointing.checkpoint(nn.Linear(8, 8), x).square().sum().backward()
    assert len(calls) == waits


def test_times_of_a_step_are_logged_by_the_engine(caplog):
    config = {"recompute": {"profile": True}, "optimizer": {"kind": "sgd", "lr": 0.1}}
    with trilithon.initialize(TinyGPT(layers=3), config) as engine, caplog.at_level(logging.INFO, "trilithon"):
        for _ in range(3):
            engine.backward(engine(torch.zeros(1, 9, dtype=torch.long)))
            engine.step()
    said = [record.message for record in caplog.records if "recomputed blocks" in record.message]
    assert len(said) == 2 and said[0].startswith("step 1: 3 forwards") and "3 of them again" in said[1]
