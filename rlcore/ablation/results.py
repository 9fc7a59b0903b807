"""Results of an ablation: one JSON file per run and rung, the table's rows, and learning curves over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rlcore.artifacts import Artifact, EvalReport

Status = Literal["finished", "dropped", "failed"]


class PointResult(Artifact):
    """One run has reached one rung, and is evaluated there."""

    point: str
    seed: int
    steps: int
    run_id: str
    mlflow_run_id: str
    report: EvalReport


class PointFailure(Artifact):
    """Why the last try of a run ended."""

    kind: str
    message: str
    final: bool  # another try would end alike


class Row(Artifact):
    """One point. None: there is nothing to compute it from. Differences are to the base at the same step."""

    point: str
    label: str
    status: Status
    steps: int | None
    seeds: int
    problems: int
    accuracy: float | None
    accuracy_low: float | None
    accuracy_high: float | None
    difference: float | None
    difference_low: float | None
    difference_high: float | None
    p: float | None
    p_adjusted: float | None
    gpu_hours: float


class AblationSummary(Artifact):
    """What the flow returns."""

    ablation_id: str
    mlflow_run_id: str
    folder: str  # table.csv, table.md, learning_curves.png, differences.png
    rows: tuple[Row, ...]


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
