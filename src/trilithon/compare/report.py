"""An outcome as text for people and as JSON for programs."""

from __future__ import annotations

import json
import math
from typing import Any

from trilithon.compare.difference import Difference, Outcome

_KINDS = ("loss", "grad_norm", "gradient", "parameter")
_TITLES = ("loss", "gradient norm", "worst gradient", "worst parameter")


def as_text(outcome: Outcome) -> str:
    """One line per step with differences in multiples of what rounding may do, the first difference, the verdict."""
    lines = [
        f"A {outcome.a}, B {outcome.b}: {outcome.steps} steps on {outcome.nproc} ranks, rounding of {outcome.dtype}",
        "largest difference of each step, as a share of what rounding may do (beyond 1 it is more than rounding):",
    ]
    table: list[tuple[str, ...]] = [("step", *_TITLES)]
    for step in range(1, outcome.steps + 1):
        cells = []
        for kind in _KINDS:
            rows = [d for d in outcome.differences if d.step == step and d.kind == kind]
            cells.append(_share(max(rows, key=lambda d: d.share)) if rows else "-")
        table.append((str(step), *cells))
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines += ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
    if outcome.first is None:
        lines.append("A and B are equal bit for bit")
    else:
        lines.append(f"first difference: {_sentence(outcome.first, outcome.dtype)}")
    if outcome.first_beyond is None:
        lines.append("verdict: A and B agree within rounding")
    else:
        lines.append(f"verdict: A and B DIFFER, first in {_sentence(outcome.first_beyond, outcome.dtype)}")
        most = outcome.most_beyond
        if most is not None and most != outcome.first_beyond:
            lines.append(f"farthest apart in that step: {_sentence(most, outcome.dtype)}")
    return "\n".join(lines)


def as_json(outcome: Outcome) -> str:
    """One JSON object; infinite differences are written as null."""
    return json.dumps(
        {
            "a": outcome.a,
            "b": outcome.b,
            "steps": outcome.steps,
            "nproc": outcome.nproc,
            "dtype": outcome.dtype,
            "agree": outcome.agree,
            "first": None if outcome.first is None else _plain(outcome.first),
            "first_beyond": None if outcome.first_beyond is None else _plain(outcome.first_beyond),
            "most_beyond": None if outcome.most_beyond is None else _plain(outcome.most_beyond),
            "differences": [_plain(d) for d in outcome.differences],
        },
        indent=1,
    )


def _plain(d: Difference) -> dict[str, Any]:
    numbers = {"max_abs": d.max_abs, "max_rel": d.max_rel, "allowed": d.allowed}
    finite = {key: value if math.isfinite(value) else None for key, value in numbers.items()}
    return {"step": d.step, "kind": d.kind, "name": d.name, **finite, "is_rounding": d.is_rounding}


def _sentence(d: Difference, dtype: str) -> str:
    what = {
        "loss": "the loss",
        "grad_norm": "the gradient norm",
        "gradient": f"the gradient of {d.name}",
        "parameter": f"parameter {d.name} after the update",
        "update": f"the update, {d.name} because a gradient was not finite",
    }[d.kind]
    if math.isinf(d.max_abs):
        return f"step {d.step}, {what}"
    return (
        f"step {d.step}, {what}: max abs {d.max_abs:.3g}, relative {d.max_rel:.3g}; "
        f"rounding of {dtype} may do {d.allowed:.3g}"
    )


def _share(d: Difference) -> str:
    share = "0" if d.share == 0 else "inf" if math.isinf(d.share) else f"{d.share:.2g}"
    return f"{share} ({d.name})" if d.name else share
