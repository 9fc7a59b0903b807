"""A training run: its name, its folder, its experiment, and its MLflow run."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from infra.errors import InfraError
from infra.logs import get_logger
from infra.settings import Settings
from infra.tracking import Tracker
from rlcore.artifacts import CheckpointRef
from rlcore.config import ExperimentConfig
from rlcore.errors import CheckpointError, ConfigError
from rlcore.job import write_json_atomically
from rlcore.segment.journal import StepRecord, read_journal
from rlcore.segment.spec import SegmentManifest
from rlcore.segment.store import LocalCheckpointStore


class Run(BaseModel):
    """What every task after preflight is told. The folder holds all of the run's state."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: str
    run_dir: Path
    experiment: ExperimentConfig

    @property
    def report_dir(self) -> Path:
        return self.run_dir / "report"

    def journal(self) -> list[StepRecord]:
        return read_journal(self.run_dir / "journal.jsonl")

    def committed_step(self) -> int:
        """No resume takes back a step up to this one."""
        step, segment = 0, 0
        while (manifest := self.manifest(segment)) is not None:
            step, segment = manifest.last_step, segment + 1
        return step

    def manifest(self, segment: int) -> SegmentManifest | None:
        path = self.run_dir / "segments" / f"{segment:04d}.json"
        return SegmentManifest.model_validate_json(path.read_text()) if path.exists() else None


def new_run_id(experiment: str) -> str:
    return f"{experiment}-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def open_run(experiment: ExperimentConfig, run_id: str | None, settings: Settings) -> Run:
    """A new run, or the one called ``run_id`` continued.

    Raises:
        ConfigError: the run exists with another experiment; names every value that differs.
    """
    name = run_id or new_run_id(experiment.name)
    run = Run(run_id=name, run_dir=settings.runs_dir / name, experiment=experiment)
    stored = run.run_dir / "experiment.json"
    if stored.exists():
        _require_same(name, ExperimentConfig.model_validate_json(stored.read_text()), experiment)
    else:
        write_json_atomically(stored, experiment.model_dump_json(indent=1))
    return run


def existing_run(run_id: str, settings: Settings) -> Run:
    """
    Raises:
        ConfigError: there is no such run.
    """
    stored = settings.runs_dir / run_id / "experiment.json"
    if not stored.exists():
        known = sorted(path.parent.name for path in settings.runs_dir.glob("*/experiment.json"))
        raise ConfigError(f"no run {run_id!r} under {settings.runs_dir}. Found: {', '.join(known) or 'none'}.")
    experiment = ExperimentConfig.model_validate_json(stored.read_text())
    return Run(run_id=run_id, run_dir=stored.parent, experiment=experiment)


def newest_checkpoint(run: Run) -> CheckpointRef:
    """
    Raises:
        CheckpointError: the run has no whole checkpoint.
    """
    found = LocalCheckpointStore(run.run_dir, run.run_id).latest()
    if found is None:
        raise CheckpointError(f"run {run.run_id} has no whole checkpoint yet. Train at least one segment.")
    return found


def _require_same(run_id: str, before: ExperimentConfig, now: ExperimentConfig) -> None:
    old, new = before.flat(), now.flat()
    changed = [f"- {key}: was {old.get(key)!r}, now {new[key]!r}" for key in new if old.get(key) != new[key]]
    if changed:
        raise ConfigError(
            f"run {run_id} was started with another experiment:\n"
            + "\n".join(changed)
            + "\nContinue it with its own values, or leave --run-id out to start a new run."
        )


def tracker_of(run: Run, settings: Settings) -> Tracker:
    return Tracker.open(
        uri=settings.tracking_uri,
        artifacts_dir=settings.artifacts_dir,
        experiment=run.experiment.name,
        run_id=run.run_id,
        run_dir=run.run_dir,
    )


@contextmanager
def tracked(run: Run) -> Iterator[Tracker]:
    """Hold the MLflow run open, and close it with the right status however the flow ends."""
    tracker = tracker_of(run, Settings())
    tracker.resume()
    try:
        yield tracker
    except Exception:
        _close_after_error(tracker, "FAILED")
        raise
    except BaseException:  # Ctrl-C or a cancelled flow
        _close_after_error(tracker, "KILLED")
        raise
    tracker.finish("FINISHED")


def _close_after_error(tracker: Tracker, status: str) -> None:
    try:
        tracker.finish(status)
    except (InfraError, OSError) as error:  # the error that ended the run says more
        get_logger().warning("MLflow was not told that the run is %s: %s", status, error)
