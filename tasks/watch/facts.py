"""What the folders of runs say about them, for ``rlflow top`` and ``rlflow metrics``. Asks no server.

Journals may be long and runs many, so of each journal only its end and some lines in between are read.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from infra.errors import InfraError
from infra.settings import Settings
from rlcore.errors import RlflowError
from rlcore.segment.journal import StepRecord, parse_record
from rlcore.segment.lease import holder_alive
from tasks.driver.failures import FailureRecord
from tasks.driver.progress import pace
from tasks.run import ENDED, Driver, changed_since_driver

_TAIL_BYTES = 65_536  # more than the last records, whose lines have 2 to 4 KiB
_TAIL_RECORDS = 11
POINTS = 24  # of a reward curve
UNREADABLE = (RlflowError, InfraError, ValueError, KeyError, TypeError, AttributeError, OSError)


class State(StrEnum):
    """What a run does. The driver is the process of its flow."""

    TRAINS = "trains"  # a trainer holds the lease
    PREPARES = "prepares"  # the driver makes data and models, or starts the trainer
    WAITS = "waits"  # for the next try after a failure, or, once an outage has ended its flow, for the servers
    EVALUATES = "evaluates"  # all steps are trained: evaluation, merge, registration, report
    FINISHED = "finished"
    STOPPED = "stopped"  # by a person: Ctrl-C, or cancelled
    FAILED = "failed"  # its flow ended with an error
    CRASHED = "crashed"  # its flow is gone and has told nothing
    AWAY = "away"  # another machine drives it, and no trainer has its lease
    UNREADABLE = "unreadable"


AT_WORK = frozenset({State.TRAINS, State.PREPARES, State.WAITS, State.EVALUATES, State.AWAY})


@dataclass(frozen=True, slots=True)
class Signs:
    """What the state of a run follows from."""

    finished: bool
    trainer: bool  # it is alive
    driver: bool | None  # it is alive; None: on another machine
    trained: bool  # all steps are in the journal
    waits_until: float  # of the last failure, seconds since the epoch
    ended: str | None  # how the last flow ended by its own note: KILLED or FAILED
    outage: bool  # an outage ended it, and ``recover`` starts it again


@dataclass(frozen=True, slots=True)
class RunView:
    """A run as a table or a dashboard shows it."""

    run_id: str
    experiment: str
    state: State
    step: int
    steps: int
    at: float  # its last step, or the last start of its flow; seconds since the epoch
    metrics: dict[str, float]  # of the last step
    rewards: tuple[float, ...] = ()  # reward/mean over the whole run, at most POINTS values and the last ten steps'
    seconds_per_step: float | None = None
    warnings: int = 0  # of health rules
    failures: int = 0  # tries of the trainer that failed
    last_warning: str = ""

    @property
    def seconds_left(self) -> float | None:
        """Until the last step, at the pace of the last ten. None: it does not train, or the pace is unknown."""
        if self.state is not State.TRAINS or self.seconds_per_step is None:
            return None
        return self.seconds_per_step * (self.steps - self.step)


def state_of(signs: Signs, now: float) -> State:
    if signs.finished:
        return State.FINISHED
    if signs.trainer:
        return State.TRAINS
    if signs.driver:
        if signs.waits_until > now:
            return State.WAITS
        return State.EVALUATES if signs.trained else State.PREPARES
    if signs.driver is None:
        return State.AWAY
    if signs.outage:
        return State.WAITS
    return {None: State.CRASHED, "KILLED": State.STOPPED}.get(signs.ended, State.FAILED)


class Watch:
    """Looks at all runs of a data folder. A finished run is read again only if its journal changed."""

    def __init__(self, settings: Settings, *, now: Callable[[], float] = time.time) -> None:
        self._settings, self._now = settings, now
        self._known: dict[Path, tuple[tuple[int, int], RunView]] = {}

    def look(self) -> list[RunView]:
        """Runs at work first, then those that moved last."""
        folders = [path.parent for path in self._settings.runs_dir.glob("*/experiment.json")]
        views = [self._view(folder) for folder in folders]
        return sorted(views, key=lambda view: (view.state not in AT_WORK, -view.at, view.run_id))

    def _view(self, folder: Path) -> RunView:
        key = _fingerprint(folder) if (folder / "finished").exists() else None
        known = self._known.get(folder)
        if key is not None and known is not None and known[0] == key:
            return known[1]
        try:
            view = read_view(folder, self._now())
        except UNREADABLE as error:
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            return RunView(folder.name, "", State.UNREADABLE, 0, 0, 0.0, {}, last_warning=why)
        if key is not None:
            self._known[folder] = (key, view)
        return view


def read_view(folder: Path, now: float) -> RunView:
    """
    Raises:
        UNREADABLE: a file of the run is damaged.
    """
    experiment = json.loads((folder / "experiment.json").read_bytes())
    steps = int(experiment["training"]["steps"])
    records = tail(folder / "journal.jsonl")
    last = records[-1] if records else StepRecord(0, 0, {})
    drivers = [Driver.model_validate_json(line) for line in _lines(folder / "drivers.jsonl")]
    failures = [FailureRecord.model_validate_json(line) for line in _lines(folder / "failures.jsonl")]
    warned = [json.loads(line) for line in _lines(folder / "health.jsonl")]
    started = drivers[-1].at if drivers else 0.0
    ended = _note(folder, ENDED)
    signs = _signs(folder, drivers[-1] if drivers else None, failures, ended, trained=last.step >= steps)
    state = state_of(signs, now)
    error = str(ended["error"]).splitlines()[0] if ended is not None and state is State.FAILED else None
    return RunView(
        run_id=folder.name,
        experiment=str(experiment["name"]),
        state=state,
        step=last.step,
        steps=steps,
        at=max(last.timestamp_ms / 1000, started),
        metrics=dict(last.metrics),
        rewards=_rewards(folder / "journal.jsonl", records),
        seconds_per_step=pace(records),
        warnings=len(warned),
        failures=len(failures),
        last_warning=error or _last_warning(warned, failures),
    )


def _signs(
    folder: Path,
    driver: Driver | None,
    failures: Sequence[FailureRecord],
    ended: dict[str, Any] | None,
    *,
    trained: bool,
) -> Signs:
    finished = (folder / "finished").exists()
    last = failures[-1] if failures else None
    outage = _note(folder, "outage.json")
    return Signs(
        finished=finished,
        trainer=not finished and holder_alive(folder / "lease.json") is not None,
        driver=False if finished or driver is None else driver.is_running(),
        trained=trained,
        waits_until=last.at.timestamp() + last.delay if last is not None and last.delay else 0.0,
        ended=str(ended["status"]) if ended is not None else "FAILED" if outage is not None else None,
        outage=outage is not None and driver is not None and driver.deployed,
    )


def _note(folder: Path, name: str) -> dict[str, Any] | None:
    """A note about the end of a flow, unless it is from before the last start."""
    if not changed_since_driver(folder, name):
        return None
    note: dict[str, Any] = json.loads((folder / name).read_bytes())
    return note


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _last_warning(warned: Sequence[Any], failures: Sequence[FailureRecord]) -> str:
    health = f"step {warned[-1][1]}: {warned[-1][0]}" if warned else ""
    failed = f"{failures[-1].failure} after step {failures[-1].step}" if failures else ""
    later = bool(failures) and (not warned or failures[-1].step >= warned[-1][1])
    return failed if later else health


def tail(path: Path) -> list[StepRecord]:
    """The last eleven records of a journal. Lines that are not whole are left out."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _TAIL_BYTES))
        lines = file.read().split(b"\n")
    whole = lines[(1 if size > _TAIL_BYTES else 0) : -1]
    return _parsed(whole[-_TAIL_RECORDS:])


