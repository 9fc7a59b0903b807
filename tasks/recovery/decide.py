"""What to do about an unfinished run: the facts, and one pure function that decides.

The run's folder counts (manifests, lease, drivers), never Prefect's state alone: a stopped worker leaves its flow run
RUNNING for ever, a server outage hides the end of one, and rescheduling without a check would repeat complete runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from prefect.client.schemas.objects import StateType

from rlcore.config import RecoveryConfig


class Action(StrEnum):
    LEAVE = "leave"
    WATCH = "watch"  # look again until there is a sign of life, or the silence has lasted long enough
    RESCHEDULE = "reschedule"


@dataclass(frozen=True, slots=True)
class FlowRunFacts:
    """The flow run that drove the run last, as Prefect's server knows it."""

    flow_run_id: str
    state_id: str  # changes with every state, so that recover notices a change before it acts
    state: StateType
    deployed: bool  # a worker started it, so a worker can start it again


@dataclass(frozen=True, slots=True)
class LastFailure:
    """The trainer's last failure since the last driver started."""

    kind: str
    final: bool  # another start would repeat it, or its tries are used up


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that the decision depends on."""

    run_id: str
    finished: bool  # the flow's last step is done
    steps: int
    committed_step: int
    flow_run: FlowRunFacts | None  # None: no flow drove it, or this Prefect server does not know the flow run
    driver_running: bool | None  # whether the flow's process runs; None: it is on another host
    silent_seconds: float  # since recover last saw a sign of life; 0 at its first look
    sign_seen: bool  # whether recover has seen a sign of life since its first look
    trainer: str | None  # the living holder of the lease
    failure: LastFailure | None
    outage: str | None  # which servers still do not answer after an outage ended the flow; "": all do; None: no outage
    recoveries: int  # since the last step was committed
    allowed: RecoveryConfig


@dataclass(frozen=True, slots=True)
class Decision:
    action: Action
    reason: str


def decide(facts: Facts) -> Decision:
    """Reschedule a run only if its driver is dead, another try can help, and tries are left."""
    flow_run = facts.flow_run
    if facts.finished:
        return _leave("finished")
    if flow_run is None:
        return _leave(f"no flow run that this Prefect server knows; {_continue(facts)}")
    state = flow_run.state
    if state in _SETTLED:
        return _leave(_SETTLED[state])
    if not flow_run.deployed:
        return _leave(f"started in a terminal, so no worker can start it again; {_continue(facts)}")
    if state is StateType.FAILED and facts.failure is None and facts.outage is None:
        return _leave(f"failed outside the trainer: fix what its error says, then run {_retry(flow_run)}")
    if facts.driver_running:
        return _leave("its driver lives")
    if state in _ENDED and facts.outage:
        return _leave(f"ended by an outage that lasts; recover looks again later: {facts.outage}")
    if facts.failure is not None and facts.failure.final and facts.outage is None:
        return _leave(f"{facts.failure.kind}: another try would fail again; fix the cause, then run {_retry(flow_run)}")
    if state not in _ENDED and facts.sign_seen:
        return _leave(f"{state.value}, and it has just shown a sign of life")
    if state not in _ENDED and facts.silent_seconds < facts.allowed.silence_seconds:
        seconds = f"{facts.silent_seconds:.0f} of {facts.allowed.silence_seconds:.0f} s"
        return Decision(Action.WATCH, f"{state.value}, silent for {seconds}")
    if facts.recoveries >= facts.allowed.attempts:
        return _leave(
            f"tries used up: {facts.recoveries} recoveries without a step beyond {facts.committed_step}; "
            f"read trainer.log, then run {_retry(flow_run)}"
        )
    return Decision(Action.RESCHEDULE, _what_happened(facts, state))


_SETTLED = {
    StateType.COMPLETED: "Prefect's run is complete",
    StateType.CANCELLED: "cancelled by a person",
    StateType.CANCELLING: "being cancelled",
    StateType.PAUSED: "paused",
    StateType.SCHEDULED: "waits for a worker already",
}
_ENDED = (StateType.CRASHED, StateType.FAILED)


def _retry(flow_run: FlowRunFacts) -> str:
    return f".venv/bin/prefect flow-run retry {flow_run.flow_run_id}"


def _continue(facts: Facts) -> str:
    return f"continue it with .venv/bin/rlflow train EXPERIMENT --run-id {facts.run_id}"


def _leave(reason: str) -> Decision:
    return Decision(Action.LEAVE, reason)


def _what_happened(facts: Facts, state: StateType) -> str:
    if state in _ENDED:
        after = "an outage" if facts.outage is not None else facts.failure.kind if facts.failure else None
        what = f"{state.value}" + (f" after {after}" if after else "")
    else:
        what = f"{state.value}, but its driver is gone or silent for {facts.silent_seconds:.0f} s"
    then = f"follows the trainer {facts.trainer}" if facts.trainer else f"goes on from step {facts.committed_step}"
    return f"{what}; try {facts.recoveries + 1} of {facts.allowed.attempts} {then}"
