"""What the driver does about failures: classify, count, change and retry, and note an outage for recover.

Counts live in ``failures.jsonl`` of the run's folder. Only progress (a newer checkpoint) resets them, so a re-run of
the flow continues the count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from infra.errors import RegistryError, ServerRefusedError, StorageAwayError
from infra.errors import StorageError as InfraStorageError
from infra.logs import get_logger
from infra.settings import Settings
from rlcore.adjustments import Adjustments
from rlcore.config import ExperimentConfig
from rlcore.errors import (
    HealthError,
    MemoryExhaustedError,
    RetriesUsedUpError,
    RlflowError,
    RollbackError,
    StorageError,
    WorkerLostError,
)
from rlcore.failures import OUTAGES, Failure, classify, policy_of, with_free_space
from rlcore.files import write_json_atomically
from rlcore.process import oom_kills
from tasks.driver.health import Announce, announce_on_prefect, breach_of
from tasks.run import Run

ADJUSTMENTS = "adjustments.json"


class FailureRecord(BaseModel):
    """One failed try."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    at: datetime
    failure: Failure
    step: int  # committed when it failed
    attempt: int  # of this class since that step, from 1
    delay: float | None  # seconds until the next try; None: there is none
    error: str


def failure_of(error: object) -> Failure | None:
    """The failure class of an error that a task raised; None: a bug in rlflow, or not a failure to retry."""
    if isinstance(error, InfraStorageError):
        return Failure.BAD_INPUT if error.permanent else Failure.STORAGE
    if isinstance(error, RegistryError | ServerRefusedError):
        return Failure.BAD_INPUT
    return classify(error) if isinstance(error, BaseException) else None


@contextmanager
def handle_failures(run: Run, settings: Settings, *, announce: Announce = announce_on_prefect) -> Iterator[None]:
    """Around one try of a segment: count its failure and make the change that the next try needs.

    Raises:
        RetriesUsedUpError: the same class of failure as often as the table allows, without progress in between.
        ConfigError: out of memory, and the token budget cannot be halved again.
    """
    kills = oom_kills()
    try:
        yield
    except Exception as error:
        failure: Exception = error
        if isinstance(error, WorkerLostError) and oom_kills() > kills:
            failure = MemoryExhaustedError(f"{error}\nThe kernel has killed a process for memory meanwhile.")
        final = _handle(run, failure, settings, announce)
        if final is error:
            raise
        raise final from error


def read_adjustments(run: Run) -> Adjustments:
    path = run.run_dir / ADJUSTMENTS
    return Adjustments.model_validate_json(path.read_text()) if path.exists() else Adjustments()


def wait_for_next_try(run: Run, *, sleep: Callable[[float], None] = time.sleep) -> None:
    """Before a retry: wait for the rest of the delay after the last failure."""
    records = FailureLog(run.run_dir).read()
    if not records or not records[-1].delay:
        return
    # At most the delay: the clock of the host that failed may be ahead of this one's.
    rest = min(records[-1].delay, records[-1].at.timestamp() + records[-1].delay - time.time())
    if rest > 0:
        get_logger().info("train: the next try starts in %.0f s", rest)
    ends = time.monotonic() + rest
    while (left := ends - time.monotonic()) > 0:
        sleep(min(1.0, left))  # in short pieces, so that a cancelled flow can end


class FailureLog:
    """``failures.jsonl`` of one run. On a full disk it keeps the records in memory until it can write them."""

    _unwritten: dict[Path, list[FailureRecord]] = {}

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "failures.jsonl"

    def read(self) -> list[FailureRecord]:
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        return [*map(FailureRecord.model_validate_json, lines), *self._unwritten.get(self._path, [])]

    def add(self, record: FailureRecord) -> None:
        records = [*self.read(), record]
        try:
            write_json_atomically(self._path, "".join(f"{item.model_dump_json()}\n" for item in records))
        except OSError as error:
            get_logger().warning("train: %s cannot be written for now: %s", self._path, error)
            self._unwritten.setdefault(self._path, []).append(record)
        else:
            self._unwritten.pop(self._path, None)


