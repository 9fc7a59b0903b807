"""Grading by a judge model over HTTP: bounded concurrency, retries, a budget, and a journal of all verdicts.

A completion is identified by what the judge would be asked about it: question, pictures, reference answer, text, rubric
and model. The same request is made once per run. Its verdict is on disk before it becomes a reward, so a run that is
killed and continued gets the same rewards, although the judge would answer differently the second time.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self

from rlcore.config.reward import JudgeConfig
from rlcore.endpoint import Answered, Away, Denied, Failed, Refused, delay_before
from rlcore.errors import BudgetSpentError, RewardError
from rlcore.rewards.dapo import LengthRule
from rlcore.rewards.judge_endpoint import judge_denied, judge_endpoint, judge_key, judge_silence
from rlcore.rewards.pool import UNGRADED
from rlcore.rewards.rubric import Question, Rubric, opinion_in
from rlcore.rewards.thoughts import ThoughtRule
from rlcore.rewards.verdicts import Verdict, VerdictJournal
from rlcore.types import Completion, Problem, Score

logger = logging.getLogger(__name__)

_WATCH_SECONDS = 1.0


class JudgeGrader:
    """A ``Grader`` that asks a judge. Safe from any thread; close it, or use ``with``."""

    def __init__(
        self,
        config: JudgeConfig,
        folder: Path,
        *,
        thoughts: ThoughtRule | None = None,
        length: LengthRule | None = None,
        on_progress: Callable[[], None] = lambda: None,
        on_retry: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            folder: of the verdict journal.
            thoughts: judge only the text after the thought.
            length: penalty that is added to the judge's score.
            on_progress: called while the judge answers, and while the run waits for it. Whatever it raises ends all
                gradings.
            on_retry: called once a second while a call is repeated or the judge is away. Whatever it raises ends all
                gradings, and calls under way are cut off if the judge is away.

        Raises:
            RewardError: the rubric or the key cannot be used.
            StorageError: the journal is damaged.
        """
        self._config = config
        self._rubric = Rubric(config)
        self._key = judge_key(config)
        self._thoughts, self._length = thoughts, length
        self._on_progress, self._on_retry = on_progress, on_retry
        self._journal = VerdictJournal(folder)
        self._calls, self._tokens = self._journal.calls, self._journal.tokens  # spent by the run
        self._in_flight = 0
        self._repeated = 0  # calls that wait for their next try
        self._silence = judge_silence(config)
        self._asking: dict[str, asyncio.Task[Verdict]] = {}
        self._unwritten: list[tuple[Verdict, asyncio.Future[None]]] = []
        self._writer: asyncio.Task[None] | None = None
        self._fatal: BaseException | None = None  # ends this and every later grading
        self._lock = threading.Lock()  # guards the next four
        self._counts: Counter[str] = Counter()
        self._seconds = 0.0  # of the counted calls
        self._last_failures: deque[str] = deque(maxlen=3)
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="judge", daemon=True)
        self._thread.start()
        self._run(self._open()).result()
        if self._journal.known:
            logger.info(
                "the judge's journal has %d verdicts, of %d calls and %d tokens",
                *(len(self._journal.known), self._calls, self._tokens),
            )

    async def _open(self) -> None:
        self._endpoint = judge_endpoint(self._config, self._key)
        self._slots = asyncio.Semaphore(self._config.concurrency)
        self._changed = asyncio.Condition()
        self._watcher = asyncio.create_task(self._watch())

    def last_failures(self) -> list[str]:
        """Why the latest ungraded completions are ungraded, oldest first."""
        with self._lock:
            return list(self._last_failures)

    def take_metrics(self) -> dict[str, float]:
        """Figures since the last call, and what the run has spent.

        ``calls``: answered ones. ``retries``: of calls that failed, or whose answer was invalid. ``replayed``: scores
        from the journal, without a call. ``ungraded``: completions without a valid verdict. ``outage_seconds``: of
        outages that have ended. ``seconds_mean``: of an answered call; left out if there was none.
        """
        with self._lock:
            counts, self._counts = self._counts, Counter()
            seconds, self._seconds = self._seconds, 0.0
        metrics = {
            "judge/calls": float(counts["calls"]),
            "judge/tokens": float(counts["tokens"]),
            "judge/retries": float(counts["retries"]),
            "judge/replayed": float(counts["replayed"]),
            "judge/ungraded": float(counts["ungraded"]),
            "judge/outage_seconds": self._silence.take_seconds(),
            "judge/calls_of_run": float(self._calls),
            "judge/tokens_of_run": float(self._tokens),
        }
        if counts["calls"]:
            metrics["judge/seconds_mean"] = seconds / counts["calls"]
        return metrics

    def submit(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> Future[list[Score]]:
        """Start grading completion i against problem i; the future holds the scores in the same order.

        The future fails with BudgetSpentError, JudgeAwayError, another RewardError that no retry would cure, an error
        of the journal, or one of ``on_progress``. By then every verdict that was paid for is in the journal.

        Raises:
            ValueError: the numbers of problems and completions differ.
            RewardError: the grader is closed.
        """
        pairs = list(zip(problems, completions, strict=True))
        if self._closed:
            raise RewardError("the judge's grader is closed. Submit before closing it.")
        return self._run(self._scores(pairs))

    def close(self) -> None:
        """Stop asking, and fail the futures of unfinished gradings. May be called twice."""
        with self._lock:
            closed, self._closed = self._closed, True
        if closed:
            return
        self._run(self._stop()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._journal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _stop(self) -> None:
        self._fatal = self._fatal or RewardError("the judge's grader was closed while this was being graded.")
        for task in (*self._asking.values(), self._watcher):
            task.cancel()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        await asyncio.gather(*others, return_exceptions=True)
        await self._endpoint.close()

    async def _scores(self, pairs: Sequence[tuple[Problem, Completion]]) -> list[Score]:
        # All end before the first error is raised, so that paid verdicts reach the journal.
        results = await asyncio.gather(*(self._score(*pair) for pair in pairs), return_exceptions=True)
        for result in results:
            if isinstance(result, asyncio.CancelledError):
                raise self._fatal or RewardError("the judge's grader was closed.")
            if isinstance(result, BaseException):
                raise result
        return [result for result in results if isinstance(result, Score)]

    async def _score(self, problem: Problem, completion: Completion) -> Score:
        text, thoughts = completion.text, self._thoughts
        thought = None if thoughts is None else thoughts.read(text, problem)
        if thoughts is not None and thought is not None:
            text = thoughts.graded_text(thought)
        score = Score(0.0, {"accuracy": 0.0}, graded=True)  # of an empty answer, which needs no judge
        if text.strip():
            verdict = await self._verdict(self._rubric.question(problem, text))
            if verdict.score is None:
                return UNGRADED
            score = Score(verdict.score, {"accuracy": verdict.score}, graded=True)
        if thoughts is not None and thought is not None:
            score = thoughts.add_part(score, thought)
        return score if self._length is None else self._length.apply(score, len(completion.token_ids))

    async def _verdict(self, question: Question) -> Verdict:
        """The verdict in the journal, else that of the judge. Equal questions at the same time are asked once."""
        key = question.key
        if (known := self._journal.known.get(key)) is not None:
            self._count(replayed=1)
            if known.score is None:
                self._note_failure(known)
            return known
        if (task := self._asking.get(key)) is None:
            task = self._asking[key] = asyncio.create_task(self._ask(question))
            task.add_done_callback(lambda _: self._asking.pop(key, None))
        else:
            self._count(replayed=1)
        return await asyncio.shield(task)

    async def _ask(self, question: Question) -> Verdict:
        """Ask until there is an answer, and journal it."""
        async with self._slots:
            cost: Counter[str] = Counter()
            try:
                score, reason = await self._answer(question, cost)
            except BaseException as error:
                if self._fatal is None and isinstance(error, Exception):
                    self._fatal = error
                if cost:
                    await self._record(_verdict("", None, "no verdict", question, cost))
                raise
            verdict = _verdict(question.key, score, reason, question, cost)
            await self._record(verdict)
        if score is None:
            self._count(ungraded=1)
            self._note_failure(verdict)
        self._progress()
        return verdict

    async def _answer(self, question: Question, cost: Counter[str]) -> tuple[float | None, str]:
        """Score and reason. The score is None if the judge gave no valid one. Adds to ``cost`` what is paid for."""
        body = await asyncio.to_thread(question.body)
        failed, delays = 0, 0  # tries that count, and those in a row that failed
        why = ""
        while failed <= self._config.retries:
            if delays:
                self._count(retries=1)
            await self._begin_call()
            started = time.monotonic()
            try:
                outcome = await self._endpoint.ask(body)
                if isinstance(outcome, Answered):
                    self._pay(outcome, time.monotonic() - started, cost)
            finally:
                await self._end_call()
            if not isinstance(outcome, Away):
                self._silence.broken()
            pause = 0.0
            match outcome:
                case Answered(text=text, cut=cut, flaw=flaw):
                    opinion = flaw or opinion_in(text, cut=cut)
                    if not isinstance(opinion, str):
                        return opinion.score, opinion.reason
                    why, failed = f"invalid answer: {opinion}", failed + 1
                case Refused(why=detail):
                    return None, f"refused: {detail}"
                case Denied():
                    raise judge_denied(self._config, outcome)
                case Failed(why=detail):
                    why, failed = f"failed: {detail}", failed + 1
                case Away(why=detail, seconds=seconds):
                    pause = seconds
                    self._silence.note(detail)
            if failed <= self._config.retries:
                await self._sleep(max(pause, delay_before(delays)))
                delays += 1
        return None, why

    async def _begin_call(self) -> None:
        """Wait until the budget allows one more call.

        Raises:
            BudgetSpentError: it never will, and every call under way has ended.
        """
        budget = self._config.budget
        async with self._changed:
            while True:
                if self._fatal is not None:
                    raise self._fatal
                spent = budget.calls is not None and self._calls >= budget.calls
                spent = spent or (budget.tokens is not None and self._tokens >= budget.tokens)
                if spent and not self._in_flight:
                    raise BudgetSpentError(
                        f"the judge's budget is spent: {self._calls} calls and {self._tokens} tokens, and "
                        f"reward.judge.budget allows {_limit(budget.calls)} calls and {_limit(budget.tokens)} tokens. "
                        "All verdicts are in the journal. Raise the budget and continue the run."
                    )
                if not spent and (budget.calls is None or self._calls + self._in_flight < budget.calls):
                    self._in_flight += 1
                    return
                await self._changed.wait()

    async def _end_call(self) -> None:
        async with self._changed:
            self._in_flight -= 1
            self._changed.notify_all()

    def _pay(self, answer: Answered, seconds: float, cost: Counter[str]) -> None:
        self._calls += 1
        self._tokens += answer.tokens
        cost.update(calls=1, tokens=answer.tokens)
        self._count(calls=1, tokens=answer.tokens)
        with self._lock:
            self._seconds += seconds

    async def _sleep(self, seconds: float) -> None:
        """Sleep in short pieces, so that the driver sees a trainer that waits for its judge as alive."""
        until = time.monotonic() + seconds
        self._repeated += 1
        try:
            while (left := until - time.monotonic()) > 0:
                self._progress()
                await asyncio.sleep(min(left, 1.0))
        finally:
            self._repeated -= 1

    async def _watch(self) -> None:
        """End all gradings when ``on_retry`` raises. Calls of a judge that is away may last until their time limit."""
        while self._fatal is None:
            await asyncio.sleep(_WATCH_SECONDS)
            if not (self._repeated or self._silence.lasts):
                continue
            try:
                self._on_retry()
            except Exception as error:  # noqa: BLE001 - each grading raises it
                self._fatal = self._fatal or error
                if self._silence.lasts:
                    for task in self._asking.values():
                        task.cancel()

    def _progress(self) -> None:
        if self._fatal is not None:
            raise self._fatal
        self._on_progress()

    async def _record(self, verdict: Verdict) -> None:
        """Returns once the verdict is on disk. One write takes all verdicts that wait."""
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unwritten.append((verdict, written))
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write())
        await written

    async def _write(self) -> None:
        while self._unwritten:
            batch, self._unwritten = self._unwritten, []
            try:
                await asyncio.to_thread(self._journal.append, [verdict for verdict, _ in batch])
            except Exception as error:  # noqa: BLE001 - each grading that waits for it raises it
                self._fatal = self._fatal or error
                for _, written in batch:
                    if not written.done():
                        written.set_exception(error)
            else:
                for _, written in batch:
                    if not written.done():
                        written.set_result(None)

    def _count(self, **numbers: int) -> None:
        with self._lock:
            self._counts.update(numbers)

    def _note_failure(self, verdict: Verdict) -> None:
        with self._lock:
            self._last_failures.append(f"problem {verdict.problem_id}, judge: {verdict.reason}")


def _verdict(key: str, score: float | None, reason: str, question: Question, cost: Mapping[str, int]) -> Verdict:
    now = time.time_ns() // 1_000_000
    return Verdict(key, score, reason, question.problem_id, cost.get("calls", 0), cost.get("tokens", 0), now)


def _limit(number: int | None) -> str:
    return "any number of" if number is None else str(number)
