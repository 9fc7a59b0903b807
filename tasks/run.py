"""A training run: its name, its folder, its experiment, its drivers, and its MLflow run."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from prefect.context import FlowRunContext
from pydantic import BaseModel, ConfigDict, ValidationError

from infra import processes
from infra.errors import InfraError
from infra.files import locked
from infra.logs import get_logger, redact
from infra.settings import Settings
from rlcore.config import Change, ExperimentConfig, changes, read_experiment
from rlcore.errors import ConfigError
from rlcore.evaluation.records import ValidationRecord, has_plateaued, read_records, with_evaluations
from rlcore.files import write_json_atomically
from rlcore.segment.journal import JournalTail, StepRecord
from rlcore.segment.spec import SegmentManifest, segment_path
from tasks.store.restore import restore_run

if TYPE_CHECKING:
    from infra.tracking.tracker import Tracker

RUN_ID = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
FORK = "fork.json"
DRIVERS = "drivers.jsonl"
ABLATION_ID = r"[a-z0-9][a-z0-9-]{0,79}"  # also the name of its artifacts in Prefect, which allows no more


def changed_since_driver(run_dir: Path, name: str) -> bool:
    """Whether the file ``name`` of a run's folder was written after the run's last driver started.

    The file system's times decide: hosts that share the folder may have clocks that differ by minutes.
    """
    path, start = run_dir / name, run_dir / DRIVERS
    if not path.exists():
        return False
    return not start.exists() or path.stat().st_mtime_ns >= start.stat().st_mtime_ns


class Run(BaseModel):
    """A run, as every task after preflight gets it. Its folder holds all of its state."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: str
    run_dir: Path
    experiment: ExperimentConfig

    @property
    def report_dir(self) -> Path:
        return self.run_dir / "report"

    @property
    def finished_marker(self) -> Path:
        """This file exists once the flow has finished its last step. It counts, never Prefect's state."""
        return self.run_dir / "finished"

    @property
    def ablation_marker(self) -> Path:
        """This file exists if the run is a point of an ablation, which evaluates it itself."""
        return self.run_dir / "ablation"

    @property
    def trainer_mark(self) -> str:
        """Mark of the trainer's processes, derived from the folder so that another driver can end them."""
        return f"trainer-{hashlib.sha256(str(self.run_dir).encode()).hexdigest()[:16]}"

    def changed_since_driver(self, name: str) -> bool:
        """Whether the file ``name`` of the run's folder was written after the last driver started."""
        return changed_since_driver(self.run_dir, name)

    def journal(self) -> list[StepRecord]:
        """Every step so far. Cheap enough to call every second."""
        return _journal(self.run_dir / "journal.jsonl").read()

    def evaluations(self) -> list[ValidationRecord]:
        """Every evaluation that the run's trainers made while they trained."""
        return read_records(self.run_dir)

    def published(self) -> list[StepRecord]:
        """What trackers get: every step, and the evaluations, with at most one of each per step."""
        return with_evaluations(self.journal(), self.run_dir)

    def ends_with(self, segment: SegmentManifest) -> bool:
        """Whether training is over after this complete segment: the last step is reached, or
        ``evaluation.patience`` ended it early."""
        if segment.last_step >= self.experiment.training.steps:
            return True
        if self.manifest(segment.segment + 1) is not None:  # the run went on before patience was set or lowered
            return False
        seen = [item for item in self.evaluations() if item.report.step <= segment.last_step]
        return has_plateaued(seen, self.experiment.evaluation.patience)

    def manifest(self, segment: int) -> SegmentManifest | None:
        """The manifest of a segment; None if it is missing or damaged, which the trainer repairs."""
        path = segment_path(self.run_dir, segment)
        try:
            return SegmentManifest.model_validate_json(path.read_bytes()) if path.exists() else None
        except ValidationError as error:
            get_logger().warning("%s is damaged and does not count: %s", path, error)
            return None

    def committed_step(self) -> int:
        """The last committed step: a resume never takes back a step up to this one."""
        step, segment = 0, 0
        while (manifest := self.manifest(segment)) is not None:
            step, segment = manifest.last_step, segment + 1
        return step