def _handle(run: Run, error: Exception, settings: Settings, announce: Announce) -> Exception:
    """Record the failure, make the change for the next try, and return the error to raise."""
    failure = failure_of(error)
    if failure is None:
        return error
    try:
        _change_for(run, failure, error, announce)
    except RlflowError as refusal:  # no change can help
        error, failure = refusal, failure_of(refusal) or Failure.UNKNOWN
    if failure == Failure.STORAGE and not isinstance(error, StorageError | InfraStorageError):
        error = with_free_space(error, run.run_dir)
    policy, step = policy_of(failure), run.committed_step()
    log = FailureLog(run.run_dir)
    attempt = 1 + sum((record.failure, record.step) == (failure, step) for record in log.read())
    waited = isinstance(error, StorageAwayError)  # for the store, as long as the table says
    retried = attempt <= len(policy.delays) and not waited
    delay = policy.delays[attempt - 1] * settings.retry_delay_scale if retried else None
    log.add(
        FailureRecord(
            at=datetime.now(UTC), failure=failure, step=step, attempt=attempt, delay=delay, error=str(error)[-2000:]
        )
    )
    if retried:
        get_logger().warning("train: %s, try %d of %d follows", failure, attempt, len(policy.delays))
        return error
    if not policy.delays or waited:
        return error
    return RetriesUsedUpError(
        f"{error}\n\n{failure}: {attempt} times since step {step} was committed, and only "
        f"{len(policy.delays)} retries are allowed. {policy.advice} Then continue the run: it goes on from step {step}."
    )


def _change_for(run: Run, failure: Failure, error: Exception, announce: Announce) -> None:
    """Make the change that the table of failures asks for before the next try.

    Raises:
        ConfigError: the token budget cannot be halved again.
    """
    adjustments = read_adjustments(run)
    if failure == Failure.OUT_OF_MEMORY:
        adjustments = adjustments.with_less_memory(run.experiment)
        get_logger().warning(
            "train: out of memory; training.tokens_per_microbatch is %d from now on, the gradient stays the same",
            adjustments.tokens_per_microbatch,
        )
    elif isinstance(error, RollbackError):
        breach, step = breach_of(run, adjustments), run.committed_step()
        adjustments = adjustments.rolled_back(
            step, run.experiment, factor=breach.rule.learning_rate_factor, rule=str(breach.rule)
        )
        change = adjustments.interventions[-1]
        announce(
            run,
            breach,
            f"Rolled back to step {step} (rollback {adjustments.rollbacks} of {breach.rule.max_rollbacks}); from there "
            f"on the learning rate is {change.learning_rate_factor:g} times the configured one, and the sampling seed "
            f"is {change.seed}.",
        )
    elif isinstance(error, HealthError):
        breach, step = breach_of(run, adjustments), run.committed_step()
        adjustments = adjustments.paused(step)
        announce(run, breach, f"Paused at step {step}, which is committed. Continue the run to go on from there.")
    else:
        return
    write_json_atomically(run.run_dir / ADJUSTMENTS, adjustments.model_dump_json(indent=1))


_NOTE = "outage.json"


class Outage(BaseModel):
    """Why a flow ended: ``outage.json`` in the run's folder."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    at: float  # seconds since the epoch
    failure: Failure
    error: str


def read_outage(run: Run) -> Outage | None:
    """The outage that ended the flow, if one did since the last driver started."""
    if not run.changed_since_driver(_NOTE):
        return None
    return Outage.model_validate_json((run.run_dir / _NOTE).read_bytes())


@contextmanager
def note_outages(run: Run) -> Iterator[None]:
    """Around the flow: if an outage ends it, write a note into the run's folder."""
    try:
        yield
    except Exception as error:
        note_outage(run, error)
        raise


def unopened_runs(settings: Settings) -> list[Run]:
    """Stand-ins for the runs of flows that ended before they could open their run."""
    return [unopened_run(path.parent.name) for path in sorted(settings.unopened_dir.glob("*/drivers.jsonl"))]


def unopened_run(run_id: str) -> Run:
    return Run(run_id=run_id, run_dir=Settings().unopened_dir / run_id, experiment=ExperimentConfig(name="unopened"))


def note_outage(run: Run, error: Exception) -> None:
    """Write a note of an outage into the run's folder; other errors leave no note."""
    failure = outage_of(error)
    if failure is not None:
        note = Outage(at=time.time(), failure=failure, error=str(error)[-2000:])
        write_json_atomically(run.run_dir / _NOTE, note.model_dump_json(indent=1))


def outage_of(error: Exception) -> Failure | None:
    """The class of the outage that an error tells of; None: it tells of none."""
    failure = failure_of(error.__cause__ if isinstance(error, RetriesUsedUpError) else error)
    return failure if failure in OUTAGES else None
