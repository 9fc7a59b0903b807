"""Flows that an outage has ended: the note from which ``recover`` brings them back once the outage is over."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from pydantic import BaseModel, ConfigDict

from infra.settings import Settings
from rlcore.config import ExperimentConfig
from rlcore.errors import RetriesUsedUpError
from rlcore.failures import OUTAGES, Failure
from rlcore.files import write_json_atomically
from tasks.driver.failures import failure_of
from tasks.run import Run

_NOTE = "outage.json"


class Outage(BaseModel):
    """Why a flow ended: ``outage.json`` in the run's folder."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    at: float  # seconds since the epoch
    failure: Failure
    error: str


def read_outage(run: Run, since: float) -> Outage | None:
    """The outage that ended the flow, if one did after ``since`` (seconds since the epoch)."""
    path = run.run_dir / _NOTE
    found = Outage.model_validate_json(path.read_bytes()) if path.exists() else None
    return found if found is not None and found.at >= since else None


@contextmanager
def noted_outages(run: Run) -> Iterator[None]:
    """Around the flow: an outage that ends it is written into the run's folder."""
    try:
        yield
    except Exception as error:
        note_outage(run, error)
        raise


def unopened_runs(settings: Settings) -> list[Run]:
    """What stands for the runs of flows that ended before they could open them."""
    return [unopened_run(path.parent.name) for path in sorted(settings.unopened_dir.glob("*/drivers.jsonl"))]


def unopened_run(run_id: str) -> Run:
    return Run(run_id=run_id, run_dir=Settings().unopened_dir / run_id, experiment=ExperimentConfig(name="unopened"))


def is_outage(error: Exception) -> bool:
    return _outage_class(error) is not None


def note_outage(run: Run, error: Exception) -> None:
    """Write an outage into the run's folder. Any other error leaves no note."""
    failure = _outage_class(error)
    if failure is not None:
        note = Outage(at=time.time(), failure=failure, error=str(error)[-2000:])
        write_json_atomically(run.run_dir / _NOTE, note.model_dump_json(indent=1))


def _outage_class(error: Exception) -> Failure | None:
    failure = failure_of(error.__cause__ if isinstance(error, RetriesUsedUpError) else error)
    return failure if failure in OUTAGES else None