@lru_cache(maxsize=8)  # the runs that this process drives; a journal of thousands of steps takes 30 MB
def _journal(path: Path) -> JournalTail:
    return JournalTail(path)


class Fork(BaseModel):
    """Where a run was forked from: ``fork.json`` in its folder."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: str
    step: int
    manifest_sha256: str  # of the trunk's checkpoint
    mlflow_run_id: str | None  # the trunk's; None: it has none yet

    def __str__(self) -> str:
        return f"{self.run_id}@{self.step}"


def read_fork(run: Run) -> Fork | None:
    """None: the run is no fork."""
    path = run.run_dir / FORK
    return Fork.model_validate_json(path.read_bytes()) if path.exists() else None


class Driver(BaseModel):
    """The process of one start of a flow over a run: a line of ``drivers.jsonl`` in the run's folder."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    flow_run_id: str | None  # None: outside a flow
    deployed: bool  # a worker started it, so a worker can start it again
    pid: int
    started: float
    host: str
    at: float  # seconds since the epoch, by this host's clock

    def is_running(self) -> bool | None:
        """Whether the process runs; None: it is on another host."""
        return processes.is_running(processes.ProcessId(self.pid, self.started, self.host))


def new_run_id(experiment: str) -> str:
    return f"{experiment}-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def flow_run_name() -> str:
    """Name of the flow run and of its run or ablation: the given ``run_id``, else one that retries keep."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None or context.parameters is None:
        raise RuntimeError("flow_run_name() needs a flow run: Prefect calls it when one starts")
    return context.parameters.get("run_id") or f"{context.parameters['experiment']}-{context.flow_run.id.hex[:12]}"


def experiment_of_run(run_id: str | None, experiment: str) -> ExperimentConfig | None:
    """The values of the run called ``run_id``, if it exists and belongs to the experiment called ``experiment``."""
    run = _run_called(run_id, Settings()) if run_id is not None else None
    return run.experiment if run is not None and run.experiment.name == experiment else None


def experiment_of_retry(run_id: str | None) -> ExperimentConfig | None:
    """The values that this flow run started with if it is a retry, whatever prefect.yaml says now; else None."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return None
    run = _run_called(run_id or flow_run_name(), Settings())
    if run is None:
        return None
    mine = str(context.flow_run.id) in [driver.flow_run_id for driver in drivers(run)]
    return run.experiment if mine else None


def open_run(
    experiment: ExperimentConfig, run_id: str | None, settings: Settings, *, allow_changes: bool = False
) -> Run:
    """A new run, or the run called ``run_id``. Without a name, all retries of a flow run continue the same run.

    Settings that do not affect results may differ from the run's; with ``allow_changes`` all settings may. Changes are
    appended to ``changes.jsonl`` in the run's folder.

    Raises:
        ConfigError: settings that affect results differ; lists all of them.
    """
    name = check_run_id(run_id or (flow_run_name() if FlowRunContext.get() else new_run_id(experiment.name)))
    restore_run(name, settings)
    run = Run(run_id=name, run_dir=settings.runs_dir / name, experiment=experiment)
    stored = run.run_dir / "experiment.json"
    if stored.exists():
        changed = changes(read_experiment(stored), experiment)
        if changed and not allow_changes:
            _require_same_results(name, changed)
        if changed:
            _record_changes(run, changed)
    write_json_atomically(stored, experiment.model_dump_json(indent=1))
    note_driver(run)
    return run


def drivers(run: Run) -> list[Driver]:
    """All drivers of the run, the newest last."""
    path = run.run_dir / DRIVERS
    return [Driver.model_validate_json(line) for line in path.read_text().splitlines()] if path.exists() else []


def note_driver(run: Run) -> None:
    """Record this process as the driver of the run."""
    context = FlowRunContext.get()
    flow_run = context.flow_run if context else None
    me = processes.this_process()
    driver = Driver(
        flow_run_id=str(flow_run.id) if flow_run else None,
        deployed=flow_run is not None and flow_run.deployment_id is not None,
        pid=me.pid,
        started=me.started,
        host=me.host,
        at=time.time(),
    )
    append_line(run.run_dir / DRIVERS, driver.model_dump_json())


