"""What follows a cancelled flow run, in the worker's process, after the flow's own has ended or been killed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from infra import processes
from infra.settings import Settings
from infra.trackers import end_trackers
from tasks.jobs import jobs_mark
from tasks.runs import close_as_killed, drivers, existing_run

if TYPE_CHECKING:
    from prefect import Flow
    from prefect.client.schemas.objects import FlowRun
    from prefect.states import State


def end_what_is_left(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """The flow itself lets its trainer commit and ends it. Where it took longer than Prefect's 30 seconds and was
    killed over it, nobody else would: the end is hard then, and the checkpoint before it counts.

    A hook; Prefect passes the arguments by these names.
    """
    processes.kill_all(jobs_mark(str(flow_run.id)))
    settings = Settings()
    if not (settings.runs_dir / flow_run.name / "experiment.json").exists():
        return  # cancelled before its run began
    run = existing_run(flow_run.name, settings)
    if not any(driver.is_running() for driver in drivers(run)):
        processes.kill(run.trainer_mark)
        end_trackers(run.run_dir)
        close_as_killed(run, settings)
