"""1-bit Adam: APMSqueeze with one bit per element (Tang et al. 2021, arXiv:2102.02888, algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from trilithon.comm.sign import Sign
from trilithon.optim.apmsqueeze import ApmSqueeze
from trilithon.optim.elementwise import Settings
from trilithon.optim.freeze import Freeze
from trilithon.optim.link import Link
from trilithon.optim.phase import Compression


def onebit_adam(
    groups: Sequence[Settings], link: Link | None, *, freeze_step: int | Literal["auto"],
    scale_norm: Literal["l2", "l1"] = "l2", auto_mask: bool = True, per_tensor_scaling: bool = False,
) -> ApmSqueeze:  # fmt: skip
    """Adam for freeze_step updates, then momentum sent as signs with one scale per rank and one per served chunk."""
    by = Compression(Sign(scale_norm), auto_mask=auto_mask, per_tensor_scaling=per_tensor_scaling)
    return ApmSqueeze(groups, Freeze(freeze_step), by, link, name="onebit_adam")
