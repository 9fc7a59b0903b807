"""The ranks of a run, as one object to call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    pass


class Ranks(Protocol):
    """How the ranks are reached: Ray actors, or one object in this process."""

    size: int

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]], first: int = 0) -> list[Any]:
        """Call ``method(*arguments[i])`` on rank ``first + i``, for all i at once; results in this order. The first
        failure is raised."""

    def stream(self, method: str, arguments: Sequence[tuple[Any, ...]], first: int = 0) -> Iterator[tuple[int, Any]]:
        """The same for a method that yields: i and item, as they come."""


class LocalRanks:
    """One rank in this process."""

    size = 1

    def __init__(self, worker: object) -> None:
        self._worker = worker

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]], first: int = 0) -> list[Any]:
        (only,) = arguments
        return [getattr(self._worker, method)(*only)]

    def stream(self, method: str, arguments: Sequence[tuple[Any, ...]], first: int = 0) -> Iterator[tuple[int, Any]]:
        (only,) = arguments
        return ((0, item) for item in getattr(self._worker, method)(*only))


_QUESTIONS = frozenset({"saved"})  # asked again and again while something is under way: an answer is no progress


class WatchedRanks:
    """Ranks that say after every call that does something, and every item of a stream, that there was progress."""

    def __init__(self, ranks: Ranks, on_progress: Callable[[], None]) -> None:
        self._ranks = ranks
        self._on_progress = on_progress
        self.size = ranks.size

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]], first: int = 0) -> list[Any]:
        results = self._ranks.call(method, arguments, first)
        if method not in _QUESTIONS:
            self._on_progress()
        return results

    def stream(self, method: str, arguments: Sequence[tuple[Any, ...]], first: int = 0) -> Iterator[tuple[int, Any]]:
        for item in self._ranks.stream(method, arguments, first):
            self._on_progress()
            yield item


class RankRange:
    """Some ranks that follow each other, as if they were all."""

    def __init__(self, ranks: Ranks, start: int, size: int) -> None:
        self._ranks, self._start, self.size = ranks, start, size

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]], first: int = 0) -> list[Any]:
        return self._ranks.call(method, arguments, self._start + first)

    def stream(self, method: str, arguments: Sequence[tuple[Any, ...]], first: int = 0) -> Iterator[tuple[int, Any]]:
        return self._ranks.stream(method, arguments, self._start + first)
