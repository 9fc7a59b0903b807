"""Rows of a table of figures, and how the figures are written."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Row:
    measure: str
    other: str  # the peer's figure, or what ours is compared with
    ours: str
    goal: str = ""
    verdict: str = ""


def spread(steps: Mapping[str, Any], key: str = "seconds") -> str:
    return "{median:.2f} s ({min:.2f} to {max:.2f})".format(**steps[key])


def reached(*met: bool, see: str = "") -> str:
    """Whether every figure of a row is at its goal."""
    word = "reached" if all(met) else "short" if not any(met) else "reached in part"
    return f"{word}, see {see}" if see else word


def rounded(value: float, digits: int = 3) -> str:
    """With this many digits that count."""
    return f"{round(value, digits - 1 - math.floor(math.log10(abs(value)))):,.0f}"


def rounded_spread(values: Mapping[str, float]) -> str:
    """Median, least and greatest, without a unit."""
    middle, low, high = (rounded(values[key]) for key in ("median", "min", "max"))
    return f"{middle} ({low} to {high})"


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"
