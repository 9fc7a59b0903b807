"""The trainer's spec, which the segment task writes for ``rlcore.jobs.segment``, and the manifest of a segment."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from rlcore.adjustments import Adjustments
from rlcore.artifacts import CheckpointRef, DatasetRef, ModelRef
from rlcore.config import ExperimentConfig


class SegmentSpec(BaseModel):
    """Everything a trainer needs, except the run's progress, which it reads from the run's folder."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: str
    run_dir: Path
    experiment: ExperimentConfig
    dataset: DatasetRef
    model: ModelRef
    validation: DatasetRef | None = None
    """The problems of ``evaluation``, for evaluations while it trains. None: it makes none."""
    teacher: ModelRef | None = None
    """The model of ``algorithm.teacher``."""
    adjustments: Adjustments = Adjustments()
    driver_deadline_seconds: float = 120.0
    """After this time without a heartbeat of the driver, the trainer commits and stops."""


@dataclass(frozen=True, slots=True)
class SegmentEnd:
    """The segment that a checkpoint ends."""

    segment: int
    first_step: int  # exclusive: the segment's first is first_step + 1
    complete: bool  # False: stopped before its last step (preempted)


class SegmentManifest(BaseModel):
    """The proof that a segment is done: written last, by one rename."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: str
    segment: int
    first_step: int  # exclusive: steps first_step+1 .. last_step were taken
    last_step: int
    complete: bool  # False: stopped before its last step (preempted or out of time)
    checkpoint: CheckpointRef
    experiment_digest: str  # ``ExperimentConfig.results_digest``
    dataset_digest: str


def segment_path(run_dir: Path, segment: int) -> Path:
    return run_dir / "segments" / f"{segment:04d}.json"
