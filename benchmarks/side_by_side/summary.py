"""From measured steps to rows and tables. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table

from side_by_side.measure import Measured, Plan
from side_by_side.shape import Shape

# How far the losses of one family may lie apart in any step, in nats. fp32: systems differ by the order of sums, about
# 1e-6 of the loss; but the first updates of Adam are the signs of gradients, and a sign can flip where a gradient is
# noise of rounding. Two thousandths cover what that does in some tens of steps. bf16: eight bits, so 2^-8 = 0.4 % of
# each logit, and systems round in different places (parameters, activations, gradients): 0.4 % of a loss near 9.
TOLERANCE = {"fp32": 2e-3, "bf16": 4e-2}

Row = dict[str, Any]


def time_row(measured: Measured, reference: Measured | None, shape: Shape, plan: Plan) -> Row:
    """One system's times, memory and bytes; ratios are to `reference` turn by turn, then the median."""
    tokens = plan.world_size * shape.micro_batch * shape.num_tokens * measured.system.accumulation
    walls, cpus, ready = measured.walls, measured.cpus, measured.ready
    row: Row = {
        "system": measured.system.name,
        "mode": "time",
        **_common(shape, plan),
        "n": len(walls),
        "wall_s": _digits(statistics.median(walls)),
        "wall_s_min": _digits(min(walls)),
        "wall_s_quartiles": _quartiles(walls),
        "cpu_s_all_ranks": _digits(statistics.median(cpus)),
        "cpu_s_all_ranks_quartiles": _quartiles(cpus),
        "tokens_per_s": round(tokens / statistics.median(walls), 1),
        "first_step_s": _digits(measured.first_step_s),
        "import_s": _digits(ready["import_s"]),
        "setup_s": _digits(ready["setup_s"]),
        "setup_peak_mib": _mib(ready["setup_peak_bytes"]),
        "step_peak_mib": _mib(measured.peak_bytes),
        "wire_mb_per_step": _mb(measured.wire_bytes),
        "ledger_mb_per_step": _mb(measured.sent_bytes),
        "losses": [round(loss, 5) for loss in measured.losses],
    }
    if reference is not None and not reference.error:
        wall, low, high = ratio(measured.turns, reference.turns)
        cpu, _, _ = ratio(measured.cpu_turns, reference.cpu_turns)
        row |= {"reference": reference.system.name, "wall_ratio": wall, "wall_ratio_range": [low, high]}
        row["cpu_ratio"] = cpu
    return row


def memory_row(name: str, points: Sequence[tuple[Shape, Measured]], plan: Plan) -> Row:
    """Bytes per parameter and rank: the slope of a line through peaks at several depths; what is left is fixed."""
    parameters = [float(shape.num_parameters()) for shape, _ in points]
    row: Row = {
        "system": name,
        "mode": "memory",
        **_common(points[0][0], plan),
        "n": len(points),
        "parameters": [int(count) for count in parameters],
    }
    setup = [measured.ready["setup_peak_bytes"] for _, measured in points]
    steps = [float(measured.peak_bytes) for _, measured in points if measured.peak_bytes is not None]
    for kind, peaks in (("setup", setup), ("step", steps)):
        if len(peaks) == len(points):
            slope, fixed = statistics.linear_regression(parameters, peaks)
            row[f"{kind}_bytes_per_parameter"] = round(slope, 2)
            row[f"{kind}_fixed_mib"] = _mib(fixed)
            row[f"{kind}_peak_mib"] = [_mib(peak) for peak in peaks]
    return row


def ratio(turns: Sequence[Sequence[float]], of: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """(median, smallest, largest) over turns of the ratio of their medians."""
    each = [statistics.median(mine) / statistics.median(theirs) for mine, theirs in zip(turns, of, strict=False)]
    return round(statistics.median(each), 3), round(min(each), 3), round(max(each), 3)


def loss_spreads(found: Iterable[Measured]) -> dict[tuple[str, int, float], tuple[float, str]]:
    """family -> (largest distance of a loss from that of the family's first system, in any step, and whose it is)."""
    families: dict[tuple[str, int, float], list[Measured]] = {}
    for measured in found:
        if not measured.error:
            families.setdefault(measured.system.family, []).append(measured)
    spreads = {}
    for family, members in families.items():
        first, worst, whose = members[0], 0.0, ""
        for other in members[1:]:
            apart = max(abs(a - b) for a, b in zip(first.losses, other.losses, strict=True))
            if not apart <= worst:  # also when it is NaN
                worst, whose = apart, f"{other.system.name} from {first.system.name}"
        spreads[family] = worst, whose
    return spreads


def time_table(rows: Sequence[Mapping[str, Any]], title: str) -> Table:
    """The columns of docs/performance.md."""
    table = Table(title=title)
    for column in ("system", "wall s (quartiles)", "min", "x ref", "CPU s", "x ref", "peak MiB", "set-up MiB",
                   "MB on lo", "MB by ledger", "import s", "set-up s", "loss"):  # fmt: skip
        table.add_column(column, justify="left" if column == "system" else "right")
    for row in rows:
        low, high = row["wall_s_quartiles"]
        table.add_row(
            row["system"], f"{row['wall_s']:.3f} ({low:.3f}-{high:.3f})", f"{row['wall_s_min']:.3f}",
            _shown(row.get("wall_ratio")), f"{row['cpu_s_all_ranks']:.3f}", _shown(row.get("cpu_ratio")),
            _shown(row["step_peak_mib"]), _shown(row["setup_peak_mib"]), _shown(row["wire_mb_per_step"]),
            _shown(row["ledger_mb_per_step"]), f"{row['import_s']:.1f}", f"{row['setup_s']:.1f}",
            f"{row['losses'][0]:.4f} > {row['losses'][-1]:.4f}",
        )  # fmt: skip
    return table


def memory_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Bytes per parameter and rank."""
    table = Table(title="bytes per parameter and rank")
    for column in ("system", "steps", "fixed MiB", "set-up", "peaks MiB", "parameters"):
        table.add_column(column, justify="left" if column == "system" else "right")
    for row in rows:
        table.add_row(
            row["system"], _shown(row.get("step_bytes_per_parameter")), _shown(row.get("step_fixed_mib")),
            _shown(row.get("setup_bytes_per_parameter")), _shown(row.get("step_peak_mib")), _shown(row["parameters"]),
        )  # fmt: skip
    return table


def _common(shape: Shape, plan: Plan) -> Row:
    return {
        "parameters": shape.num_parameters(),
        "width": shape.width,
        "tokens": [shape.micro_batch, shape.num_tokens],
        "ranks": plan.world_size,
        "threads": plan.threads,
        "rounds": plan.rounds,
        "steps_per_turn": plan.steps,
        "allocator": plan.allocator,
    }


def _quartiles(values: Sequence[float]) -> list[float]:
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return [_digits(low), _digits(high)]


def _digits(seconds: float) -> float:
    return round(seconds, 5)


def _mib(count: float | None) -> int | None:
    return None if count is None else round(count / 2**20)


def _mb(count: float | None) -> float | None:
    return None if count is None else round(count / 1e6, 3)


def _shown(value: Any) -> str:
    return "not measured" if value is None else ", ".join(map(str, value)) if isinstance(value, list) else str(value)
