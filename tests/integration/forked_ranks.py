"""Ranks as processes forked from this one. They compute what ``RayRanks`` computes and start at once: torch, vLLM and
transformers are loaded already, where each actor of Ray's imports them for ten seconds."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from ray import cloudpickle

from rlcore.config import ExperimentConfig
from rlcore.distributed.actors import worker_environment, worker_specs
from rlcore.distributed.placement import Seat
from rlcore.distributed.ranks import RankFailure
from rlcore.distributed.worker import WorkerSpec
from rlcore.errors import WorkerLostError
from tests.ports import reserved_port

_BUILT = 0  # the number of the answer that says that a rank is built

A = TypeVar("A")
R = TypeVar("R")

Answers = SimpleQueue[tuple[int, bool, Any]]  # rank, whether it is the rank's last answer, result


class ForkedRanks:
    """Implements ``Ranks``. Make it before this process has threads: a fork copies only the thread that forks."""

    def __init__(
        self,
        make: Callable[[WorkerSpec], object],
        *,
        model: Path,
        dataset: Path,
        config: ExperimentConfig,
        device: str,
        teacher: Path | None = None,
    ) -> None:
        self.size = config.resources.devices
        self._answers: dict[int, Answers] = {_BUILT: SimpleQueue()}
        self._lock = threading.Lock()
        seats = [Seat("127.0.0.1", (reserved_port(), reserved_port()), 0, {}, ()) for _ in range(self.size)]
        context = multiprocessing.get_context("fork")
        self._pipes: list[Connection] = []
        self._processes = []
        for spec in worker_specs(seats, config, model=model, dataset=dataset, device=device, teacher=teacher):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(make, spec, theirs, [*self._pipes, ours]), daemon=True)
            process.start()
            theirs.close()  # the rank alone holds it, so its end is seen
            self._pipes.append(ours)
            self._processes.append(process)
        for rank in range(self.size):
            threading.Thread(target=self._read, args=(rank,), daemon=True).start()
        self._results(self._answers[_BUILT], self.size)

    def call(self, action: Callable[[Any, A], R], arguments: Sequence[A], first: int = 0) -> list[R]:
        results = self._results(self._ask(action, arguments, first, streams=False), len(arguments))
        return [results[rank] for rank in sorted(results)]

    def stream(
        self, action: Callable[[Any, A], Iterator[R]], arguments: Sequence[A], first: int = 0
    ) -> Iterator[tuple[int, R]]:
        answers, left = self._ask(action, arguments, first, streams=True), len(arguments)
        while left:
            rank, is_last, item = answers.get()
            if isinstance(item, RankFailure):
                raise item.raised()
            if is_last:
                left -= 1
            else:
                yield rank - first, item

    def close(self) -> None:
        for process in self._processes:
            process.kill()  # an engine takes seconds to shut down, and there is nothing left to keep
            process.join()

    def _ask(self, action: Callable[[Any, A], object], arguments: Sequence[A], first: int, *, streams: bool) -> Answers:
        """The ranks take calls one after the other, as Ray's actors do."""
        with self._lock:
            number = len(self._answers)
            self._answers[number] = SimpleQueue()
            for rank, own in enumerate(arguments, first):
                self._pipes[rank].send_bytes(cloudpickle.dumps((number, action, own, streams)))
        return self._answers[number]

    def _results(self, answers: Answers, count: int) -> dict[int, Any]:
        results = {}
        for _ in range(count):
            rank, _, result = answers.get()
            if isinstance(result, RankFailure):
                raise result.raised()
            results[rank] = result
        return results

    def _read(self, rank: int) -> None:
        with suppress(EOFError, OSError):
            while True:
                number, is_last, result = pickle.loads(self._pipes[rank].recv_bytes())
                self._answers[number].put((rank, is_last, result))
        lost = RankFailure(rank, "", time.time(), WorkerLostError(f"rank {rank} is gone"), "", died=True)
        for answers in list(self._answers.values()):
            answers.put((rank, True, lost))


def _serve(
    make: Callable[[WorkerSpec], object], spec: WorkerSpec, pipe: Connection, inherited: Sequence[Connection]
) -> None:
    for end in inherited:
        end.close()
    os.environ.update(worker_environment(spec.device, spec.config.resources))

    def answer(number: int, is_last: bool, result: Any) -> None:
        pipe.send_bytes(pickle.dumps((number, is_last, result)))

    try:
        worker = make(spec)
    except Exception as error:  # noqa: BLE001 - the driver raises it
        answer(_BUILT, True, RankFailure.of(spec.rank, error))
        return
    answer(_BUILT, True, None)
    while True:
        try:
            number, action, argument, streams = pickle.loads(pipe.recv_bytes())
        except EOFError:
            os._exit(0)  # the driver is gone
        try:
            result = action(worker, argument)
            if streams:
                for item in result:
                    answer(number, False, item)
                result = None
            answer(number, True, result)
        except Exception as error:  # noqa: BLE001 - the driver raises it
            answer(number, True, RankFailure.of(spec.rank, error))
