"""Plots and tables of an ablation: learning curves with bands, a forest plot of differences, and the table as text."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rlcore.ablation.results import Band, Row

_COLOURS = ("#222222", "#1f77b4", "#d95f02", "#1b9e77", "#7570b3", "#e7298a", "#66a61e", "#a6761d", "#666666")
_LOST = "-"


def draw_learning_curves(curves: Sequence[tuple[str, Band]], metric: str) -> Figure:
    """A line per labelled point, the mean over seeds, in a band from the lowest to the highest seed. The first is the
    base."""
    figure = Figure(figsize=(9, 4.8), layout="constrained")
    axis = figure.subplots()
    for index, (label, band) in enumerate(curves):
        colour = _COLOURS[index % len(_COLOURS)]
        axis.plot(band.steps, band.mean, label=label, color=colour, linewidth=1.6)
        axis.fill_between(band.steps, band.low, band.high, color=colour, alpha=0.18, linewidth=0)
    axis.set_xlabel("step")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_ylabel(metric)
    axis.grid(alpha=0.25)
    if curves:
        figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    return figure


def draw_differences(rows: Sequence[Row], base: str) -> Figure:
    """A forest plot: each compared point's difference in accuracy to the base with its interval."""
    compared = [row for row in rows if row.difference is not None]
    figure = Figure(figsize=(9, 1.4 + 0.42 * max(1, len(compared))), layout="constrained")
    axis = figure.subplots()
    for place, row in enumerate(reversed(compared)):
        low, high = float(row.difference_low or 0.0), float(row.difference_high or 0.0)
        certain = low > 0 or high < 0
        colour = ("#1b9e77" if low > 0 else "#d95f02") if certain else "#666666"
        axis.plot((low, high), (place, place), color=colour, linewidth=2)
        axis.plot(float(row.difference or 0.0), place, "s", color=colour, markersize=7)
    axis.axvline(0, color="#222222", linewidth=1)
    axis.set_yticks(range(len(compared)), [_named(row) for row in reversed(compared)], fontsize=9)
    axis.set_ylim(-0.6, max(0.6, len(compared) - 0.4))
    axis.set_xlabel(f"accuracy minus that of {base}, 95 %")
    axis.grid(alpha=0.25, axis="x")
    return figure


def table_rows(rows: Sequence[Row]) -> list[dict[str, str]]:
    """The table with rounded numbers, for people."""
    return [
        {
            "point": row.label,
            "status": row.status,
            "steps": _LOST if row.steps is None else str(row.steps),
            "seeds x problems": f"{row.seeds} x {row.problems}",
            "accuracy [95 %]": _interval(row.accuracy, row.accuracy_low, row.accuracy_high),
            "minus base [95 %]": _interval(row.difference, row.difference_low, row.difference_high, "+"),
            "p": _LOST if row.p is None else f"{row.p:.3g}",
            "p, adjusted": _LOST if row.p_adjusted is None else f"{row.p_adjusted:.3g}",
            "GPU-hours": f"{row.gpu_hours:.3g}",
        }
        for row in rows
    ]


def markdown_table(rows: Sequence[Row]) -> str:
    table = table_rows(rows)
    head = " | ".join(table[0])
    lines = [" | ".join(value.replace("|", "\\|") for value in row.values()) for row in table]
    rule = " | ".join("---" for _ in table[0])
    return "\n".join(f"| {line} |" for line in (head, rule, *lines))


def csv_table(rows: Sequence[Row]) -> str:
    """The table with full numbers, for programs."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(Row.model_fields))
    writer.writeheader()
    writer.writerows(row.model_dump() for row in rows)
    return text.getvalue()


def read_table(path: Path) -> list[Row]:
    """Read a table that ``csv_table`` wrote."""
    with path.open(newline="") as file:
        return [Row.model_validate({key: value or None for key, value in row.items()}) for row in csv.DictReader(file)]


def _named(row: Row) -> str:
    return row.label if row.status == "finished" else f"{row.label} ({row.status}, step {row.steps})"


def _interval(middle: float | None, low: float | None, high: float | None, sign: str = "") -> str:
    if middle is None:
        return _LOST
    return f"{middle:{sign}.3f} [{low:{sign}.3f}, {high:{sign}.3f}]"
