"""`deepspeed.launcher`: DeepSpeed's command line for starting ranks, on `trilithon.launch`."""

from __future__ import annotations

from trilithon.compat.deepspeed.resolve import resolver

__getattr__ = resolver(__name__, {}, ("constants", "launch", "multinode_runner", "runner"))
