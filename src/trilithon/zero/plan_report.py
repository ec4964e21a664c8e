"""Which parameters are communicated together, as a table to read before wondering about a number of collectives."""

from __future__ import annotations

from collections.abc import Sequence

from trilithon.zero.unit import Unit


def plan_report(units: Sequence[Unit]) -> str:
    """One line per unit, in order: name, elements with padding, type, what happens to it, and its parameters.

    "gathered for use": sharded between uses (stage 3). "whole": values stay on every rank. "frozen": never reduced.
    """
    rows = [("unit", "elements", "type", "values", "parameters")]
    for unit in units:
        values = ("whole" if unit.whole_values else "gathered for use") + ("" if unit.trainable else ", frozen")
        names = [field.name for field in unit.layout.fields]
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        rows.append((unit.name, f"{unit.layout.padded:,}", str(unit.dtype).removeprefix("torch."), values, shown))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join("  ".join([*(cell.ljust(w) for cell, w in zip(row, widths)), row[4]]).rstrip() for row in rows)
