"""Trackers in addition to MLflow, fed from the same committed journal by short processes.

A tracker that hangs, crashes, leaks or asks for a login therefore blocks nothing. Each process
(``infra/tracking/sinks.py``) gets one batch of committed steps, sends those after the last step in its state file, and
writes the new last step once the tracker has accepted everything.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

from infra import environment, processes
from infra.errors import ServerError, ServerRefusedError
from infra.files import write_atomically
from infra.logs import redact
from infra.provenance import ROOT
from infra.settings import Settings, TrackerName
from infra.tracking.sinks import Batch, read_published
from infra.tracking.tracker import StepMetrics

PACKAGES: Mapping[TrackerName, str] = {
    "tensorboard": "tensorboard>=2.18",
    "wandb": "wandb>=0.19",
    "swanlab": "swanlab>=0.10",  # earlier versions cannot resume a run
}
"""The package that each tracker needs in ``RLFLOW_TRACKER_PYTHON``; also an extra in pyproject.toml."""
SESSION_SECONDS = 300  # a process ends itself after this time, and the batch is sent again
_CHECK_SECONDS = 60.0
_LOG_CHARACTERS = 600


class ExtraTracker:
    """One tracker of one training run. ``publish`` starts a process and never waits for it."""

    def __init__(
        self,
        name: TrackerName,
        settings: Settings,
        *,
        experiment: str,
        run_id: str,
        run_dir: Path,
        config: Mapping[str, str | int | float | bool | None],
    ) -> None:
        self._name, self._settings = name, settings
        self._experiment, self._run_id, self._config = experiment, run_id, dict(config)
        self._folder = run_dir / "trackers"
        self._state = self._folder / f"{name}.json"
        self._log = self._folder / f"{name}.log"
        self.mark = tracker_mark(run_dir, name)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def published_step(self) -> int:
        """The last step that the tracker has accepted."""
        return read_published(self._state)

    def publish(self, records: Iterable[StepMetrics], through_step: int) -> int:
        """Start sending the steps after the last accepted one, up to ``through_step``. Call again to learn the outcome.

        Returns:
            the last step that the tracker has accepted so far.

        Raises:
            ServerError: the previous process failed. Nothing is lost: publish again later.
        """
        if self._process is not None:
            code = self._process.poll()
            if code is None:
                return self.published_step
            self._process = None
            processes.kill(self.mark)
            if code != 0:
                text = self._log.read_text(errors="replace").strip() if self._log.exists() else ""
                said = redact(text[-_LOG_CHARACTERS:]) or "it has written nothing."
                raise ServerError(f"{self._name} ended with {code}: {said} All of it: {self._log}")
        published = self.published_step
        fresh = [
            (item.step, item.timestamp_ms, dict(item.metrics))
            for item in records
            if (published < item.step or not published) and item.step <= through_step
        ]
        if fresh:
            self._start(fresh)
        return published

    def stop(self) -> None:
        """Stop the running process. The next ``publish`` sends its steps again."""
        if self._process is not None:
            processes.stop(self.mark, grace_seconds=2.0)
            self._process.wait()
            self._process = None

    def _start(self, records: list[tuple[int, int, dict[str, float]]]) -> None:
        files = self._settings.trackers_dir / self._name / self._run_id
        self._folder.mkdir(parents=True, exist_ok=True)
        files.mkdir(parents=True, exist_ok=True)
        batch = Batch(
            self._name, self._experiment, self._run_id, self._config, str(files), str(self._state), SESSION_SECONDS,
            records,
        )  # fmt: skip
        path = self._folder / f"{self._name}.batch.json"
        write_atomically(path, json.dumps(asdict(batch)))
        with self._log.open("ab") as log:
            self._process = processes.start(
                [str(self._settings.tracker_python), "-m", "infra.tracking.sinks", str(path)],
                env=environment.for_jobs(self._settings),
                mark=self.mark,
                output=log,
                cwd=ROOT,
                ends_with_parent=False,  # its thread ends with the segment, maybe before the batch is sent
            )


def tracker_mark(run_dir: Path, name: str) -> str:
    """Mark of the processes that feed this run's tracker."""
    return f"tracker-{name}-{hashlib.sha256(str(run_dir).encode()).hexdigest()[:12]}"


def end_trackers(run_dir: Path) -> None:
    """Kill all processes that feed this run's trackers, including those of earlier drivers."""
    for name in PACKAGES:
        processes.kill(tracker_mark(run_dir, name))


def check_installed(name: TrackerName, python: Path) -> str:
    """The tracker's version in the trackers' interpreter.

    Raises:
        ServerRefusedError: it is missing or too old.
    """
    answer = subprocess.run(
        [str(python), "-m", "infra.tracking.sinks", "--check", name, PACKAGES[name].partition(">=")[2]],
        cwd=ROOT, capture_output=True, text=True, timeout=_CHECK_SECONDS, check=False,
    )  # fmt: skip
    if answer.returncode != 0:
        raise ServerRefusedError(
            f"RLFLOW_TRACKERS names {name}, and {python} has {answer.stdout.strip() or 'no working infra package'} "
            f"where {PACKAGES[name]} is needed. Install it there (the extra rlflow[{name}]), name an interpreter that "
            f"has it in RLFLOW_TRACKER_PYTHON, or take {name} out of RLFLOW_TRACKERS."
        )
    return answer.stdout.strip()
