"""Learning curves of several seeds as one line with a band."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Band:
    """Over seeds: the mean, and from the lowest to the highest."""

    steps: tuple[int, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


def band_over(seeds: Sequence[Mapping[int, float]], smooth_over: int = 1) -> Band:
    """Step to value, per seed; only steps that every seed has count. Each seed is first smoothed by the mean of its
    last ``smooth_over`` values."""
    common = sorted(set.intersection(*map(set, seeds))) if seeds else []
    smooth = [_smoothed([values[step] for step in common], smooth_over) for values in seeds]
    columns = list(zip(*smooth, strict=True))
    return Band(
        steps=tuple(common),
        mean=tuple(sum(column) / len(column) for column in columns),
        low=tuple(map(min, columns)),
        high=tuple(map(max, columns)),
    )


def _smoothed(values: Sequence[float], over: int) -> list[float]:
    windows = [values[max(0, end - over) : end] for end in range(1, len(values) + 1)]
    return [sum(window) / len(window) for window in windows]
