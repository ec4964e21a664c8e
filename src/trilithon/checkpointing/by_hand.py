"""Recomputation that the model asks for itself, anywhere in it, with settings for the whole process.

    trilithon.checkpointing.configure({"tier": "host"}, group=tensor_group)
    y = trilithon.checkpointing.checkpoint(block, x, mask)

`recomputed` does the same without settings, and `recompute` in the configuration without a line in the model. This is
the form that models written for Megatron-LM and DeepSpeed have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from trilithon.checkpointing.boundary import Times
from trilithon.checkpointing.recompute import Manner, _name_of, make_manner, recomputed_as
from trilithon.checkpointing.streams import RandomStreams, seed_tensor_ranks
from trilithon.comm.collectives import Group
from trilithon.config import RecomputeConfig
from trilithon.contracts import Collectives
from trilithon.errors import ConfigError

_WHICH = ("classes", "modules", "every")  # say which blocks, and here the model does


@dataclass
class _Configured:
    """What holds in this process until `configure` or `reset`."""

    settings: RecomputeConfig
    group: Collectives | None
    num_layers: int
    manner: Manner


_now: _Configured | None = None
_streams = RandomStreams()


def configure(
    settings: RecomputeConfig | Mapping[str, Any] | None = None,
    *,
    group: Collectives | dist.ProcessGroup | None = None,
    num_layers: int = 1,
) -> None:
    """Say how `checkpoint` recomputes from now on, in place of what was said before.

    settings: the keys of `recompute` in the configuration, except those that choose blocks. group: the tensor ranks,
    over which `partition` cuts. num_layers: calls between forward and backward, the size of contiguous buffers when
    settings.number is not given. Raises ConfigError for settings that do not go together.
    """
    global _now
    chosen = settings if isinstance(settings, RecomputeConfig) else RecomputeConfig(**(settings or {}))
    meant = [name for name in _WHICH if name in chosen.model_fields_set]
    if meant:
        raise ConfigError(
            f"recompute.{meant[0]} chooses blocks of a model, and checkpointing.configure() is about calls that the "
            "model makes itself. Put it into the configuration of trilithon.initialize."
        )
    ranks = Group(group, name="checkpoints") if isinstance(group, dist.ProcessGroup) else group
    if chosen.partition and ranks is None:
        raise ConfigError(
            "recompute.partition cuts inputs over tensor ranks, and configure() got no group of them: pass group=, or "
            "leave partition out."
        )
    _close()
    manner = make_manner(chosen, group=ranks, inputs=num_layers, streams=(_streams,))
    _now = _Configured(chosen, ranks, num_layers, manner)


def reconfigure(settings: Mapping[str, Any] | None = None, *, num_layers: int | None = None) -> None:
    """Change some of what `configure` said, or of its defaults, and keep the rest. Errors are those of `configure`."""
    before = _now.settings.model_dump(exclude_defaults=True) if _now is not None else {}
    group, layers = (_now.group, _now.num_layers) if _now is not None else (None, 1)
    configure({**before, **(settings or {})}, group=group, num_layers=num_layers or layers)


def tensor_ranks() -> tuple[int, int]:
    """(this rank's place, how many ranks): those over which `partition` cuts; (0, 1) without a group."""
    group = _now.group if _now is not None else None
    return (group.rank, group.world_size) if group is not None else (0, 1)


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)`, recomputed as `configure` says; without it, with inputs where they are.

    Collective over the group with `partition`. The rest is as for `recomputed`.
    """
    manner = _now.manner if _now is not None else Manner(streams=(_streams,))
    return recomputed_as(manner, _name_of(function), function, args, kwargs)


def is_configured() -> bool:
    """`configure` was called, and no `unconfigure` since."""
    return _now is not None


def configured() -> RecomputeConfig | None:
    """The settings in force; None for the defaults."""
    return _now.settings if _now is not None else None


def reset() -> None:
    """Give contiguous buffers and host memory back; settings stay. Between runs, never between forward and backward of
    one: graphs that exist keep what they need, and what comes after takes new memory."""
    if _now is not None:
        configure(_now.settings, group=_now.group, num_layers=_now.num_layers)


def unconfigure() -> None:
    """Forget what `configure` said."""
    global _now
    _close()
    _now = None


def kept_bytes() -> dict[str, int]:
    """Bytes of the inputs that are kept now, by tier; memory that waits to be used again included."""
    return _now.manner.rest.bytes() if _now is not None else {}


def times() -> Times:
    """With `profile`: calls and seconds since `configure`."""
    return _now.manner.boundary.total() if _now is not None else Times()


def random_streams() -> RandomStreams:
    """The streams of this process: `fork()` where a model draws for cut tensors. `checkpoint` puts them back."""
    return _streams


def seed_streams(seed: int, tensor_rank: int | None = None) -> None:
    """Seed torch's default generators alike on all tensor ranks, and the stream of cut tensors apart on each.

    tensor_rank: None for this rank's place in the group of `configure`."""
    seed_tensor_ranks(_streams, seed, tensor_ranks()[0] if tensor_rank is None else tensor_rank)


def _close() -> None:
    if _now is not None:
        _now.manner.rest.close()
