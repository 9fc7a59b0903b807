"""What is written down of an ablation: one file per run and rung, and in the end the table. Small JSON."""

from __future__ import annotations

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
