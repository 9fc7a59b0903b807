"""Why a trainer failed, and what is done about it: the one table. No torch.

The trainer's process turns its error into an exit code by it, the segment task turns exit code and report into a
retry, a delay and a change, and docs/reliability.md prints it.
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
EXIT_PREEMPTED = 75  # told to stop; the last checkpoint is committed
EXIT_OUT_OF_MEMORY = 76
EXIT_DIVERGED = 77
EXIT_BAD_CONFIG = 78  # never retried; too few groups with signal as well
EXIT_WORKER_LOST = 79
EXIT_UNGRADED = 80
EXIT_STORAGE = 81
EXIT_PAUSED = 82  # a health rule; the checkpoint is committed
EXIT_ROLLBACK = 83  # a health rule; nothing is committed since the last segment


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
    """What is done about one class of failure."""

    failure: Failure
    means: str
    exit_code: int | None  # of the trainer's process; None: not the trainer finds it
    errors: tuple[type[Exception], ...]
    delays: tuple[float, ...]  # seconds before try 1, 2, ... after it without progress between; empty: never retried
    change: str  # before the retry
    advice: str  # to the user, once it is final


POLICIES: tuple[Policy, ...] = (
    Policy(
        Failure.OUT_OF_MEMORY,
        "torch finds no GPU memory, or the kernel or Ray kills a process for the host's",
        EXIT_OUT_OF_MEMORY,
        (MemoryExhaustedError, MemoryError),
        (5, 5, 10, 10, 10, 10),
        "half of `training.tokens_per_microbatch`, down to one longest sequence; the gradient stays the same",
        "Lower training.tokens_per_microbatch, rollout.max_sequences or rollout.gpu_memory_utilization, or set "
        "rollout.sleep to always or training.offload to true.",
    ),
    Policy(
        Failure.WORKER_LOST,
        "the process of a rank, the trainer's own, or a node is gone",
        EXIT_WORKER_LOST,
        (WorkerLostError,),
        (5, 30, 120),
        "fresh workers, from the last checkpoint",
        "See what ended the process: the message has Ray's words, the kernel's log the rest.",
    ),
    Policy(
        Failure.HANG,
        "no progress for `segment.hang_minutes`, the start included",
        None,
        (HangError,),
        (5, 30, 120),
        "the stacks of all threads are kept in `stacks/` of the run's folder, everything of the run is killed",
        "Read the stacks; raise segment.hang_minutes if the work is slow and not stuck.",
    ),
    Policy(
        Failure.DIVERGED,
        "more than `training.max_nonfinite_steps` steps in a row had a non-finite gradient; each was skipped, counted",
        EXIT_DIVERGED,
        (DivergedError,),
        (),
        "",
        "Lower training.learning_rate, or look at reward/ and loss/ of the steps before.",
    ),
    Policy(
        Failure.UNGRADED,
        "more than `reward.max_ungraded_share` of a batch could not be graded",
        EXIT_UNGRADED,
        (UngradedError,),
        (5, 30),
        "fresh grading processes",
        "Mend the reward, give it more reward.deadline_seconds, or raise reward.max_ungraded_share.",
    ),
    Policy(
        Failure.STORAGE,
        "no space, a read-only folder, an I/O error, a damaged checkpoint",
        EXIT_STORAGE,
        (StorageError,),
        (10, 30, 60, 120, 180, 300),
        "nothing; what is committed stays, what was staged goes",
        "Free space, make the folder writable, or bring the object store back.",
    ),
    Policy(
        Failure.TRACKING,
        "MLflow or Prefect does not answer; training goes on, its end waits `RLFLOW_TRACKING_WAIT_SECONDS` for MLflow",
        None,
        (ConnectionError,),
        (30, 60, 120, 300),
        "nothing; the journal holds every step",
        "Start the server again, then continue the run.",
    ),
    Policy(
        Failure.BAD_INPUT,
        "the experiment, the data, the model or the reward cannot work as they are",
        EXIT_BAD_CONFIG,
        (ConfigError, DataError, ModelError, RewardError),
        (),
        "",
        "Change what the message names.",
    ),
    Policy(
        Failure.STARVED,
        "dynamic sampling finds too few groups with signal, and `if_short` is fail",
        EXIT_BAD_CONFIG,
        (StarvedError,),
        (),
        "",
        "Raise algorithm.dynamic_sampling.max_rounds, or take easier or harder problems.",
    ),
    Policy(
        Failure.PREEMPTED,
        "somebody else told the trainer to stop; it has committed its checkpoint",
        EXIT_PREEMPTED,
        (PreemptedError,),
        (5, 30, 120),
        "from that checkpoint",
        "See who stops the trainer.",
    ),
    Policy(
        Failure.PAUSED,
        "a health rule with `action: pause`, or a rollback too many; the checkpoint is committed",
        EXIT_PAUSED,
        (HealthError,),
        (),
        "",
        "Look at the metrics; continuing the run goes on, and its rules count from there.",
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
        "The traceback above and the trainer's log say more.",
    ),
)
OUTAGES = frozenset({Failure.STORAGE, Failure.TRACKING})
"""Failures of a service that may be back later; what has been done is not lost meanwhile."""
_BY_FAILURE = {policy.failure: policy for policy in POLICIES}
_STORAGE_ERRNOS = frozenset(
    {errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.ESTALE, errno.EFBIG}
)
# torch writes checkpoints in C++ and by threads: of the error number only its words are left.
_STORAGE_WORDS = (*(f"[Errno {number}]" for number in sorted(_STORAGE_ERRNOS)), "file write failed")
_MEMORY_WORDS = ("out of memory", "low on memory", "can't allocate memory", "Cannot allocate memory")


def policy_of(failure: Failure) -> Policy:
    return _BY_FAILURE[failure]


def classify(error: BaseException) -> Failure | None:
    """The class of an error of the trainer or of the task that follows it; None: a mistake in our own code."""
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
    """Of a trainer that stops for ``error``."""
    failure = classify(error)
    code = None if failure is None else policy_of(failure).exit_code
    return EXIT_UNKNOWN if code is None else code


def error_of_exit(code: int, said: str) -> RlflowError:
    """What to raise for a trainer that left an exit code and no report.

    Args:
        said: the code in words.
    """
    if code < 0:
        return WorkerLostError(f"the trainer ended with {said}")
    policy = next((policy for policy in POLICIES if policy.exit_code == code), policy_of(Failure.UNKNOWN))
    kind = policy.errors[0]
    error = kind if issubclass(kind, RlflowError) and kind is not RlflowError else TrainerFailedError
    return error(f"the trainer ended with {said}, which means {policy.failure}. {policy.advice}".rstrip(". "))


def with_free_space(error: Exception, folder: Path) -> StorageError:
    """The same failure with what the disk has to say. A damaged checkpoint is no matter of space."""
    if isinstance(error, CheckpointError):
        return error
    text = str(error) if isinstance(error, StorageError) else f"{type(error).__name__}: {error}"
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    return StorageError(
        f"{text}\nThe disk of {folder} has {free / 2**20:.0f} MiB free. Free space there, or make the folder writable; "
        "what is committed is safe, and the run goes on from it."
    )


def table() -> str:
    """Markdown, for docs/reliability.md."""
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
    # our own messages quote settings and texts of others; only foreign ones are taken by their words
    return not isinstance(error, RlflowError) and any(word in str(error) for word in words)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what it came from."""
    seen: list[BaseException] = []
    item: BaseException | None = error
    while item is not None and item not in seen:
        seen.append(item)
        item = item.__cause__ or (None if item.__suppress_context__ else item.__context__)
    return iter(seen)
