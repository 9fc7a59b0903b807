"""Grading in processes that can be killed, with a deadline for each completion.

Each worker is one thread here, one process, and a socket between them. There is no queue that processes
share, so one that dies, even while idle, cannot take a lock or the others with it.
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
KEPT_FAILURES = 3
MAX_ANSWER_BYTES = 1 << 20
WORKER = "rlcore.rewards.worker"
ENVIRONMENT = ("PATH", "LANG", "LD_LIBRARY_PATH")  # what an interpreter may need to start; no secrets
UNGRADED = Score(reward=0.0, parts={}, graded=False)


class GradingPool:
    """``Grader`` over processes of its own. Use it from any thread; close it, or use ``with``.

    A grading that takes longer than the deadline, raises, or whose process dies twice, gives an ungraded Score and
    is counted under that reason. The other completions are graded as if nothing had happened. After the first death a
    new process grades the completion again, because something else may have killed the process.

    A ``BatchRewardFn`` is called with all that a process is sent at once, n completions, and may take n deadlines.
    If that fails in any way (n deadlines are over, it raises, its process dies), the n are given to it one by one,
    so that only the culprits are lost; ``batch_failures`` counts this.

    The processes have no network, no secrets and no files but a scratch folder each (sandbox.py).
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
        """Start the processes and wait until all can grade.

        Args:
            reward: picklable, from a module that can be imported (so not from ``__main__``).
            processes: gradings that run at the same time.
            deadline_seconds: wall-clock time that one completion may take.
            start_seconds: wall-clock time that loading the reward may take.
            environment: names of variables that the reward may see in addition to ``ENVIRONMENT``.

        Raises:
            RewardError: the reward cannot be pickled, a process cannot load it, or a variable is not set.
        """
        payload, variables = _pickled(reward), _environment(environment)
        self.first_failure: str | None = None  # in words, of the first grading lost; a traceback if it raised
        self.first_traceback: str | None = None  # of the first reward that raised
        self._chunks_per_process = 1 if isinstance(reward, BatchRewardFn) else 4
        self._deadline = deadline_seconds
        self._lost: Counter[Reason] = Counter()
        self._last_failures: deque[str] = deque(maxlen=KEPT_FAILURES)
        self._lock = threading.Lock()  # guards the counters, the batches and _closed
        self._closed = False
        self._unfinished: set[_Batch] = set()
        self._chunks: queue.SimpleQueue[_Chunk | None] = queue.SimpleQueue()
        self._scratch = tempfile.TemporaryDirectory(prefix="rlflow-graders-", ignore_cleanup_errors=True)
        self._workers = [
            _Worker(
                payload,
                isinstance(reward, BatchRewardFn),
                start_seconds,
                variables,
                Path(self._scratch.name, str(index)),
            )
            for index in range(processes)
        ]
        ready: list[Future[None]] = [Future() for _ in range(processes)]
        self._threads = [
            threading.Thread(target=self._serve, args=pair, name="grading", daemon=True)
            for pair in zip(self._workers, ready, strict=True)
        ]
        for thread in self._threads:
            thread.start()
        try:
            for started in ready:
                started.result()
        except BaseException:
            self.close()
            raise
        if missing := self._workers[0].missing:
            logger.warning(
                "grading processes run without protection of: %s. This system refuses what takes it from them.",
                ", ".join(missing),
            )

    @property
    def timeouts(self) -> int:
        """Gradings killed at the deadline, since the pool was made."""
        return self._lost["timeout"]

    @property
    def errors(self) -> int:
        """Gradings in which the reward raised, or returned no finite Score."""
        return self._lost["error"]

    @property
    def deaths(self) -> int:
        """Gradings whose process died, or could not be started again."""
        return self._lost["death"]

    @property
    def batch_failures(self) -> int:
        """Calls of a ``BatchRewardFn`` that failed, and were made again one completion at a time."""
        return sum(worker.batch_failures for worker in self._workers)

    @property
    def first_batch_failure(self) -> str | None:
        """What the first of them was, in words; a traceback if it raised."""
        return next((worker.first_batch_failure for worker in self._workers if worker.first_batch_failure), None)

    def last_failures(self) -> list[str]:
        """What the latest gradings were lost to, in words, oldest first."""
        with self._lock:
            return list(self._last_failures)

    def submit(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> Future[list[Score]]:
        """Start grading completion i against problem i; the future holds the scores in the same order.

        The future cannot be cancelled, and fails only if the pool is closed before the scores are in.

        Raises:
            ValueError: not one problem per completion.
            RewardError: the pool is closed.
        """
        batch = _Batch(
            [
                (completion.text, problem, len(completion.token_ids), completion.finish_reason)
                for problem, completion in zip(problems, completions, strict=True)
            ]
        )
        count = len(batch.jobs)
        with self._lock:
            if self._closed:
                raise RewardError("the grading pool is closed. Submit before closing it.")
            if count:
                self._unfinished.add(batch)
            else:
                batch.future.set_result([])
        # several chunks per process, so that a slow answer holds up little of what is behind it
        size = max(1, min(MAX_CHUNK, -(-count // (self._chunks_per_process * len(self._workers)))))
        for start in range(0, count, size):
            self._chunks.put(_Chunk(batch, range(start, min(start + size, count))))
        return batch.future

    def close(self) -> None:
        """Kill every process, wait for it, and fail what was still being graded. Safe to call again."""
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

    def _serve(self, worker: _Worker, started: Future[None]) -> None:
        """One worker's thread. It makes the process, too: the kernel ends that with the thread behind it."""
        try:
            worker.start()
        except (RewardError, OSError) as error:
            started.set_exception(error)
            return
        started.set_result(None)
        while (chunk := self._chunks.get()) is not None:
            todo = chunk.indices
            while todo and not self._closed:
                graded = 0
                for verdict in worker.grade([chunk.batch.jobs[i] for i in todo], self._deadline):
                    self._record(chunk.batch, todo[graded], verdict)
                    graded += 1
                todo = todo[graded:]  # what was behind a completion that cost the process its life
        worker.stop()

    def _record(self, batch: _Batch, index: int, verdict: Score | _Failure) -> None:
        with self._lock:
            if batch not in self._unfinished:  # closed: the process was killed, and not by what it graded
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
        self._lost[failure.reason] += 1
        self._last_failures.append(f"problem {problem.problem_id}, {failure.reason}: {failure.detail.strip()}")
        if self.first_failure is None:
            self.first_failure = failure.detail
        if failure.reason == "error" and self.first_traceback is None:
            self.first_traceback = failure.detail
        if self._lost[failure.reason] == 1:
            logger.warning(
                "first grading lost to a %s, problem %s; further ones are only counted. %s",
                failure.reason,
                problem.problem_id,
                failure.detail,
            )


Reason = Literal["timeout", "error", "death"]


@dataclass(frozen=True, slots=True)
class _Failure:
    reason: Reason
    detail: str


class _Batch:
    """What one submit() asked for, and the scores so far by index."""

    def __init__(self, jobs: list[Job]) -> None:
        self.jobs = jobs
        self.scores: dict[int, Score] = {}
        self.future: Future[list[Score]] = Future()
        self.future.set_running_or_notify_cancel()


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    batch: _Batch
    indices: range


class _Worker:
    """One grading process at a time. ``retire`` may come from any thread, the rest from the worker's own."""

    def __init__(
        self, payload: bytes, batch: bool, start_seconds: float, variables: Mapping[str, str], scratch: Path
    ) -> None:
        self.missing: list[str] = []  # what the sandbox could not take away, in words
        self.batch_failures = 0
        self.first_batch_failure: str | None = None
        self._payload = payload  # the pickled reward
        self._batch = batch  # it is a BatchRewardFn
        self._start_seconds = start_seconds
        self._scratch = scratch
        self._variables = {**variables, "TMPDIR": str(scratch), "HOME": str(scratch)}
        self._lock = threading.Lock()  # a process is not started while the worker is retired
        self._retired = False
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def start(self) -> Connection:
        """Start a process, wait until it has loaded the reward, and return the line to it.

        Raises:
            RewardError: it cannot load the reward, or the worker is retired.
            OSError: the process died at once, or could not be made.
        """
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            if self._retired:
                ours.close()
                raise RewardError("the grading pool is closed.")
            self._connection = connection = Connection(ours.detach())
            shutil.rmtree(self._scratch, ignore_errors=True)  # what the last process left
            self._scratch.mkdir(mode=0o700)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", WORKER, str(theirs.fileno()), str(self._scratch)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=self._variables,
            )
        failure: str | None = f"It gave no sign of life for {self._start_seconds:g} s."
        try:
            connection.send_bytes(self._payload)
            if connection.poll(self._start_seconds):
                state = json.loads(connection.recv_bytes(MAX_ANSWER_BYTES))
                failure, self.missing = state["error"], state["missing"]
        except (EOFError, OSError) as error:
            failure = f"It died ({error!r}); its own words are on stderr."
        if failure is not None:
            self.stop()
            raise RewardError(f"a grading process could not load the reward. {failure}")
        return connection

    def grade(self, jobs: Sequence[Job], deadline_seconds: float) -> Iterator[Score | _Failure]:
        """Verdicts in order. They end early after a failure that cost the process its life."""
        if not self._batch or len(jobs) == 1:
            yield from self._ask(jobs, deadline_seconds, deadline_seconds)
            return
        verdicts = list(self._ask(jobs, len(jobs) * deadline_seconds, deadline_seconds, again=False))
        if len(verdicts) == len(jobs) and all(isinstance(verdict, Score) for verdict in verdicts):
            yield from verdicts
            return
        self.batch_failures += 1
        if self.batch_failures == 1:
            detail = next((verdict.detail for verdict in verdicts if isinstance(verdict, _Failure)), "")
            self.first_batch_failure = detail
            logger.warning("a batch of %d could not be graded at once, so one by one. %s", len(jobs), detail)
        for job in jobs:
            yield from self._ask([job], deadline_seconds, deadline_seconds)

    def _ask(
        self, jobs: Sequence[Job], first_seconds: float, deadline_seconds: float, *, again: bool = True
    ) -> Iterator[Score | _Failure]:
        """Send the jobs together. The first answer may take ``first_seconds``, each further one the deadline.

        Args:
            again: ask once more for the job whose process died.
        """
        try:
            payload = jobs_to_json(jobs)
        except Exception:  # noqa: BLE001 - a problem can hold anything; only its own gradings are lost
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
        """Kill the process for good; the worker's thread sees its line go dead."""
        with self._lock:
            self._retired = True
            process = self._process
        if process is not None:
            process.kill()
            process.wait()

    def _alive(self) -> Connection:
        if self._process is not None and self._connection is not None and self._process.poll() is None:
            return self._connection
        self.stop()  # it died idle, or was killed over the last completion
        return self.start()


def _pickled(reward: Reward) -> bytes:
    try:
        return pickle.dumps(reward)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise RewardError(
            f"the reward {reward!r} cannot be sent to a grading process: {error}. Make it a function at the "
            "top of a module, or a functools.partial of one."
        ) from None


def _environment(names: Sequence[str]) -> dict[str, str]:
    """The variables that start an interpreter and those named, the modules that we can import, and no thread pools."""
    if absent := [name for name in names if name not in os.environ]:
        raise RewardError(
            f"reward.environment names {', '.join(absent)}, which is not set where the trainer runs. "
            "Set it there, or take it off the list."
        )
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    kept = {name: os.environ[name] for name in (*ENVIRONMENT, *names) if name in os.environ}
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
