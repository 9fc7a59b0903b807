"""Run a job module in the trainer's interpreter and return its result or raise its error.

If the wait ends early (Ctrl-C, a cancelled flow, a timeout), the job and its child processes are ended.
"""

from __future__ import annotations

import time
import uuid
from asyncio import CancelledError
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from prefect import runtime
from prefect.context import FlowRunContext, TaskRunContext
from pydantic import BaseModel

from infra import environment, processes
from infra.errors import StorageAwayError
from infra.logs import get_logger
from infra.settings import Settings
from infra.tracking.extra import end_trackers
from rlcore import errors
from rlcore.config import ExperimentConfig
from rlcore.errors import RlflowError, TrainerFailedError
from rlcore.failures import policy_of
from rlcore.files import write_json_atomically
from rlcore.gpus import shortage
from rlcore.specs import JobError, JobSpec, read_error
from tasks.driver.failures import failure_of
from tasks.run import close_as_killed, drivers, existing_run

if TYPE_CHECKING:
    from prefect import Flow, Task
    from prefect.client.schemas.objects import FlowRun, State, TaskRun

R = TypeVar("R", bound=BaseModel)
_POLL_SECONDS = 0.1
_STOP_GRACE_SECONDS = 5.0


def new_result_path(settings: Settings, name: str) -> Path:
    """A new folder for a job's spec, result and error: the path of the result in it."""
    return settings.jobs_dir / f"{name}-{uuid.uuid4().hex[:12]}" / "result.json"


def gpu_shortage(experiment: ExperimentConfig, gpus: int, settings: Settings) -> str:
    """In words, if work that claims so many GPUs of this machine would have to wait now; empty: it would not."""
    return "" if experiment.resources.device == "cpu" or settings.share_gpus else shortage(gpus)


def tell_shortage(work: str, experiment: ExperimentConfig, gpus: int, settings: Settings) -> None:
    """Log it if ``work``, which claims so many GPUs of this machine, will have to wait for them."""
    if short := gpu_shortage(experiment, gpus, settings):
        get_logger().info("%s: %s, so this waits until others end", work, short)


def run_job(module: str, spec: JobSpec, result_type: type[R], settings: Settings, *, quiet: bool = False) -> R:
    """Run ``python -m module`` on ``spec`` and return what it wrote.

    Its output goes to this process's stderr; with ``quiet`` to ``job.log`` in the folder of the spec.

    Raises:
        RlflowError: the error that the job raised, with the job's traceback as a note.
        TrainerFailedError: any other failure of the job.
    """
    spec_path = spec.result.with_name("spec.json")
    write_json_atomically(spec_path, spec.model_dump_json(indent=1))
    mark = f"{jobs_mark(runtime.flow_run.id)}{uuid.uuid4().hex[:8]}"
    log = spec.result.with_name("job.log")
    with log.open("wb") if quiet else nullcontext() as output:
        process = processes.start(
            [str(settings.trainer_python), "-m", module, str(spec_path)],
            env=environment.for_jobs(settings),
            mark=mark,
            output=output,
            ends_with_parent=True,
        )
    try:
        while (code := process.poll()) is None:
            end_with_flow()
            time.sleep(_POLL_SECONDS)
    except BaseException:
        processes.stop(mark, _STOP_GRACE_SECONDS)
        process.wait()
        raise
    processes.kill(mark)  # processes that the job left running
    if code != 0:
        where = f" (output: {log})" if quiet else ""
        raise error_from(read_error(spec.result), f"{module} ended with {describe_exit(code)}{where}")
    return result_type.model_validate_json(spec.result.read_text())


def end_with_flow() -> None:
    """
    Raises:
        CancelledError: the flow that submitted the calling task has ended, by an error or an interrupt. Prefect waits
            for the task and makes no retry of this error.
    """
    flow_run, task_run = FlowRunContext.get(), TaskRunContext.get()
    if flow_run is None or task_run is None:
        return
    cancelled = flow_run.task_runner._cancel_events.get(task_run.task_run.id)  # type: ignore[attr-defined]
    if cancelled is not None and cancelled.is_set():
        raise CancelledError(f"the flow has ended before its task {task_run.task_run.name}")


def jobs_mark(flow_run_id: str | None) -> str:
    """Prefix of the marks of a flow run's jobs, by which processes of a killed flow are found."""
    return f"job-{(flow_run_id or 'no-flow')[:8]}-"


def error_from(report: JobError | None, fallback: str) -> RlflowError:
    """The error that a process reported, in its original class; without a report an error that says ``fallback``."""
    if report is None:
        return TrainerFailedError(f"{fallback} and left no error report. Read its output.")
    kind = getattr(errors, report.kind, None)
    if isinstance(kind, type) and issubclass(kind, RlflowError):
        error = kind(report.message)
    else:
        error = TrainerFailedError(f"{report.kind}: {report.message}\n({fallback})")
    error.add_note(f"Traceback of the process that failed:\n{report.traceback}")
    return error


UNKNOWN_EXIT = -1000
"""In place of the exit code of a process that another one started, and that nobody here can wait for."""


def describe_exit(code: int) -> str:
    if code == UNKNOWN_EXIT:
        return "an exit code that only the process that started it knows"
    if code == -9:
        return "SIGKILL (out of memory, or killed by a person)"
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def worth_retrying(task: Task[Any, Any], _run: TaskRun, state: State[Any]) -> bool:
    """Prefect's retry condition, from the table of failures: errors in the experiment or the code are not retried."""
    failure = failure_of(state.data)
    if failure is None or not policy_of(failure).delays or isinstance(state.data, StorageAwayError):
        return False  # the store was already waited for
    get_logger().warning("%s failed and has tries left: %s", task.name, state.data)
    return True


def end_what_is_left(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Kill the trainer and the jobs of a cancelled flow run that Prefect killed before it could do so itself.

    Prefect gives a flow 30 seconds to let its trainer commit. This is a hook; Prefect passes these argument names.
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
