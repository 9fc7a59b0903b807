"""The steps that find or open a run, each tried again while the store is away."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prefect.context import FlowRunContext

from infra import processes
from infra.settings import Settings
from rlcore.artifacts import CheckpointRef
from rlcore.config import ExperimentConfig
from tasks import parameters as form
from tasks import run as runs
from tasks.driver.jobs import jobs_mark
from tasks.driver.outages import is_outage, note_outage, unopened_run
from tasks.retries import step
from tasks.run import Run


@contextmanager
def recoverable(run_id: str | None) -> Iterator[None]:
    """Around the steps before the run is open, where it may have no folder yet: ``recover`` then finds the flow run
    below ``data/unopened``."""
    context = FlowRunContext.get()
    deployed = context is not None and context.flow_run is not None and context.flow_run.deployment_id is not None
    if not deployed:  # nobody but the person at the terminal can start it again
        yield
        return
    unopened = unopened_run(run_id or runs.flow_run_name())
    try:
        yield
    except Exception as error:
        run = unopened.model_copy(update={"run_dir": Settings().runs_dir / unopened.run_id})
        if str(context.flow_run.id) in [driver.flow_run_id for driver in runs.drivers(run)]:
            note_outage(run, error)
        elif is_outage(error):
            runs.note_driver(unopened)  # before the outage: recover looks at what came after the driver's start
            note_outage(unopened, error)
        raise
    shutil.rmtree(unopened.run_dir, ignore_errors=True)


@step("choose-experiment")
def choose_experiment(run_id: str | None, **values: Any) -> ExperimentConfig:
    """What a flow run trains: what it began with, where it is a retry, else what its parameters say."""
    return runs.begun_with(run_id) or form.chosen(run_id=run_id, **values)


@step("open-run")
def open_run(experiment: ExperimentConfig, run_id: str | None, *, allow_changes: bool = False) -> Run:
    """A new run, or the one called ``run_id`` continued, fetched from the store where this machine does not know it."""
    run = runs.open_run(experiment, run_id, Settings(), allow_changes=allow_changes)
    for driver in runs.drivers(run):
        if driver.flow_run_id is not None and driver.is_running() is False:
            # A flow that was killed could not remove the temporary folders of its jobs.
            processes.kill_all(jobs_mark(driver.flow_run_id))
    return run


@step("find-run")
def find_run(run_id: str) -> Run:
    return runs.existing_run(run_id, Settings())


@step("find-checkpoint")
def find_checkpoint(run: Run) -> CheckpointRef:
    """The run's newest whole checkpoint."""
    return runs.newest_checkpoint(run)
