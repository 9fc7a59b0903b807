"""Results of an ablation: one JSON file per run and rung, the table's rows, and learning curves over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rlcore.artifacts import Artifact, EvalReport

Status = Literal["finished", "dropped", "failed"]


class PointResult(Artifact):
    """The evaluation of one run at the end of one rung."""

    point: str
    seed: int
    steps: int
    run_id: str
    mlflow_run_id: str
    report: EvalReport


class PointFailure(Artifact):
    """Why the last try of a run failed."""

    kind: str
    message: str
    final: bool  # a retry would fail the same way


class Row(Artifact):
    """A point in the table. None: no data. Differences are to the base at the same step."""

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
    """Mean, lowest and highest value over seeds."""

    steps: tuple[int, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


def band_over(seeds: Sequence[Mapping[int, float]], smooth_over: int = 1) -> Band:
    """The band over ``seeds`` (step to value) at the steps that all seeds have. Each seed is smoothed first: each value
    becomes the mean of the last ``smooth_over`` values."""
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
