"""What to do about a run that has not finished: the facts, and one pure function that decides.

What counts is the run's folder (manifests, lease, drivers), never Prefect's state alone: a stopped worker leaves its
flow run RUNNING for ever, a server outage hides that one has ended, and a blind reschedule runs what is complete again.
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
    state_id: str  # changes with every state: who acts on one looks whether it still holds
    state: StateType
    deployed: bool  # a worker started it, so a worker can start it again


@dataclass(frozen=True, slots=True)
class LastFailure:
    """Of the trainer, since the last driver started."""

    kind: str
    final: bool  # another start would only repeat it, or its own tries are used up


@dataclass(frozen=True, slots=True)
class Facts:
    """All that a decision rests on."""

    run_id: str
    finished: bool  # the flow's last step is done
    steps: int
    committed_step: int
    flow_run: FlowRunFacts | None  # None: no flow drove it, or this server does not know it
    driver_running: bool | None  # the flow's process; None: it cannot be looked up from this host
    silent_seconds: float  # for how long recover has seen no sign of life: at the first look 0
    sign_seen: bool  # one has come since recover first looked
    trainer: str | None  # the living holder of the lease
    failure: LastFailure | None
    outage: str | None  # it ended the flow, and what still does not answer; "": all does again; None: no outage did
    recoveries: int  # since the last step was committed
    allowed: RecoveryConfig


@dataclass(frozen=True, slots=True)
class Decision:
    action: Action
    reason: str


def decide(facts: Facts) -> Decision:
    """Reschedule only what a dead driver has left undone, what another try can mend, and what has tries left."""
    flow_run = facts.flow_run
    if facts.finished:
        return _leave("finished")
    if flow_run is None:
        return _leave("no flow run that this Prefect server knows; continue it with --run-id")
    state = flow_run.state
    if state in _SETTLED:
        return _leave(_SETTLED[state])
    if not flow_run.deployed:
        return _leave("started in a terminal, where no worker can start it again; continue it with --run-id")
    if state is StateType.FAILED and facts.failure is None and facts.outage is None:
        return _leave("failed outside the trainer: mend what its error says, then prefect flow-run retry")
    if facts.driver_running:
        return _leave("its driver lives")
    if state in _ENDED and facts.outage:
        return _leave(f"ended by an outage that lasts, and is looked at again: {facts.outage}")
    if facts.failure is not None and facts.failure.final and facts.outage is None:
        return _leave(f"{facts.failure.kind}: another try would end alike; mend it, then prefect flow-run retry")
    if state not in _ENDED and facts.sign_seen:
        return _leave(f"{state.value}, and it has just given a sign of life")
    if state not in _ENDED and facts.silent_seconds < facts.allowed.silence_seconds:
        seconds = f"{facts.silent_seconds:.0f} of {facts.allowed.silence_seconds:.0f} s"
        return Decision(Action.WATCH, f"{state.value}, silent for {seconds}")
    if facts.recoveries >= facts.allowed.attempts:
        return _leave(
            f"tries used up: {facts.recoveries} recoveries brought no step beyond {facts.committed_step}; look at "
            "trainer.log, then prefect flow-run retry"
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
