"""Run the points of an ablation in parallel, as many as there are slots. Each is a separate flow run, so a failed point
is retried alone."""

from __future__ import annotations

import subprocess
import sys
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol
from uuid import UUID

from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterTags
from prefect.client.schemas.objects import StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.context import FlowRunContext
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL
from prefect.states import AwaitingRetry, Cancelling

from infra import environment, processes
from infra.logs import get_logger
from infra.provenance import ROOT
from infra.settings import Settings
from rlcore.ablation.plan import Job
from tasks.ablation.study import Ablation

if TYPE_CHECKING:
    from prefect import Flow
    from prefect.client.schemas.objects import FlowRun, State

DEPLOYMENT = "ablation-point/ablation-point"
_PAGE = 200  # the maximum that Prefect's server returns at once
_POLL_SECONDS = 1.0
_EXIT_SECONDS = 20.0  # added to the trainer's grace, so that its flow can close the run in MLflow


class PointRunner(Protocol):
    """Starts jobs and says when they have ended. Their result files say whether they succeeded."""

    def free(self, at_work: int) -> bool:
        """Whether another job may start while ``at_work`` others run."""
        ...

    def start(self, job: Job) -> None: ...

    def ended(self, job: Job) -> bool: ...

    def stop(self) -> None:
        """Called when the waiting flow is being ended."""
        ...


def run_jobs(
    ablation: Ablation,
    jobs: Sequence[Job],
    runner: PointRunner,
    tick: Callable[[], None],
    sleep: Callable[[float], None] = time.sleep,
) -> list[Job]:
    """Run every job that has no result yet, with retries. Returns the jobs that have none in the end."""
    waiting = deque(job for job in jobs if ablation.result(job) is None)
    at_work: list[Job] = []
    failed: list[Job] = []
    tries: Counter[str] = Counter()
    try:
        while waiting or at_work:
            while waiting and runner.free(len(at_work)):
                job = waiting.popleft()
                tries[ablation.run_id(job)] += 1
                runner.start(job)
                at_work.append(job)
            for job in [job for job in at_work if runner.ended(job)]:
                at_work.remove(job)
                if ablation.result(job) is None:
                    again = _try_again(ablation, job, tries[ablation.run_id(job)])
                    (waiting if again else failed).append(job)
            tick()
            sleep(_POLL_SECONDS)
    except BaseException:
        runner.stop()
        raise
    return failed


def _try_again(ablation: Ablation, job: Job, tries: int) -> bool:
    failure = ablation.failure(job)
    what = f"{failure.kind}: {failure.message}" if failure else "it was killed; see its log"
    again = tries <= ablation.plan.settings.retries and not (failure and failure.final)
    get_logger().warning("ablate: %s failed%s: %s", ablation.run_id(job), ", it is retried" if again else "", what)
    return again


def point_runner(ablation: Ablation, settings: Settings) -> PointRunner:
    """Deployed points if the ablation runs on a worker, where the work pool limits all runs together; in a terminal
    child processes."""
    context = FlowRunContext.get()
    if context is not None and context.flow_run is not None and context.flow_run.deployment_id is not None:
        return DeployedPoints(ablation, get_client(sync_client=True))
    return LocalPoints(ablation, settings)


