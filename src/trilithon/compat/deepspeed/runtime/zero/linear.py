"""`deepspeed.runtime.zero.linear`: linear layers need no stand-in of their own, since freed weights are refilled."""

from __future__ import annotations

from torch import nn
from torch.nn.functional import linear as zero3_linear_wrap

LinearModuleForZeroStage3 = nn.Linear

__all__ = ["LinearModuleForZeroStage3", "zero3_linear_wrap"]
