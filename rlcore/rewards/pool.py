"""Grading in processes that can be killed, with a deadline for each completion.

Each worker is a thread here, a process, and a socket between them. Processes share no queue, so that one that dies
cannot keep a lock or take the others with it.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import queue
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal, Self

from rlcore.errors import RewardError
from rlcore.rewards.protocol import BatchRewardFn, Job, Reward, answer_from_json, jobs_to_json
from rlcore.types import Completion, Problem, Score

logger = logging.getLogger(__name__)

MAX_CHUNK = 32  # completions sent to a process at once
START_SECONDS = 120.0  # a cold file system can take long to import sympy
MAX_ANSWER_BYTES = 1 << 20
WORKER = "rlcore.rewards.worker"
ENVIRONMENT = ("PATH", "LANG", "LD_LIBRARY_PATH")  # what an interpreter may need to start; no secrets
UNGRADED = Score(reward=0.0, parts={}, graded=False)


class GradingPool:
    """A ``Grader`` that runs the reward in processes. Safe from any thread; close it, or use ``with``.

    A completion is ungraded, and counted by reason, if its grading exceeds the deadline, raises, or loses its process
    twice. After the first death another process tries again, because something else may have killed the process. Other
    completions are not affected.

    A ``BatchRewardFn`` gets the n completions of a chunk in one call, which may take n deadlines. If that call fails in
    any way, it gets them one by one, so that only the culprits are ungraded; ``batch_failures`` counts these calls.

    The processes have no network, no secrets, and no files but a scratch folder each (sandbox.py).
    """

    def __init__(
        self,
        reward: Reward,
        processes: int,
        deadline_seconds: float,
        *,
        start_seconds: float = START_SECONDS,
        environment: Sequence[str] = (),
    ) -> None:
        """Start the processes and wait until all have loaded the reward.

        Args:
            reward: picklable, from an importable module (not ``__main__``).
            processes: gradings at the same time.
            deadline_seconds: wall-clock time per completion.
            start_seconds: wall-clock time to load the reward.
            environment: variables that the reward may read, in addition to ``ENVIRONMENT``.

        Raises:
            RewardError: the reward cannot be pickled, a process cannot load it, or a variable is not set.
        """
        payload, variables = _pickled(reward), _environment(environment)
        together = isinstance(reward, BatchRewardFn)
        self._chunks_per_process = 1 if together else 4
        self._deadline = deadline_seconds
        self.ungraded: Counter[Reason] = Counter()  # completions by reason
        self._last_failures: deque[str] = deque(maxlen=3)
        self._lock = threading.Lock()  # guards the counters, the batches and _closed
        self._closed = False
        self._unfinished: set[_Batch] = set()
        self._chunks: queue.SimpleQueue[tuple[_Batch, range] | None] = queue.SimpleQueue()
        self._scratch = tempfile.TemporaryDirectory(prefix="rlflow-graders-", ignore_cleanup_errors=True)
        folders = [Path(self._scratch.name, str(index)) for index in range(processes)]
        self._workers = [_Worker(payload, together, start_seconds, variables, folder) for folder in folders]
        self._threads = [
            threading.Thread(target=self._serve, args=(worker,), name="grading", daemon=True)
            for worker in self._workers
        ]
        for thread in self._threads:
            thread.start()
        try:
            for worker in self._workers:
                worker.started.result()
        except BaseException:
            self.close()
            raise
        if missing := ", ".join(self._workers[0].missing):
            logger.warning("grading processes run without protection of: %s (unsupported on this system)", missing)

    @property
    def batch_failures(self) -> int:
        """Calls of a ``BatchRewardFn`` that failed and were repeated one completion at a time."""
        return sum(worker.batch_failures for worker in self._workers)

    @property
    def first_batch_failure(self) -> str | None:
        """Why the first of them failed; a traceback if it raised."""
        return next((worker.first_batch_failure for worker in self._workers if worker.first_batch_failure), None)

    def last_failures(self) -> list[str]:
        """Why the latest ungraded completions are ungraded, oldest first."""
        with self._lock:
            return list(self._last_failures)

    def take_metrics(self) -> dict[str, float]:
        """Grading processes have no figures of their own."""
        return {}

    def submit(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> Future[list[Score]]:
        """Start grading completion i against problem i; the future holds the scores in the same order.

        The future cannot be cancelled. It fails only if the pool is closed before all scores are known.

        Raises:
            ValueError: the numbers of problems and completions differ.
            RewardError: the pool is closed.
        """
        pairs = zip(problems, completions, strict=True)
        batch = _Batch([(c.text, problem, len(c.token_ids), c.finish_reason) for problem, c in pairs])
        count = len(batch.jobs)
        with self._lock:
            if self._closed:
                raise RewardError("the grading pool is closed. Submit before closing it.")
            if count:
                self._unfinished.add(batch)
            else:
                batch.future.set_result([])
        # Several chunks per process, so that few completions wait for a slow one.
        size = max(1, min(MAX_CHUNK, -(-count // (self._chunks_per_process * len(self._workers)))))
        for start in range(0, count, size):
            self._chunks.put((batch, range(start, min(start + size, count))))
        return batch.future

    def close(self) -> None:
        """Kill all processes, wait for them, and fail the futures of unfinished batches. May be called twice."""
        with self._lock:
            self._closed = True
            unfinished, self._unfinished = self._unfinished, set()
        for worker in self._workers:
            worker.retire()
            self._chunks.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._scratch.cleanup()
        for batch in unfinished:
            batch.future.set_exception(RewardError("the grading pool was closed while this was being graded."))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self, worker: _Worker) -> None:
        """A worker's thread. It also starts the process, because the kernel kills the process when this thread ends."""
        try:
            worker.start()
        except (RewardError, OSError) as error:
            worker.started.set_exception(error)
            return
        worker.started.set_result(None)
        while (chunk := self._chunks.get()) is not None:
            batch, todo = chunk
            while todo and not self._closed:
                graded = 0
                for verdict in worker.grade([batch.jobs[i] for i in todo], self._deadline):
                    self._record(batch, todo[graded], verdict)
                    graded += 1
                todo = todo[graded:]  # the completions after one that killed the process
        worker.stop()

    def _record(self, batch: _Batch, index: int, verdict: Score | _Failure) -> None:
        with self._lock:
            if batch not in self._unfinished:  # closed: the pool killed the process, not the completion
                return
            batch.scores[index] = verdict if isinstance(verdict, Score) else UNGRADED
            if isinstance(verdict, _Failure):
                self._count(verdict, batch.jobs[index][1])
            finished = len(batch.scores) == len(batch.jobs)
            if finished:
                self._unfinished.remove(batch)
        if finished:
            batch.future.set_result([batch.scores[i] for i in range(len(batch.jobs))])

    def _count(self, failure: _Failure, problem: Problem) -> None:
        self.ungraded[failure.reason] += 1
        self._last_failures.append(f"problem {problem.problem_id}, {failure.reason}: {failure.detail.strip()}")
        if self.ungraded[failure.reason] == 1:
            logger.warning(
                "first completion ungraded by a %s, problem %s. Further ones are counted, not logged. %s",
                failure.reason,
                problem.problem_id,
                failure.detail,
            )


