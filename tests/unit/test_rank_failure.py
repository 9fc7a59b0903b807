"""Which rank failed first, and how its error travels."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest

from rlcore.distributed.ranks import LocalRanks, RankFailure, RankRange, first_of, portable
from rlcore.errors import (
    MemoryExhaustedError,
    SamplerError,
    StorageError,
    TrainerFailedError,
    WorkerLostError,
    WorkerTraceback,
)


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


class Unpicklable(Exception):
    def __init__(self, reason: str, connection: object) -> None:
        super().__init__(reason)


def failed(rank: int, at: float, error: Exception, *, died: bool = False) -> RankFailure:
    return RankFailure(rank, f"pid {rank} on node", at, error, f"Traceback of rank {rank}", died)


def test_a_dead_process_comes_before_the_errors_that_it_causes() -> None:
    collective = failed(0, 1.0, RuntimeError("Connection closed by peer"))
    gone = failed(1, 1.5, WorkerLostError("rank 1 is gone"), died=True)
    assert first_of([collective, gone]) is gone
    assert first_of([gone]) is gone


def test_the_earliest_error_comes_first() -> None:
    late = failed(0, 2.0, RuntimeError("timed out in a collective"))
    early = failed(3, 1.0, ValueError("the real one"))
    assert first_of([late, early]) is early


def test_the_error_is_raised_with_the_traceback_of_its_rank() -> None:
    try:
        raise SamplerError("weights differ")
    except SamplerError as error:
        travelled = pickle.loads(pickle.dumps(RankFailure.of(2, error)))
    raised = travelled.raised()
    assert type(raised) is SamplerError
    assert isinstance(raised.__cause__, WorkerTraceback)
    assert str(raised.__cause__).startswith("Traceback (most recent call last):")
    assert "raise SamplerError" in str(raised.__cause__)
    assert "(rank 2, pid " in str(raised.__cause__)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("v"), ValueError),
        (SamplerError("s"), SamplerError),
        (OutOfMemoryError("CUDA out of memory"), MemoryExhaustedError),
        (Unpicklable("u", object()), TrainerFailedError),
        (Unpicklable("[Errno 28] No space left on device", None), StorageError),
    ],
)
def test_an_error_that_cannot_be_unpickled_is_replaced(error: Exception, kind: type[Exception]) -> None:
    travelling = portable(error)
    assert type(travelling) is kind
    assert str(error) in str(travelling)


def test_every_finished_call_is_progress() -> None:
    class Worker:
        def add(self, a: int, b: int) -> int:
            return a + b

        def count(self, upto: int) -> Iterator[int]:
            yield from range(upto)

        def saved(self) -> bool:
            return False

    progress: list[int] = []
    ranks = RankRange[Worker](LocalRanks(Worker()), 0, 1, lambda: progress.append(1))
    assert ranks.call(lambda worker, own: worker.add(*own), [(1, 2)]) == [3]
    assert len(progress) == 1
    assert list(ranks.stream(Worker.count, [2])) == [(0, 0), (0, 1)]
    assert len(progress) == 3
    assert ranks.ask(Worker.saved) == [False]  # asked every moment while a checkpoint is written, or hangs
    assert len(progress) == 3
    assert ranks.each(Worker.saved) == [False]
    assert len(progress) == 4
