"""The gradients of an accumulation window that is open, as named tensors: out of the units, and back into them.

Two kinds stay between micro-steps. What has been reduced is the mean over ranks so far, of which this rank keeps the
range that it owns. What has not been (stages 0 and 1, `no_sync`) is this rank's own sum, over whole parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trilithon.zero.gradients import UnitGradients
from trilithon.zero.layout import Piece


@dataclass(frozen=True, slots=True)
class WindowPart:
    """One flat tensor and the parts of parameters in it. reduced: else it is this rank's own."""

    key: str
    flat: Tensor
    pieces: tuple[Piece, ...]
    reduced: bool


def open_parts(gradients: Sequence[UnitGradients]) -> Iterator[WindowPart]:
    """What is kept now."""
    for one in gradients:
        layout = one.unit.layout
        if one.reduced:
            yield WindowPart(one.unit.name, _owned(one), tuple(layout.pieces(*layout.owned(one.rank))), True)
        if one.contributions is not None:
            filled = {f.name for f, here in zip(layout.fields, one.filled, strict=True) if here}
            pieces = tuple(piece for piece in layout.pieces(0, layout.padded) if piece.field.name in filled)
            yield WindowPart(one.unit.name, one.contributions, pieces, False)


def _owned(one: UnitGradients) -> Tensor:
    result = one.read_result()
    assert result is not None
    low, high = one.unit.layout.owned(one.rank)
    return result[low:high] if result.numel() == one.unit.layout.padded and not one.at_rest else result


def describe(gradients: Sequence[UnitGradients]) -> dict[str, Any]:
    """Which parameters have been reduced, which wait on this rank, and which were used; plain data."""
    found: dict[str, list[str]] = {"reduced": [], "waiting": [], "used": []}
    for one in gradients:
        for field, filled, used in zip(one.unit.layout.fields, one.filled, one.used, strict=True):
            found["reduced"] += [field.plain_name] * one.reduced
            found["waiting"] += [field.plain_name] * (one.contributions is not None and filled)
            found["used"] += [field.plain_name] * used
    return found


def reopen(gradients: Sequence[UnitGradients], described: Mapping[str, Any]) -> None:
    """Make room for what `describe` tells of, as zeros; `open_parts` then yields the tensors to fill."""
    reduced, waiting, used = (set(described[key]) for key in ("reduced", "waiting", "used"))
    for one in gradients:
        one.drop()
        names = [field.plain_name for field in one.unit.layout.fields]
        if reduced.intersection(names):
            one.restore_result()
        if waiting.intersection(names):
            one.restore_contributions([name in waiting for name in names])
        one.used = [name in used for name in names]
