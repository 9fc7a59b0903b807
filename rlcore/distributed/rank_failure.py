"""Which rank failed first, and with what: a dead rank makes the others fail in their collective a moment later."""

from __future__ import annotations

import builtins
import os
import pickle
import socket
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from rlcore.errors import MemoryExhaustedError, RlflowError, StorageError, TrainerFailedError, WorkerTraceback
from rlcore.failures import Failure, classify


@dataclass(frozen=True, slots=True)
class RankFailure:
    """A call that failed on one rank. Returned to the driver instead of raised, so that Ray does not wrap it."""

    rank: int
    where: str  # pid and node
    at: float  # seconds since the epoch, by the clock of that node
    error: Exception
    traceback: str
    died: bool = False  # the process is gone; ``error`` quotes Ray

    @classmethod
    def of(cls, rank: int, error: Exception) -> RankFailure:
        """Call it where ``error`` is being handled."""
        where = f"pid {os.getpid()} on {socket.gethostname()}"
        return cls(rank, where, time.time(), portable(error), traceback.format_exc())

    def raised(self) -> Exception:
        """The error, to be raised by the driver, with the traceback of the rank as its cause."""
        self.error.__cause__ = WorkerTraceback(f"{self.traceback.rstrip()}\n(rank {self.rank}, {self.where})")
        return self.error


def first_of(failures: Sequence[RankFailure]) -> RankFailure:
    """The cause: a process that died, else the earliest error. A dead process makes the other ranks raise errors."""
    return min(failures, key=lambda failure: (not failure.died, failure.at))


def portable(error: Exception) -> Exception:
    """The error itself if another process can unpickle it without importing a library; else one of ours."""
    ours = isinstance(error, RlflowError) or type(error).__module__ == builtins.__name__
    if ours and _picklable(error):
        return error
    text = f"{type(error).__name__}: {error}"
    match classify(error):
        case Failure.OUT_OF_MEMORY:
            return MemoryExhaustedError(text)
        case Failure.STORAGE:
            return StorageError(text)
        case _:
            return TrainerFailedError(text)


def _picklable(error: Exception) -> bool:
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)
    except Exception:  # noqa: BLE001 - whatever it holds, it cannot be pickled
        return False