def _rewards(path: Path, last: Sequence[StepRecord]) -> tuple[float, ...]:
    """reward/mean of steps that are spread evenly over the journal, with the last one."""
    records = {record.step: record for record in [*spread(path, POINTS), *last[-1:]]}
    return tuple(
        record.metrics["reward/mean"] for _, record in sorted(records.items()) if "reward/mean" in record.metrics
    )


def spread(path: Path, points: int) -> list[StepRecord]:
    """At most so many records, at places of the file that are equally far from each other."""
    if not path.exists():
        return []
    found: list[bytes] = []
    with path.open("rb") as file:
        size = file.seek(0, 2)
        for number in range(points):
            file.seek(number * size // points)
            if number:
                file.readline()  # the rest of a line
            line = file.readline()
            if line.endswith(b"\n") and line not in found[-1:]:
                found.append(line)
    return _parsed(found)


def _parsed(lines: Sequence[bytes]) -> list[StepRecord]:
    records: list[StepRecord] = []
    for line in lines:
        with suppress(ValueError, KeyError, TypeError, AttributeError):
            records.append(parse_record(line.decode()))
    return records


def _fingerprint(folder: Path) -> tuple[int, int]:
    """Changes when the journal does."""
    try:
        facts = (folder / "journal.jsonl").stat()
    except FileNotFoundError:
        return 0, 0
    return facts.st_mtime_ns, facts.st_size
