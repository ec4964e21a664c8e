"""How ranks talk, and how long they wait for each other."""

from __future__ import annotations

from trilithon.config.base import Flag, PositiveReal, Section


class CommConfig(Section):
    """The process group and the watch over its collectives."""

    wait_limit_s: PositiveReal = 600.0
    """Seconds a rank waits inside one collective before the watchdog names the missing rank and ends the process."""
    timeout_s: PositiveReal = 1800.0
    """Timeout in seconds given to the process group itself."""
    shared_memory: Flag = True
    """Exchange through shared memory between ranks of one machine where the backend allows it."""
    backend: str | None = None
    """Backend of torch.distributed, such as "gloo" or "nccl". null: chosen from the device."""
