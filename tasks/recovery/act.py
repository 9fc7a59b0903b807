"""The steps of recover: look at every unfinished run and ablation, and carry out what ``recovery.decide`` says."""

from __future__ import annotations

import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeAlias
from uuid import UUID

from prefect import get_client, task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.events.filters import EventFilter, EventNameFilter, EventResourceFilter
from prefect.exceptions import ObjectNotFound
from prefect.states import AwaitingRetry
from pydantic import BaseModel, ConfigDict, ValidationError

from infra import processes
from infra.logs import get_logger
from infra.settings import Settings
from rlcore.errors import RlflowError
from rlcore.failures import POLICIES
from rlcore.segment.lease import Control, Unchanged, holder_alive
from rlcore.specs import JobError
from tasks.ablation.study import existing_ablation
from tasks.driver.failures import FailureLog, read_outage, unopened_runs
from tasks.driver.jobs import jobs_mark
from tasks.preflight import services_away
from tasks.recovery.decide import Action, Decision, Facts, FlowRunFacts, LastFailure, decide
from tasks.run import Driver, Run, append_line, drivers, existing_run

ARTIFACT = "recover"
FINAL = frozenset(error.__name__ for policy in POLICIES if not policy.delays for error in policy.errors)
"""Error classes of a trainer that another try would only repeat."""

_LOOK_SECONDS = 2.0

Judged: TypeAlias = tuple[Run, Facts, Decision]
Signs: TypeAlias = tuple[float | None, float | None, str | None, float | None]
"""The driver's heartbeat and start, Prefect's state, and the newest event of Prefect's own heartbeat."""


class Recovery(BaseModel):
    """One line of ``recoveries.jsonl`` in a run's folder."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    flow_run_id: str
    committed_step: int
    reason: str
    at: float  # seconds since the epoch


@dataclass(slots=True)
class Watch:
    """The signs of life that recover has seen of a run. Only their changes count: several hosts' clocks made them."""

    unchanged: Unchanged = field(default_factory=Unchanged)
    first: Signs | None = None

    def look(self, signs: Signs) -> tuple[float, bool]:
        """Seconds since the last change, and whether the signs have changed since the first look."""
        self.first = self.first or signs
        return self.unchanged.seconds(signs), signs != self.first


@task(name="recover-runs", cache_policy=NO_CACHE, persist_result=False)
def recover_runs() -> list[Judged]:
    """Judge every run and ablation that has not finished, and act on it.

    A run that may have lost its driver is watched until it gives a sign of life, or has been silent for
    ``recovery.silence_seconds``. Unreadable runs are reported and skipped.
    """
    watches: dict[Path, Watch] = defaultdict(Watch)
    done: dict[Path, Judged] = {}
    with get_client(sync_client=True) as client:
        look_at = list(_folders(Settings()))
        watched = False
        while look_at:
            for folder, read in look_at:
                try:
                    run = read(folder.name)
                    if not run.finished_marker.exists():
                        done[folder] = carry_out(run, watches[folder], client)
                except (RlflowError, ValidationError) as error:
                    get_logger().warning("recover: %s is skipped, it cannot be read: %s", folder, error)
            silent = [item for item in look_at if item[0] in done and done[item[0]][2].action is Action.WATCH]
            if silent:
                watched, look_at = True, silent
                time.sleep(_LOOK_SECONDS)
            elif watched:  # a recover that was started meanwhile has left its work to this one
                watched = False
                rescheduled = {folder for folder, judged in done.items() if judged[2].action is Action.RESCHEDULE}
                look_at = [item for item in _folders(Settings()) if item[0] not in rescheduled]
            else:
                look_at = []
    return list(done.values())


def _folders(settings: Settings) -> Iterator[tuple[Path, Callable[[str], Run]]]:
    """Folders of all runs, unopened runs and ablations that a flow has driven, each with a function that reads it."""
    for stored in sorted(settings.runs_dir.glob("*/experiment.json")):
        yield stored.parent, partial(existing_run, settings=settings)
    for run in unopened_runs(settings):
        yield run.run_dir, lambda _, run=run: run  # type: ignore[misc]
    for stored in sorted(settings.ablations_dir.glob("*/drivers.jsonl")):
        yield stored.parent, lambda name: existing_ablation(name).run


def observe(run: Run, watch: Watch, client: SyncPrefectClient) -> Facts:
    known = drivers(run)
    driver = known[-1] if known else None
    flow_run = _flow_run(driver, client)
    holder = holder_alive(run.run_dir / "lease.json")
    committed, steps = _steps(run)
    control = Control(run.run_dir / "control.json").read()
    signs = (
        control.heartbeat if control else None,
        driver.at if driver else None,
        str(flow_run.state_id) if flow_run else None,
        _heartbeat(flow_run, client) if flow_run else None,
    )
    silent_seconds, sign_seen = watch.look(signs)
    return Facts(
        run_id=run.run_id,
        finished=run.finished_marker.exists(),
        steps=steps,
        committed_step=committed,
        flow_run=_flow_run_facts(flow_run),
        driver_running=driver.is_running() if driver else False,
        silent_seconds=silent_seconds,
        sign_seen=sign_seen,
        trainer=str(holder) if holder else None,
        failure=last_failure(run),
        outage=_outage(run),
        recoveries=sum(item.committed_step == committed for item in recoveries(run)),
        allowed=run.experiment.recovery,
    )


def _outage(run: Run) -> str | None:
    if read_outage(run) is None:
        return None
    return " ".join(services_away(Settings()))


