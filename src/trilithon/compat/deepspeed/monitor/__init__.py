"""`deepspeed.monitor`."""

from __future__ import annotations

from trilithon.compat.deepspeed.resolve import resolver

__getattr__ = resolver(
    __name__,
    {"MonitorMaster": "monitor.monitor"},
    ("monitor",),
    dict.fromkeys(("wandb", "comet"), "monitor.csv and monitor.tensorboard are there."),
)