def append_line(path: Path, line: str) -> None:
    """Append to a small file under a lock, by replacing it, so that a kill never leaves half a line."""
    with locked(path.with_name(f".{path.name}.lock")):
        before = path.read_text() if path.exists() else ""
        write_json_atomically(path, f"{before}{line}\n")


def existing_run(run_id: str, settings: Settings) -> Run:
    """
    Raises:
        ConfigError: there is no such run.
    """
    run = _run_called(run_id, settings)
    if run is None:
        known = sorted(path.parent.name for path in settings.runs_dir.glob("*/experiment.json"))
        raise ConfigError(f"no run {run_id!r} under {settings.runs_dir}. Found: {', '.join(known) or 'none'}.")
    return run


def _run_called(run_id: str, settings: Settings) -> Run | None:
    """The run of this name, fetched from the store if necessary; None: there is none."""
    restore_run(check_run_id(run_id), settings)
    stored = settings.runs_dir / run_id / "experiment.json"
    if not stored.exists():
        return None
    experiment = read_experiment(stored)
    return Run(run_id=run_id, run_dir=stored.parent, experiment=experiment)


def check_run_id(run_id: str) -> str:
    """Refuse a name that could lead out of the folder of runs."""
    if not re.fullmatch(RUN_ID, run_id):
        raise ConfigError(
            f"{run_id!r} cannot be the name of a run. Allowed are up to 128 letters, digits, dots, dashes and "
            "underscores; the first must be a letter or a digit."
        )
    return run_id


def _require_same_results(run_id: str, changed: Sequence[Change]) -> None:
    affecting = [f"- {change}" for change in changed if change.affects_results]
    if affecting:
        raise ConfigError(
            f"run {run_id} was started with other settings:\n"
            + "\n".join(affecting)
            + "\nContinue it with its own values, leave --run-id out to start a new run, or add --allow-changes to "
            "continue with these from its last checkpoint; the run then records them."
        )


def _record_changes(run: Run, changed: Sequence[Change]) -> None:
    """Called before the new experiment is written, so that no change is unrecorded."""
    records = run.journal()
    line = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "step": records[-1].step if records else 0,  # in the journal so far; a resume may take back some
        "changes": [asdict(change) | {"affects_results": change.affects_results} for change in changed],
    }
    append_line(run.run_dir / "changes.jsonl", json.dumps(line))
    get_logger().warning("run %s continues with other values: %s", run.run_id, "; ".join(map(str, changed)))


def tracker_of(run: Run, settings: Settings) -> Tracker:
    from infra.tracking.tracker import Tracker  # imports MLflow for a second

    return Tracker.open(
        uri=settings.tracking_uri,
        artifacts_uri=settings.artifacts_uri,
        experiment=run.experiment.name,
        run_id=run.run_id,
        run_dir=run.run_dir,
    )


def close_as_killed(run: Run, settings: Settings) -> None:
    """Close the MLflow run of a flow that was killed before it could do so."""
    if (run.run_dir / "mlflow.json").exists() and not run.finished_marker.exists():
        close_after_error(run, settings, "KILLED")


def close_after_error(run: Run, settings: Settings, status: str) -> None:
    try:
        tracker_of(run, settings).finish(status)
    except (InfraError, OSError) as error:  # the error that ended the run is more useful
        get_logger().warning("The MLflow run could not be closed as %s: %s", status, error)


ENDED = "ended.json"


def note_end(run: Run, status: str, error: BaseException) -> None:
    """Note in the run's folder how its flow ended before the run was finished, for who looks while MLflow is away."""
    note = {"at": time.time(), "status": status, "error": redact(f"{type(error).__name__}: {error}")[:2000]}
    try:
        write_json_atomically(run.run_dir / ENDED, json.dumps(note))
    except OSError as failed:  # the error that ended the run is more useful
        get_logger().warning("%s cannot be written: %s", run.run_dir / ENDED, failed)