class LocalPoints:
    """Runs ``rlflow point`` for each job, ``RLFLOW_GPU_SLOTS`` at a time."""

    def __init__(self, ablation: Ablation, settings: Settings) -> None:
        self._ablation = ablation
        self._settings = settings
        self._children: dict[str, tuple[subprocess.Popen[bytes], str]] = {}

    def free(self, at_work: int) -> bool:
        return at_work < self._settings.gpu_slots

    def start(self, job: Job) -> None:
        run_id = self._ablation.run_id(job)
        words = (self._ablation.plan.ablation_id, job.point.name, str(job.seed), str(job.steps))
        env = environment.for_children(self._settings)
        for setting in (PREFECT_API_URL, PREFECT_API_AUTH_STRING):
            if value := setting.value():
                env[setting.name] = value
        log = self._ablation.folder / "logs" / f"{run_id}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        mark = f"point-{uuid.uuid4().hex[:8]}"
        with log.open("ab") as output:
            child = processes.start(
                [sys.executable, "-m", "tasks.cli", "point", *words],
                env=env,
                mark=mark,
                output=output,
                cwd=ROOT,
                ends_with_parent=True,  # then it gets SIGTERM and lets its trainer commit
            )
        self._children[run_id] = (child, mark)
        get_logger().info("ablate: %s, to step %d (log: %s)", run_id, job.steps, log)

    def ended(self, job: Job) -> bool:
        child, mark = self._children[self._ablation.run_id(job)]
        if child.poll() is None:
            return False
        processes.kill(mark)  # and its temporary folder
        return True

    def stop(self) -> None:
        """Let each trainer commit, then kill what is left."""
        living = [(child, mark) for child, mark in self._children.values() if child.poll() is None]
        for child, _ in living:
            child.terminate()
        deadline = time.monotonic() + self._settings.stop_grace_seconds + _EXIT_SECONDS
        try:
            while any(child.poll() is None for child, _ in living) and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS / 4)
        finally:
            for _, mark in living:
                processes.kill(mark)


class DeployedPoints:
    """Starts a flow run of the deployment ``ablation-point`` for each job. A retry of the ablation finds them by their
    idempotency key; a failed one is retried under its own id."""

    def __init__(self, ablation: Ablation, client: SyncPrefectClient) -> None:
        self._ablation = ablation
        self._client = client
        self.flow_runs: dict[str, UUID] = {}
        self._deployment = client.read_deployment_by_name(DEPLOYMENT).id

    def free(self, at_work: int) -> bool:
        return True  # the work pool has the limit

    def start(self, job: Job) -> None:
        run_id, ablation_id = self._ablation.run_id(job), self._ablation.plan.ablation_id
        flow_run = self._client.create_flow_run_from_deployment(
            self._deployment,
            parameters={
                "ablation": ablation_id, "point": job.point.name, "seed": job.seed, "steps": job.steps,
            },
            name=run_id,
            tags=[tag_of(ablation_id)],
            idempotency_key=f"{run_id}-{job.steps}",
        )  # fmt: skip
        self.flow_runs[run_id] = flow_run.id
        if self._client.read_flow_run(flow_run.id).state.is_final():  # type: ignore[union-attr]
            # By force, so that a completed run whose result was removed runs again as well.
            self._client.set_flow_run_state(flow_run.id, AwaitingRetry(message="ablate: another try"), force=True)

    def ended(self, job: Job) -> bool:
        state = self._client.read_flow_run(self.flow_runs[self._ablation.run_id(job)]).state
        return state is not None and state.is_final()

    def stop(self) -> None:
        """Nothing to do: a stack that drains stops them itself, and ``cancel_points`` handles a cancelled ablation."""


def tag_of(ablation_id: str) -> str:
    return f"ablation:{ablation_id}"


def cancel_points(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Cancel the points of a cancelled ablation; they commit and stop.

    This is a hook; Prefect passes these argument names.
    """
    with get_client(sync_client=True) as client:
        for point in _points_of(client, flow_run.name):
            if point.state is not None and not point.state.is_final() and point.state.type != StateType.CANCELLING:
                client.set_flow_run_state(point.id, Cancelling())


def _points_of(client: SyncPrefectClient, ablation_id: str) -> list[FlowRun]:
    """All points, read before any is cancelled, because the pages of a changing list would overlap."""
    tagged = FlowRunFilter(tags=FlowRunFilterTags(all_=[tag_of(ablation_id)]))
    points: list[FlowRun] = []
    while page := client.read_flow_runs(
        flow_run_filter=tagged, sort=FlowRunSort.ID_DESC, limit=_PAGE, offset=len(points)
    ):
        points += page
    return points
