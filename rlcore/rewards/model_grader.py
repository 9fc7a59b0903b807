"""Grading by a reward model in a process of its own: batches of what waits, and a journal of all raw scores.

A score is on disk before it becomes a reward, as a judge's verdict is. A batch depends on what happens to wait, and
rounding depends on the batch, so without the journal a run that is killed and continued could get other last digits.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Self

from rlcore.config.reward import ScoringModelConfig, folder_fingerprint
from rlcore.errors import RewardError
from rlcore.rewards.dapo import LengthRule
from rlcore.rewards.formatted import is_well_formed
from rlcore.rewards.pool import UNGRADED
from rlcore.rewards.scoring import Chat, ScoringModel, ScoringProcess, chat_of, key_of
from rlcore.rewards.thoughts import ThoughtRule
from rlcore.rewards.verdicts import Verdict, VerdictJournal
from rlcore.types import Completion, Problem, Score

logger = logging.getLogger(__name__)

_MAX_FAILURES = 3


@dataclass(frozen=True, slots=True)
class _Item:
    """One conversation to score."""

    key: str
    chat: Chat
    problem_id: str


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """Completions that were submitted together."""

    pairs: Sequence[tuple[Problem, Completion]]
    future: Future[list[Score]]


def mapped(raw: float, config: ScoringModelConfig) -> float:
    """The score of a logit: standardised, then on the configured scale."""
    value = (raw - config.mean) / config.std
    if config.scale == "raw":
        return value
    return 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))


class ModelGrader:
    """A ``Grader`` that asks a reward model. Safe from any thread; close it, or use ``with``."""

    def __init__(
        self,
        config: ScoringModelConfig,
        folder: Path,
        *,
        first_free_gpu: int | None = None,
        thoughts: ThoughtRule | None = None,
        length: LengthRule | None = None,
        on_progress: Callable[[], None] = lambda: None,
        start: Callable[[ScoringModelConfig, int | None], ScoringModel] = ScoringProcess,
    ) -> None:
        """
        Args:
            folder: of the journal of scores.
            first_free_gpu: as ``ScoringProcess``.
            thoughts: score only the text after the thought.
            length: penalty that is added to the score.
            on_progress: called after each batch. Whatever it raises ends all gradings.
            start: loads the model.

        Raises:
            RewardError: the model cannot be used.
            StorageError: the journal is damaged.
        """
        self._config, self._thoughts, self._length, self._on_progress = config, thoughts, length, on_progress
        self._journal = VerdictJournal(folder)
        self._process = start(config, first_free_gpu)
        self._fingerprint = folder_fingerprint(config.path)
        logger.info(
            "the reward model %s, fingerprint %s, is on %s",
            *(config.path, self._fingerprint[:16], self._process.device),
        )
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._fatal: BaseException | None = None
        self._closed = False
        self._lock = threading.Lock()  # guards the next three
        self._counts: Counter[str] = Counter()
        self._seconds = 0.0
        self._failures: list[str] = []
        self._thread = threading.Thread(target=self._work, name="reward-model", daemon=True)
        self._thread.start()

    def last_failures(self) -> list[str]:
        """Why the latest ungraded completions are ungraded, oldest first."""
        with self._lock:
            return list(self._failures)

    def take_metrics(self) -> Mapping[str, float]:
        """Figures since the last call. ``scored``: by the model. ``replayed``: from the journal. ``seconds``: that the
        model was at work."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
            seconds, self._seconds = self._seconds, 0.0
        return {
            "reward_model/scored": float(counts["scored"]),
            "reward_model/replayed": float(counts["replayed"]),
            "reward_model/ungraded": float(counts["ungraded"]),
            "reward_model/seconds": seconds,
        }

    def submit(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> Future[list[Score]]:
        """Start grading completion i against problem i; the future holds the scores in the same order. It fails with
        an error of the model's process, of the journal, or of ``on_progress``.

        Raises:
            ValueError: the numbers of problems and completions differ.
            RewardError: the grader is closed.
        """
        job = _Job(list(zip(problems, completions, strict=True)), Future())
        if self._closed:
            raise RewardError("the grader of the reward model is closed. Submit before closing it.")
        self._jobs.put(job)
        return job.future

    def close(self) -> None:
        """End the process, and fail the futures of unfinished gradings. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._fatal = self._fatal or RewardError("the grader was closed while this was being graded.")
        self._process.close()
        self._jobs.put(None)
        self._thread.join()
        self._journal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _work(self) -> None:
        """Take all jobs that wait, score what they need in batches, and answer them."""
        ended = False
        while not ended:
            waiting = [self._jobs.get()]
            try:
                while True:
                    waiting.append(self._jobs.get_nowait())
            except Empty:
                pass
            ended = None in waiting
            jobs = [job for job in waiting if job is not None]
            try:
                self._score_missing(jobs)
                answers = [[self._score(*pair) for pair in job.pairs] for job in jobs]
            except BaseException as error:  # noqa: BLE001 - the futures raise it
                self._fatal = self._fatal or error
                for job in jobs:
                    job.future.set_exception(self._fatal)
                continue
            for job, scores in zip(jobs, answers, strict=True):
                job.future.set_result(scores)

    def _score_missing(self, jobs: Sequence[_Job]) -> None:
        pairs = [pair for job in jobs for pair in job.pairs]
        items = [self._item(*pair) for pair in pairs]
        missing = {item.key: item for item in items if item.key not in self._journal.known}
        todo, size = list(missing.values()), self._config.batch_size
        self._count(scored=len(todo), replayed=len(items) - len(todo))
        for start in range(0, len(todo), size):
            if self._fatal is not None:
                raise self._fatal
            batch, began = todo[start : start + size], time.monotonic()
            scores = self._process.score([item.chat for item in batch])
            now = time.time_ns() // 1_000_000
            self._journal.append([_verdict(item, score, now) for item, score in zip(batch, scores, strict=True)])
            with self._lock:
                self._seconds += time.monotonic() - began
            self._on_progress()

    def _item(self, problem: Problem, completion: Completion) -> _Item:
        text, thoughts = completion.text, self._thoughts
        chat = chat_of(problem, text if thoughts is None else thoughts.graded_text(thoughts.read(text, problem)))
        return _Item(key_of(self._fingerprint, self._config, chat), chat, problem.problem_id)

    def _score(self, problem: Problem, completion: Completion) -> Score:
        config, thoughts = self._config, self._thoughts
        verdict = self._journal.known[self._item(problem, completion).key]
        if verdict.score is None:
            self._note_failure(verdict)
            return UNGRADED
        score = mapped(verdict.score, config)
        parts = {"accuracy": min(1.0, max(0.0, score)), "raw_score": verdict.score}
        reward = score
        if config.format_weight:
            parts["format"] = float(is_well_formed(completion.text, config.format))
            reward = (1 - config.format_weight) * score + config.format_weight * parts["format"]
        result = Score(reward, parts, graded=True)
        if thoughts is not None:
            result = thoughts.add_part(result, thoughts.read(completion.text, problem))
        return result if self._length is None else self._length.apply(result, len(completion.token_ids))

    def _count(self, **numbers: int) -> None:
        with self._lock:
            self._counts.update(numbers)

    def _note_failure(self, verdict: Verdict) -> None:
        with self._lock:
            self._counts["ungraded"] += 1
            self._failures = [*self._failures, f"problem {verdict.problem_id}, reward model: {verdict.reason}"]
            self._failures = self._failures[-_MAX_FAILURES:]


def _verdict(item: _Item, score: float | str, timestamp_ms: int) -> Verdict:
    reason = score if isinstance(score, str) else ""
    return Verdict(item.key, None if isinstance(score, str) else score, reason, item.problem_id, 1, 0, timestamp_ms)
