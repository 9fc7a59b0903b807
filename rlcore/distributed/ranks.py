"""The ranks of a run, as one object to call, and which of them failed first.

An action is a function of a rank's worker: ``lambda worker: ...``.
"""

from __future__ import annotations

import builtins
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from rlcore.errors import MemoryExhaustedError, RlflowError, StorageError, TrainerFailedError, WorkerTraceback
from rlcore.failures import Failure, classify

W_co = TypeVar("W_co", covariant=True)
A = TypeVar("A")
R = TypeVar("R")


class Ranks(Protocol):
    """How the ranks are reached: Ray actors, or one object in this process."""

    @property
    def size(self) -> int: ...

    def call(self, action: Callable[[Any, A], R], arguments: Sequence[A], first: int = 0) -> list[R]:
        """Call ``action(worker, arguments[i])`` on rank ``first + i``, for all i at once; results in this order. Raises
        the first failure.

        The action travels to the rank with everything that it refers to, so it should refer to little.
        """

    def stream(
        self, action: Callable[[Any, A], Iterator[R]], arguments: Sequence[A], first: int = 0
    ) -> Iterator[tuple[int, R]]:
        """The same for an action that yields: i and item, in the order of arrival."""


class LocalRanks:
    """One rank in this process."""

    size = 1

    def __init__(self, worker: object) -> None:
        self._worker = worker

    def call(self, action: Callable[[Any, A], R], arguments: Sequence[A], first: int = 0) -> list[R]:
        (only,) = arguments
        return [action(self._worker, only)]

    def stream(
        self, action: Callable[[Any, A], Iterator[R]], arguments: Sequence[A], first: int = 0
    ) -> Iterator[tuple[int, R]]:
        (only,) = arguments
        return ((0, item) for item in action(self._worker, only))


def _nothing() -> None:
    pass


@dataclass(frozen=True)  # no slots: with them typing cannot mark RankRange[W](...), and Python 3.11 raises TypeError
class RankRange(Generic[W_co]):
    """Consecutive ranks that hold workers of type ``W_co``."""

    ranks: Ranks
    first: int
    size: int
    on_progress: Callable[[], None] = _nothing  # called after every call, and every item of a stream

    def call(self, action: Callable[[W_co, A], R], arguments: Sequence[A]) -> list[R]:
        """As ``Ranks.call``, with an argument for each rank."""
        results = self.ranks.call(action, arguments, self.first)
        self.on_progress()
        return results

    def each(self, action: Callable[[W_co], R]) -> list[R]:
        """The same action on every rank."""
        results = self.ask(action)
        self.on_progress()
        return results

    def ask(self, action: Callable[[W_co], R]) -> list[R]:
        """The same for a question that is repeated while something is under way: an answer is no progress."""
        return self.ranks.call(lambda worker, _: action(worker), [None] * self.size, self.first)

    def stream(self, action: Callable[[W_co, A], Iterator[R]], arguments: Sequence[A]) -> Iterator[tuple[int, R]]:
        for item in self.ranks.stream(action, arguments, self.first):
            self.on_progress()
            yield item


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
