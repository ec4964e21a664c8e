"""`deepspeed.zero.TiledLinear` on `trilithon.zero.TiledLinear`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trilithon import zero
from trilithon.errors import ConfigError


class TiledLinear(zero.TiledLinear):
    """[..., in_features] -> [..., out_features]. The input may also come as in_splits parts (input_is_already_split).
    combine_out_splits: False returns the out_splits parts. Raises ConfigError for a linear_cls that is not nn.Linear.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, in_splits: int = 1, out_splits: int = 1,
        input_is_already_split: bool = False, combine_out_splits: bool = True, linear_cls: type = nn.Linear,
        init_linear: nn.Linear | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        if linear_cls is not nn.Linear:
            raise ConfigError(f"TiledLinear(linear_cls={linear_cls.__name__}): tiles are plain linear layers only.")
        super().__init__(in_features, out_features, bias, in_splits=in_splits, out_splits=out_splits, **kwargs)
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        if init_linear is not None:
            self.copy_from(init_linear)

    def forward(self, x: Tensor | Sequence[Tensor]) -> Any:
        parts = self.outputs(x if isinstance(x, Tensor) else torch.cat(list(x), dim=-1))
        return torch.cat(parts, dim=-1) if self.combine_out_splits else parts

    copy_params_from = zero.TiledLinear.copy_from