Reason = Literal["timeout", "error", "death"]
"""Killed at the deadline; raised, or returned something else than a finite Score; the process died twice."""


@dataclass(frozen=True, slots=True)
class _Failure:
    reason: Reason
    detail: str


class _Batch:
    """The jobs of one submit() and the scores so far, by index."""

    def __init__(self, jobs: list[Job]) -> None:
        self.jobs = jobs
        self.scores: dict[int, Score] = {}
        self.future: Future[list[Score]] = Future()
        self.future.set_running_or_notify_cancel()


class _Worker:
    """Starts, uses and replaces one grading process. Only ``retire`` may be called from another thread."""

    def __init__(
        self, payload: bytes, batch: bool, start_seconds: float, variables: Mapping[str, str], scratch: Path
    ) -> None:
        self.started: Future[None] = Future()
        self.missing: list[str] = []  # what the sandbox could not take away
        self.batch_failures = 0
        self.first_batch_failure: str | None = None
        self._payload = payload  # the pickled reward
        self._batch = batch  # whether it is a BatchRewardFn
        self._start_seconds = start_seconds
        self._scratch = scratch
        self._variables = {**variables, "TMPDIR": str(scratch), "HOME": str(scratch)}
        self._lock = threading.Lock()  # no process starts while the worker is retired
        self._retired = False
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def start(self) -> Connection:
        """Start a process, wait until it has loaded the reward, and return the connection to it.

        Raises:
            RewardError: it cannot load the reward, or the worker is retired.
            OSError: the process could not be started, or died at once.
        """
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            if self._retired:
                ours.close()
                raise RewardError("the grading pool is closed.")
            self._connection = connection = Connection(ours.detach())
            shutil.rmtree(self._scratch, ignore_errors=True)  # files of the last process
            self._scratch.mkdir(mode=0o700)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", WORKER, str(theirs.fileno()), str(self._scratch)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=self._variables,
            )
        failure: str | None = f"It did not answer within {self._start_seconds:g} s."
        try:
            connection.send_bytes(self._payload)
            if connection.poll(self._start_seconds):
                state = json.loads(connection.recv_bytes(MAX_ANSWER_BYTES))
                failure, self.missing = state["error"], state["missing"]
        except (EOFError, OSError) as error:
            failure = f"It died ({error!r}). See its output on stderr."
        if failure is not None:
            self.stop()
            raise RewardError(f"a grading process could not load the reward. {failure}")
        return connection

    def grade(self, jobs: Sequence[Job], deadline_seconds: float) -> Iterator[Score | _Failure]:
        """Verdicts in order. They end early after a failure that killed the process."""
        if not self._batch or len(jobs) == 1:
            yield from self._ask(jobs, deadline_seconds, deadline_seconds)
            return
        verdicts = list(self._ask(jobs, len(jobs) * deadline_seconds, deadline_seconds, again=False))
        if len(verdicts) == len(jobs) and all(isinstance(verdict, Score) for verdict in verdicts):
            yield from verdicts
            return
        self.batch_failures += 1
        if self.batch_failures == 1:
            self.first_batch_failure = next((v.detail for v in verdicts if isinstance(v, _Failure)), "")
            logger.warning(
                "a batch of %d completions failed and is graded one by one. %s", len(jobs), self.first_batch_failure
            )
        for job in jobs:
            yield from self._ask([job], deadline_seconds, deadline_seconds)

    def _ask(
        self, jobs: Sequence[Job], first_seconds: float, deadline_seconds: float, *, again: bool = True
    ) -> Iterator[Score | _Failure]:
        """Send the jobs together. The first answer may take ``first_seconds``, each later one ``deadline_seconds``.

        Args:
            again: repeat the job whose process died once.
        """
        try:
            payload = jobs_to_json(jobs)
        except Exception:  # noqa: BLE001 - a problem can hold anything; only its own completions are ungraded
            if len(jobs) == 1:
                yield _Failure("error", traceback.format_exc())
            else:
                for job in jobs:
                    yield from self._ask([job], deadline_seconds, deadline_seconds)
            return
        try:
            connection = self._alive()
        except (RewardError, OSError) as error:
            yield from (_Failure("death", repr(error)) for _ in jobs)
            return
        answered = 0
        try:
            connection.send_bytes(payload)
            seconds = first_seconds
            for _ in jobs:
                if not connection.poll(seconds):
                    self.stop()
                    yield _Failure("timeout", f"It took longer than {seconds:g} s and was killed.")
                    return
                seconds = deadline_seconds
                answer = answer_from_json(connection.recv_bytes(MAX_ANSWER_BYTES))
                yield answer if isinstance(answer, Score) else _Failure("error", answer)
                answered += 1
        except (EOFError, OSError):
            code = self.stop()
            if again:
                yield from self._ask(jobs[answered : answered + 1], deadline_seconds, deadline_seconds, again=False)
            else:
                yield _Failure("death", f"The process ended with {code}.")
        except ValueError as error:
            self.stop()
            yield _Failure("death", f"{error}, and was killed.")

    def stop(self) -> int | None:
        """Kill the process, wait for it, and return its exit code."""
        process, self._process = self._process, None
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        if process is None:
            return None
        process.kill()
        return process.wait()

    def retire(self) -> None:
        """Kill the process for good. The worker's thread sees its connection close."""
        with self._lock:
            self._retired = True
            process = self._process
        if process is not None:
            process.kill()
            process.wait()

    def _alive(self) -> Connection:
        if self._process is not None and self._connection is not None and self._process.poll() is None:
            return self._connection
        self.stop()  # it died idle, or was killed after the last completion
        return self.start()


def _pickled(reward: Reward) -> bytes:
    try:
        return pickle.dumps(reward)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise RewardError(
            f"the reward {reward!r} cannot be sent to a grading process: {error}. Make it a function at the "
            "top of a module, or a functools.partial of such a function."
        ) from None


def _environment(names: Sequence[str]) -> dict[str, str]:
    """The variables of a grading process: what an interpreter needs, ``names``, our import path, no thread pools."""
    if absent := [name for name in names if name not in os.environ]:
        raise RewardError(
            f"reward.environment names {', '.join(absent)}, which is not set in the trainer's environment. "
            "Set it there, or remove it from the list."
        )
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    allowed = {name: os.environ[name] for name in (*ENVIRONMENT, *names) if name in os.environ}
    return {**allowed, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
