"""How far the training is: a bar on a terminal, lines elsewhere, and a Prefect progress artifact."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import Self
from uuid import UUID

import httpx
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.context import TaskRunContext
from prefect.events import emit_event
from prefect.exceptions import PrefectException
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


class TrainingProgress:
    """Shows the journal's latest step. Used as a context manager around the wait for one segment."""

    def __init__(self, experiment: ExperimentConfig, page: Outbox) -> None:
        self._experiment = experiment
        self._page = page
        self._bar = _bar() if sys.stderr.isatty() else None
        self._row: TaskID | None = None
        self._artifact: UUID | None = None
        self._shown_step = 0
        self._line_at = self._artifact_at = time.monotonic()

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
            self._row = self._bar.add_task("training", total=self._experiment.training.steps, numbers="starting")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, records: Sequence[StepRecord]) -> None:
        if not records or records[-1].step == self._shown_step:
            return
        self._shown_step = records[-1].step
        total = self._experiment.training.steps
        numbers = describe(records, total)
        now = time.monotonic()
        if self._bar is not None and self._row is not None:
            self._bar.update(self._row, completed=self._shown_step, numbers=numbers)
        elif now - self._line_at >= _LINE_SECONDS or self._shown_step == total:
            self._line_at = now
            get_logger().info("train: step %d of %d, %s", self._shown_step, total, numbers)
        if now - self._artifact_at >= _ARTIFACT_SECONDS:
            self._artifact_at = now
            self._page.put("the progress", partial(self._show_on_page, 100 * self._shown_step / total, numbers))

    def _show_on_page(self, percent: float, numbers: str) -> None:
        self._artifact = show_on_page(self._artifact, f"{self._experiment.name}-progress", percent, numbers)


class AblationProgress:
    """How far all points together are, in optimizer steps: a bar on a terminal, lines elsewhere, and Prefect's page."""

    def __init__(self, ablation_id: str, total: int) -> None:
        self._key = f"{ablation_id}-progress"
        self._total = total
        self._bar = _bar() if sys.stderr.isatty() else None
        self._row: TaskID | None = None
        self._artifact: UUID | None = None
        self._shown = -1
        self._line_at = time.monotonic()

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
            self._row = self._bar.add_task("points", total=self._total, numbers="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, steps: int) -> None:
        if steps == self._shown:
            return
        self._shown = steps
        if self._bar is not None and self._row is not None:
            self._bar.update(self._row, completed=steps)
        elif time.monotonic() - self._line_at >= _LINE_SECONDS:
            self._line_at = time.monotonic()
            get_logger().info("ablate: %d of at most %d steps", steps, self._total)
        self._artifact = show_on_page(
            self._artifact, self._key, 100 * steps / self._total, f"{steps} of at most {self._total} steps"
        )


def show_on_page(artifact: UUID | None, key: str, percent: float, text: str) -> UUID | None:
    """Create or update a progress artifact; None where there is no page, or it does not take it for now."""
    if TaskRunContext.get() is None:
        return None
    try:
        with prefect_asked_once():
            if artifact is None:
                return create_progress_artifact(percent, key=key, description=text)
            update_progress_artifact(artifact, percent, description=text)
    except PREFECT_ERRORS as error:
        get_logger().warning("Prefect's page does not take the progress for now: %s", error)
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
    recent = records[-_PACE_STEPS - 1 :]
    if len(recent) > 1:
        pace = (recent[-1].timestamp_ms - recent[0].timestamp_ms) / 1000 / (len(recent) - 1)
        parts.append(f"{pace:.1f} s/step, {duration(pace * (total - latest.step))} left")
    return ", ".join(parts)


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
    """Say that a segment has ended. Who misses it finds the checkpoint all the same: evaluate-latest has a schedule."""
    try:
        emit_event(
            CHECKPOINT_COMMITTED,
            resource={"prefect.resource.id": f"rlflow.run.{run.run_id}", "prefect.resource.name": run.run_id},
            payload={"experiment": run.experiment.name, "segment": manifest.segment, "step": manifest.last_step},
        )
    except (httpx.HTTPError, PrefectException) as error:
        get_logger().warning("Prefect does not take events for now: %s", error)