def _steps(run: Run) -> tuple[int, int]:
    """Committed and planned steps; for an ablation, summed over its runs."""
    if run.run_dir.parent != Settings().ablations_dir:
        return run.committed_step(), run.experiment.training.steps
    ablation = existing_ablation(run.run_id)
    return ablation.committed_steps(), ablation.all_steps()


def carry_out(run: Run, watch: Watch, client: SyncPrefectClient) -> Judged:
    """Judge the run, then reschedule it or end what its killed processes left on this host.

    A run whose state changes meanwhile is judged again; the last judgement is returned.
    """
    facts = observe(run, watch, client)
    decision = decide(facts)
    if facts.driver_running is False and facts.flow_run is not None:
        processes.kill_all(jobs_mark(facts.flow_run.flow_run_id))
    while decision.action is Action.RESCHEDULE and not reschedule(run, facts, decision, client):
        facts = observe(run, watch, client)
        decision = decide(facts)
    state = facts.flow_run.state if facts.flow_run is not None else None
    ended = state in (None, *_DONE, StateType.FAILED, StateType.CRASHED)
    if decision.action is Action.LEAVE and ended and facts.driver_running is False and facts.trainer is None:
        processes.kill(run.trainer_mark)  # nothing works on the run, and nothing is about to
    if run.run_dir.parent == Settings().unopened_dir and state in _DONE:
        shutil.rmtree(run.run_dir)  # the note of an outage before the run was open, which nobody needs any more
    get_logger().info("recover: %s: %s, %s", facts.run_id, decision.action, decision.reason)
    return run, facts, decision


def reschedule(run: Run, facts: Facts, decision: Decision, client: SyncPrefectClient) -> bool:
    """Restart the flow run under its own id. False: its state has changed since ``facts`` were read."""
    if facts.flow_run is None:
        raise ValueError(f"run {facts.run_id} has no flow run, so it cannot be rescheduled")
    current = client.read_flow_run(UUID(facts.flow_run.flow_run_id))
    if str(current.state_id) != facts.flow_run.state_id:
        get_logger().info("recover: %s has changed its state meanwhile", facts.run_id)
        return False
    note = Recovery(
        flow_run_id=facts.flow_run.flow_run_id,
        committed_step=facts.committed_step,
        reason=decision.reason,
        at=time.time(),
    )
    # Counted before the restart, so that a crash cannot cause an endless loop.
    append_line(run.run_dir / "recoveries.jsonl", note.model_dump_json())
    # By force: Prefect allows no other way back from RUNNING, and the driver is known to be dead.
    client.set_flow_run_state(current.id, AwaitingRetry(message=f"recover: {decision.reason}"), force=True)
    return True


@task(name="show-decisions", cache_policy=NO_CACHE)
def show_decisions(judged: Sequence[Judged]) -> None:
    """Show the decisions as a table in Prefect; nothing if every run has finished."""
    table = [
        {
            "run": facts.run_id,
            "step": f"{facts.committed_step} of {facts.steps}",
            "Prefect": facts.flow_run.state.value if facts.flow_run else "-",
            "driver": _DRIVER[facts.driver_running],
            "trainer": facts.trainer or "-",
            "last failure": facts.failure.kind if facts.failure else "-",
            "recoveries": f"{facts.recoveries} of {facts.allowed.attempts}",
            "decision": decision.action.value,
            "why": decision.reason,
        }
        for _, facts, decision in judged
    ]
    if table:
        create_table_artifact(
            table, key=ARTIFACT, description="Unfinished runs and ablations, and what recover did about them."
        )


def recoveries(run: Run) -> list[Recovery]:
    path = run.run_dir / "recoveries.jsonl"
    return [Recovery.model_validate_json(line) for line in path.read_text().splitlines()] if path.exists() else []


_DONE = (StateType.COMPLETED, StateType.CANCELLED)
_DRIVER = {True: "lives", False: "gone", None: "on another host"}


def _flow_run(driver: Driver | None, client: SyncPrefectClient) -> FlowRun | None:
    if driver is None or driver.flow_run_id is None:
        return None
    try:
        return client.read_flow_run(UUID(driver.flow_run_id))
    except ObjectNotFound:  # the server of another data folder, or a new one
        return None


def _flow_run_facts(flow_run: FlowRun | None) -> FlowRunFacts | None:
    if flow_run is None or flow_run.state is None:
        return None
    return FlowRunFacts(
        flow_run_id=str(flow_run.id),
        state_id=str(flow_run.state_id),
        state=flow_run.state.type,
        deployed=flow_run.deployment_id is not None,
    )


def _heartbeat(flow_run: FlowRun, client: SyncPrefectClient) -> float | None:
    beats = EventFilter(
        event=EventNameFilter(name=["prefect.flow-run.heartbeat"]),
        resource=EventResourceFilter(id=[f"prefect.flow-run.{flow_run.id}"]),
    )
    events = client.read_events(beats, limit=1).events  # the newest first
    return events[0].occurred.timestamp() if events else None


def last_failure(run: Run) -> LastFailure | None:
    """The failure since the last driver started: that driver's record, or, if it died first, the trainer's report."""
    records = FailureLog(run.run_dir).read()
    if records and run.changed_since_driver("failures.jsonl"):
        return LastFailure(kind=records[-1].failure, final=records[-1].delay is None)
    if not run.changed_since_driver("trainer_error.json"):
        return None
    kind = JobError.model_validate_json((run.run_dir / "trainer_error.json").read_text()).kind
    return LastFailure(kind=kind, final=kind in FINAL)
