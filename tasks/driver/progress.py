"""Progress of training: a bar on a terminal, log lines elsewhere, and a progress artifact in Prefect."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Self, cast
from uuid import UUID

from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.context import TaskRunContext
from prefect.events import emit_event
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from infra.logs import get_logger
from rlcore.config import ExperimentConfig
from rlcore.segment.journal import StepRecord
from rlcore.segment.spec import SegmentManifest
from tasks.driver.outbox import PREFECT_ERRORS, Outbox, prefect_asked_once
from tasks.run import Run

_ARTIFACT_SECONDS = 5.0
_LINE_SECONDS = 15.0
_PACE_STEPS = 10


class StepProgress:
    """Shows optimizer steps out of ``total``. A thread sends the artifact, so a server that hangs delays nobody."""

    def __init__(self, label: str, key: str, total: int, page: Outbox, artifact_seconds: float = 0.0) -> None:
        self._label, self._key, self._total, self._page = label, key, total, page
        self._artifact_seconds = artifact_seconds  # at least so long between two updates
        self._bar = _bar() if sys.stderr.isatty() else None
        self._row: TaskID | None = None
        self._artifact: UUID | None = None
        self._shown = -1
        self._line_at = self._artifact_at = time.monotonic()

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
            self._row = self._bar.add_task(self._label, total=self._total, numbers="")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _show(self, step: int, numbers: str, line: str, text: str) -> None:
        """Numbers for the bar, a line for the log, and a text for the artifact."""
        self._shown = step
        now = time.monotonic()
        if self._bar is not None and self._row is not None:
            self._bar.update(self._row, completed=step, numbers=numbers)
        elif now - self._line_at >= _LINE_SECONDS or step == self._total:
            self._line_at = now
            get_logger().info(line)
        if now - self._artifact_at >= self._artifact_seconds:
            self._artifact_at = now
            self._page.put("the progress", partial(self._show_on_page, 100 * step / self._total, text))

    def _show_on_page(self, percent: float, text: str) -> None:
        self._artifact = show_on_page(self._artifact, self._key, percent, text)


class TrainingProgress(StepProgress):
    """Shows the newest step of a run's journal."""

    def __init__(self, experiment: ExperimentConfig, page: Outbox) -> None:
        steps = experiment.training.steps
        super().__init__("training", f"{experiment.name}-progress", steps, page, _ARTIFACT_SECONDS)

    def show(self, records: Sequence[StepRecord]) -> None:
        if records and records[-1].step != self._shown:
            step, numbers = records[-1].step, describe(records, self._total)
            self._show(step, numbers, f"train: step {step} of {self._total}, {numbers}", numbers)


class AblationProgress(StepProgress):
    """Shows the steps of all runs of an ablation together."""

    def __init__(self, ablation_id: str, total: int, page: Outbox) -> None:
        super().__init__("points", f"{ablation_id}-progress", total, page)

    def show(self, steps: int) -> None:
        if steps != self._shown:
            text = f"{steps} of at most {self._total} steps"
            self._show(steps, "", f"ablate: {text}", text)


def show_on_page(artifact: UUID | None, key: str, percent: float, text: str) -> UUID | None:
    """Create or update a progress artifact. Returns its id; None outside a task, or while Prefect does not answer."""
    if TaskRunContext.get() is None:
        return None
    try:
        with prefect_asked_once():
            if artifact is None:
                return cast(UUID, create_progress_artifact(percent, key=key, description=text))
            update_progress_artifact(artifact, percent, description=text)
    except PREFECT_ERRORS as error:
        get_logger().warning("Prefect does not accept the progress for now: %s", error)
    return artifact


def describe(records: Sequence[StepRecord], total: int) -> str:
    """Reward, accuracy, speed and the time left, from the latest steps."""
    latest = records[-1]
    parts = [
        f"{label} {latest.metrics[name]:{form}}"
        for label, name, form in (
            ("reward", "reward/mean", ".3f"),
            ("accuracy", "reward/accuracy", ".3f"),
            ("tokens/s", "system/tokens_per_second", ".0f"),
        )
        if name in latest.metrics
    ]
    if (seconds := pace(records)) is not None:
        parts.append(f"{seconds:.1f} s/step, {duration(seconds * (total - latest.step))} left")
    return ", ".join(parts)


def pace(records: Sequence[StepRecord]) -> float | None:
    """Seconds per step over the last ten steps. None: there are not two steps."""
    recent = records[-_PACE_STEPS - 1 :]
    if len(recent) < 2:
        return None
    return (recent[-1].timestamp_ms - recent[0].timestamp_ms) / 1000 / (len(recent) - 1)


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        TextColumn("{task.completed} of {task.total} steps, {task.fields[numbers]}"),
        console=Console(stderr=True),
    )


CHECKPOINT_COMMITTED = "rlflow.checkpoint.committed"


def announce_checkpoint(run: Run, manifest: SegmentManifest) -> None:
    """Emit the event that starts evaluate-latest. A lost event delays the evaluation until its next schedule."""
    try:
        emit_event(
            CHECKPOINT_COMMITTED,
            resource={"prefect.resource.id": f"rlflow.run.{run.run_id}", "prefect.resource.name": run.run_id},
            payload={"experiment": run.experiment.name, "segment": manifest.segment, "step": manifest.last_step},
        )
    except PREFECT_ERRORS as error:
        get_logger().warning("Prefect does not accept events for now: %s", error)
