"""Where the loss is in what a model returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from trilithon.errors import ProtocolError


def loss_of(output: Any) -> Tensor:
    """A scalar, `.loss`, ["loss"], or the first element. Raises ProtocolError when there is none."""
    found = output
    if isinstance(output, Mapping):
        found = output.get("loss")
    elif isinstance(output, tuple | list):
        found = output[0]
    elif not isinstance(output, Tensor):
        found = getattr(output, "loss", None)
    if not isinstance(found, Tensor):
        raise ProtocolError(
            f"the model returned a {type(output).__name__} without a loss. Pass forward=lambda engine, batch: ... to "
            "train_step, which returns the loss."
        )
    return found
