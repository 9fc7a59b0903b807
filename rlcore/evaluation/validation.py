"""Evaluation while training: the trainer's own samplers on validation problems, right after a weight sync. No torch.

Training does not depend on it. The seeds of its requests are its own, every completion in progress is kept by the
trainer and not by the engines, and afterwards the samplers forget all that they computed for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rlcore.config import EvaluationConfig
from rlcore.errors import PreemptedError
from rlcore.evaluation.records import TABLE, ValidationRecord, read_records, record_folder, write_record
from rlcore.evaluation.report import summarise
from rlcore.evaluation.rows import evaluate, write_rows
from rlcore.types import Grader, Problem, SampledGroup, Sampler, SampleRequest

logger = logging.getLogger(__name__)
_POLL_SECONDS = 1.0


class ValidationSampler(Sampler, Protocol):
    """``distributed.group.WorkerGroup`` is one."""

    def reset_sampler_caches(self) -> None: ...


class StoppedError(Exception):
    """The trainer has to stop: there is no time for the rest of an evaluation."""


@dataclass(frozen=True, slots=True)
class Validation:
    """Evaluates the weights that the samplers hold, and keeps one record per step in the run's folder."""

    config: EvaluationConfig
    problems: Sequence[Problem]
    sampler: ValidationSampler
    grader: Grader
    run_dir: Path
    suite: str  # ``suite_digest``
    dataset_digest: str
    should_stop: Callable[[], bool]  # asked about once a second

    def evaluate(self, step: int) -> bool:
        """Evaluate the policy of ``step``, whose weights the samplers hold, unless it has a record.

        Returns:
            False: the trainer has to stop. An interrupted evaluation leaves no record.

        Raises:
            ConfigError, RewardError: as ``rows.evaluate``.
        """
        if any(record.report.step == step for record in read_records(self.run_dir)):
            return True
        started = time.perf_counter()
        try:
            rows = evaluate(_Stoppable(self.sampler, self.should_stop), self.grader, self.problems, self.config)
        except (StoppedError, PreemptedError):
            logger.info("the evaluation of step %d is left to the next trainer: this one has to stop", step)
            return False
        self.sampler.reset_sampler_caches()
        table = record_folder(self.run_dir, step) / TABLE
        write_rows(rows, table)
        report = summarise(
            rows,
            policy=str(self.run_dir),
            step=step,
            dataset_digest=self.dataset_digest,
            table=str(table),
            seconds=time.perf_counter() - started,
            at=time.time(),
        )
        write_record(self.run_dir, ValidationRecord(suite=self.suite, report=report))
        logger.info(
            "step %d: accuracy %.3f [%.3f, %.3f] on %d validation problems x %d, in %.1f s",
            *(step, report.accuracy, report.accuracy_low, report.accuracy_high),
            *(report.num_problems, report.samples_per_problem, report.seconds),
        )
        return True


@dataclass(frozen=True, slots=True)
class _Stoppable:
    """A sampler that raises StoppedError soon after the trainer has to stop."""

    sampler: Sampler
    should_stop: Callable[[], bool]

    def generate(self, requests: Sequence[SampleRequest]) -> Iterator[dict[int, SampledGroup]]:
        next_look = 0.0
        for groups in self.sampler.generate(requests):
            if time.monotonic() >= next_look:
                if self.should_stop():
                    raise StoppedError
                next_look = time.monotonic() + _POLL_SECONDS
            yield groups
