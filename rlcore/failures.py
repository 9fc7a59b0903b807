"""The table of failure classes: why a trainer failed, and how the run reacts. No torch.

The trainer's process turns its error into an exit code, the segment task turns exit code and report into a retry, a
delay and a change, and docs/reliability.md prints the table.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from rlcore.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DivergedError,
    HangError,
    HealthError,
    MemoryExhaustedError,
    ModelError,
    PreemptedError,
    RetriesUsedUpError,
    RewardError,
    RlflowError,
    RollbackError,
    StarvedError,
    StorageError,
    TrainerFailedError,
    UngradedError,
    WorkerLostError,
)

EXIT_DONE = 0
EXIT_UNKNOWN = 1
EXIT_PREEMPTED = 75  # told to stop; the last step is committed
EXIT_OUT_OF_MEMORY = 76
EXIT_DIVERGED = 77
EXIT_BAD_CONFIG = 78  # never retried; also for too few groups with signal
EXIT_WORKER_LOST = 79
EXIT_UNGRADED = 80
EXIT_STORAGE = 81
EXIT_PAUSED = 82  # by a health rule; the last step is committed
EXIT_ROLLBACK = 83  # by a health rule; nothing is committed since the last segment


class Failure(StrEnum):
    OUT_OF_MEMORY = "out of memory"
    WORKER_LOST = "worker or node death"
    HANG = "hang"
    DIVERGED = "diverged"
    UNGRADED = "reward failure"
    STORAGE = "storage outage"
    TRACKING = "tracking outage"
    BAD_INPUT = "bad config or data"
    STARVED = "starved"
    PREEMPTED = "preempted"
    PAUSED = "health: pause"
    ROLLBACK = "health: rollback"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Policy:
    """The reaction to one class of failure."""

    failure: Failure
    means: str
    exit_code: int | None  # of the trainer's process; None: the trainer does not detect this failure
    errors: tuple[type[Exception], ...]
    delays: tuple[float, ...]  # seconds before each retry while there is no progress; empty: never retried
    change: str  # made before the retry
    advice: str  # for the user, after the last retry


POLICIES: tuple[Policy, ...] = (
    Policy(
        Failure.OUT_OF_MEMORY,
        "torch runs out of GPU memory, or the kernel or Ray kills a process because the host's memory is full",
        EXIT_OUT_OF_MEMORY,
        (MemoryExhaustedError, MemoryError),
        (5, 5, 10, 10, 10, 10),
        "half of `training.tokens_per_microbatch`, but at least one longest sequence; the gradient stays the same",
        "Lower training.tokens_per_microbatch, rollout.max_sequences or rollout.gpu_memory_utilization, or set "
        "rollout.sleep to always or training.offload to true.",
    ),
    Policy(
        Failure.WORKER_LOST,
        "the process of a rank, the trainer, or a node died",
        EXIT_WORKER_LOST,
        (WorkerLostError,),
        (1, 30, 120),
        "fresh workers, from the last checkpoint",
        "Find out what ended the process: read Ray's part of the message and the kernel's log.",
    ),
    Policy(
        Failure.HANG,
        "no progress for `segment.hang_minutes`, also during the start",
        None,
        (HangError,),
        (5, 30, 120),
        "the stacks of all threads are saved in `stacks/` of the run's folder, and all processes of the run are killed",
        "Read the stacks. Raise segment.hang_minutes if the work is slow but not stuck.",
    ),
    Policy(
        Failure.DIVERGED,
        "more than `training.max_nonfinite_steps` steps in a row had a non-finite gradient; each was skipped",
        EXIT_DIVERGED,
        (DivergedError,),
        (),
        "",
        "Lower training.learning_rate, or look at reward/ and loss/ of the previous steps.",
    ),
    Policy(
        Failure.UNGRADED,
        "more than `reward.max_ungraded_share` of a batch could not be graded, or a judge does not answer for "
        "`reward.judge.outage_minutes`",
        EXIT_UNGRADED,
        (UngradedError,),
        (5, 30),
        "fresh grading processes; verdicts of a judge are kept",
        "Fix the reward or the judge, raise reward.deadline_seconds, or raise reward.max_ungraded_share.",
    ),
    Policy(
        Failure.STORAGE,
        "no space, a read-only folder, an I/O error, a damaged checkpoint",
        EXIT_STORAGE,
        (StorageError,),
        (10, 30, 60, 120, 180, 300),
        "nothing; committed checkpoints stay, unfinished ones are removed",
        "Free space, make the folder writable, or make the object store reachable.",
    ),
    Policy(
        Failure.TRACKING,
        "MLflow or Prefect does not answer; the end of training waits `RLFLOW_TRACKING_WAIT_SECONDS` for MLflow",
        None,
        (ConnectionError,),
        (30, 60, 120, 300),
        "nothing; the journal has every step",
        "Start the server again, then continue the run.",
    ),
    Policy(
        Failure.BAD_INPUT,
        "the experiment, the data, the model or the reward cannot work as configured",
        EXIT_BAD_CONFIG,
        (ConfigError, DataError, ModelError, RewardError),
        (),
        "",
        "Change what the message names.",
    ),
    Policy(
        Failure.STARVED,
        "dynamic sampling found too few groups with signal, and `if_short` is fail",
        EXIT_BAD_CONFIG,
        (StarvedError,),
        (),
        "",
        "Raise algorithm.dynamic_sampling.max_rounds, or use easier or harder problems.",
    ),
    Policy(
        Failure.PREEMPTED,
        "something outside rlflow told the trainer to stop; the last step is committed",
        EXIT_PREEMPTED,
        (PreemptedError,),
        (5, 30, 120),
        "from that checkpoint",
        "Find out what stops the trainer.",
    ),
    Policy(
        Failure.PAUSED,
        "a health rule with `action: pause`, or after `max_rollbacks`; the last step is committed",
        EXIT_PAUSED,
        (HealthError,),
        (),
        "",
        "Look at the metrics. You can continue the run; its rules then start to count anew.",
    ),
    Policy(
        Failure.ROLLBACK,
        "a health rule with `action: rollback`, at most its `max_rollbacks` times",
        EXIT_ROLLBACK,
        (RollbackError,),
        (0,) * 50,
        "from the last checkpoint, with the rule's `learning_rate_factor` and another sampling seed",
        "",
    ),
    Policy(
        Failure.UNKNOWN,
        "anything else",
        EXIT_UNKNOWN,
        (RlflowError, OSError),
        (5, 30, 120),
        "fresh processes, from the last checkpoint",
        "See the traceback above and the trainer's log.",
    ),
)
OUTAGES = frozenset({Failure.STORAGE, Failure.TRACKING})
"""Failures of a service that may recover by itself. No finished work is lost meanwhile."""
_BY_FAILURE = {policy.failure: policy for policy in POLICIES}
_STORAGE_ERRNOS = frozenset(
    {errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.ESTALE, errno.EFBIG}
)
# torch writes checkpoints in C++ threads, whose errors have only the text of the error number.
_STORAGE_WORDS = (*(f"[Errno {number}]" for number in sorted(_STORAGE_ERRNOS)), "file write failed")
_MEMORY_WORDS = ("out of memory", "low on memory", "can't allocate memory", "Cannot allocate memory")


def policy_of(failure: Failure) -> Policy:
    return _BY_FAILURE[failure]


def classify(error: BaseException) -> Failure | None:
    """The class of an error of the trainer or of the task that follows it; None: a bug in rlflow."""
    if isinstance(error, RetriesUsedUpError):
        return None
    for item in _chain(error):
        if "OutOfMemoryError" in type(item).__name__ or _says(item, _MEMORY_WORDS):
            return Failure.OUT_OF_MEMORY
        if isinstance(item, OSError) and item.errno in _STORAGE_ERRNOS:
            return Failure.STORAGE
    for policy in POLICIES:
        if isinstance(error, policy.errors) and policy.failure != Failure.UNKNOWN:
            return policy.failure
    if not isinstance(error, RlflowError) and any(_says(item, _STORAGE_WORDS) for item in _chain(error)):
        return Failure.STORAGE
    return Failure.UNKNOWN if isinstance(error, policy_of(Failure.UNKNOWN).errors) else None


def exit_code(error: Exception) -> int:
    """The exit code of a trainer that stops because of ``error``."""
    failure = classify(error)
    code = None if failure is None else policy_of(failure).exit_code
    return EXIT_UNKNOWN if code is None else code


def error_of_exit(code: int, said: str) -> RlflowError:
    """The error to raise for a trainer that left an exit code but no report.

    Args:
        said: the code as text.
    """
    if code < 0:
        return WorkerLostError(f"the trainer ended with {said}")
    policy = next((policy for policy in POLICIES if policy.exit_code == code), policy_of(Failure.UNKNOWN))
    kind = policy.errors[0]
    error = kind if issubclass(kind, RlflowError) and kind is not RlflowError else TrainerFailedError
    return error(f"the trainer ended with {said}, which means {policy.failure}. {policy.advice}".rstrip(". "))


def with_free_space(error: Exception, folder: Path) -> StorageError:
    """The same failure with the free space of the disk. A damaged checkpoint has nothing to do with space."""
    if isinstance(error, CheckpointError):
        return error
    text = str(error) if isinstance(error, StorageError) else f"{type(error).__name__}: {error}"
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    return StorageError(
        f"{text}\nThe disk of {folder} has {free / 2**20:.0f} MiB free. Free space there, or make the folder writable. "
        "Committed checkpoints are safe, and the run continues from the last one."
    )


def table() -> str:
    """The table in Markdown, for docs/reliability.md."""
    rows = ["| class | what it is | exit code | retried after | changed before the retry | once final |"]
    rows.append("| --- | --- | --- | --- | --- | --- |")
    for policy in POLICIES:
        code = "" if policy.exit_code is None else str(policy.exit_code)
        cells = (policy.failure, policy.means, code, _delays(policy), policy.change, policy.advice)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _delays(policy: Policy) -> str:
    if not policy.delays:
        return "never"
    if policy.failure == Failure.ROLLBACK:
        return "at once"
    return ", ".join(f"{delay:g}" for delay in policy.delays) + " s"


def _says(error: BaseException, words: tuple[str, ...]) -> bool:
    # Our own messages quote settings and foreign texts, so only foreign errors are classified by their text.
    return not isinstance(error, RlflowError) and any(word in str(error) for word in words)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and its causes."""
    seen: list[BaseException] = []
    item: BaseException | None = error
    while item is not None and item not in seen:
        seen.append(item)
        item = item.__cause__ or (None if item.__suppress_context__ else item.__context__)
    return iter(seen)
