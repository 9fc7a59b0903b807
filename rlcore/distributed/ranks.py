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
    """Calls workers on the ranks: Ray actors, or one object in this process."""

    @property
    def size(self) -> int: ...

    def call(self, action: Callable[[Any, A], R], arguments: Sequence[A], first: int = 0) -> list[R]:
        """Call ``action(worker, arguments[i])`` on rank ``first + i``, for all i at once. Returns the results in order.

        Raises the first failure. The action is pickled with everything that it refers to, so it should refer to little.
        """

    def stream(
        self, action: Callable[[Any, A], Iterator[R]], arguments: Sequence[A], first: int = 0
    ) -> Iterator[tuple[int, R]]:
        """The same for an action that yields. Yields (i, item) in the order of arrival."""


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


@dataclass(frozen=True)  # no slots: in Python 3.11 RankRange[W](...) raises TypeError with them
class RankRange(Generic[W_co]):
    """Consecutive ranks with workers of type ``W_co``."""

    ranks: Ranks
    first: int
    size: int
    on_progress: Callable[[], None] = lambda: None  # called after every call and every item of a stream

    def call(self, action: Callable[[W_co, A], R], arguments: Sequence[A]) -> list[R]:
        """``Ranks.call`` with one argument per rank."""
        results = self.ranks.call(action, arguments, self.first)
        self.on_progress()
        return results

    def each(self, action: Callable[[W_co], R]) -> list[R]:
        """Call the same action on every rank."""
        results = self.ask(action)
        self.on_progress()
        return results

    def ask(self, action: Callable[[W_co], R]) -> list[R]:
        """Like ``each``, for a question that is repeated while the ranks work: an answer is no progress."""
        return self.ranks.call(lambda worker, _: action(worker), [None] * self.size, self.first)

    def stream(self, action: Callable[[W_co, A], Iterator[R]], arguments: Sequence[A]) -> Iterator[tuple[int, R]]:
        for item in self.ranks.stream(action, arguments, self.first):
            self.on_progress()
            yield item


@dataclass(frozen=True, slots=True)
class RankFailure:
    """A call that failed on one rank. The rank returns it instead of raising it, so that Ray does not wrap it.

    A rank that dies makes the others fail in their collective a moment later: the driver looks for the first failure.
    """

    rank: int
    where: str  # pid and node
    at: float  # seconds since the epoch, by the node's clock
    error: Exception
    traceback: str
    died: bool = False  # the process is gone; ``error`` quotes Ray

    @classmethod
    def of(cls, rank: int, error: Exception) -> RankFailure:
        """Call it in the ``except`` block of ``error``."""
        where = f"pid {os.getpid()} on {socket.gethostname()}"
        return cls(rank, where, time.time(), portable(error), traceback.format_exc())

    def raised(self) -> Exception:
        """The error, for the driver to raise, with the rank's traceback as its cause."""
        self.error.__cause__ = WorkerTraceback(f"{self.traceback.rstrip()}\n(rank {self.rank}, {self.where})")
        return self.error


def first_of(failures: Sequence[RankFailure]) -> RankFailure:
    """The cause of the others: a process that died, else the earliest error."""
    return min(failures, key=lambda failure: (not failure.died, failure.at))


def portable(error: Exception) -> Exception:
    """The error itself if other processes can unpickle it without importing a library, else one of rlflow's."""
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
    except Exception:  # noqa: BLE001 - pickling raises whatever its contents raise
        return False
