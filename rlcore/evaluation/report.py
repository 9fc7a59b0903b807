"""The report of an evaluation: means over problems with bootstrap intervals over problems. No torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from rlcore.artifacts import EvalReport
from rlcore.evaluation.at_k import majority_at_k, pass_at_k
from rlcore.evaluation.intervals import bootstrap_interval
from rlcore.evaluation.rows import EvalRow, accuracy_per_problem


def summarise(
    rows: Sequence[EvalRow], *, policy: str, step: int, dataset_digest: str, table: str, seconds: float, at: float
) -> EvalReport:
    """Means over problems with 95 % bootstrap intervals over problems.

    An ungraded completion does not count as right, so ``accuracy`` is a lower bound and ``accuracy + ungraded`` an
    upper one.

    Args:
        rows: as ``evaluate`` returns them, problem by problem.
        table: path of the written rows.
        at: time of the evaluation, seconds since the epoch.

    Raises:
        ValueError: no rows, or problems with different numbers of samples.
    """
    groups = [list(group) for _, group in groupby(rows, key=lambda row: row.problem_id)]
    sizes = sorted({len(group) for group in groups})
    if len(sizes) != 1:
        raise ValueError(f"every problem must have the same number of samples, found {sizes or 'no rows'}.")
    accuracy = [_accuracy(group) for group in groups]
    reward = [float(np.mean([row.reward for row in group])) for group in groups]
    accuracy_low, accuracy_high = bootstrap_interval(accuracy)
    reward_low, reward_high = bootstrap_interval(reward)
    return EvalReport(
        policy=policy,
        step=step,
        dataset_digest=dataset_digest,
        num_problems=len(groups),
        samples_per_problem=sizes[0],
        accuracy=float(np.mean(accuracy)),
        accuracy_low=accuracy_low,
        accuracy_high=accuracy_high,
        reward=float(np.mean(reward)),
        reward_low=reward_low,
        reward_high=reward_high,
        truncated=float(np.mean([row.finish_reason == "length" for row in rows])),
        ungraded=float(np.mean([not row.graded for row in rows])),
        details=_details(groups),
        table=table,
        seconds=seconds,
        at=at,
    )


@dataclass(frozen=True, slots=True)
class PartAccuracy:
    """pass@1 over some problems of an evaluation."""

    problems: int
    accuracy: float
    low: float  # 95 % bootstrap interval over problems
    high: float


def whole_and_clean(rows: Sequence[EvalRow], duplicates: Collection[str]) -> dict[str, PartAccuracy]:
    """Accuracy over all problems ("all"), over those that are not in ``duplicates`` ("clean"), and over the others
    ("duplicates"). A part without problems is left out.

    Args:
        rows: as ``evaluate`` returns them, problem by problem.
        duplicates: ids of the problems that training has too.
    """
    accuracy = accuracy_per_problem(rows)
    parts = {
        "all": list(accuracy.values()),
        "clean": [value for name, value in accuracy.items() if name not in duplicates],
        "duplicates": [value for name, value in accuracy.items() if name in duplicates],
    }
    return {
        name: PartAccuracy(len(values), float(np.mean(values)), *bootstrap_interval(values))
        for name, values in parts.items()
        if values
    }


def clean_metrics(clean: PartAccuracy | None) -> dict[str, float]:
    """The numbers of the clean part of an evaluation, without a prefix. None: every problem has a duplicate."""
    if clean is None:
        return {"clean_problems": 0.0}
    return {
        "accuracy_clean": clean.accuracy,
        "accuracy_clean_low": clean.low,
        "accuracy_clean_high": clean.high,
        "clean_problems": float(clean.problems),
    }


def metrics_of(report: EvalReport) -> dict[str, float]:
    """The numbers of a report by the names of docs/algorithms.md, without a prefix."""
    names = (
        *("accuracy", "accuracy_low", "accuracy_high", "reward", "reward_low", "reward_high"),
        *("truncated", "ungraded"),
    )
    return {name: getattr(report, name) for name in names} | report.details


def _details(groups: Sequence[Sequence[EvalRow]]) -> dict[str, float]:
    """Metrics beyond the fields of a report. ``groups`` has the rows of each problem."""
    samples = len(groups[0])
    powers = [1 << bit for bit in range(1, samples.bit_length())]  # 2, 4, 8, ... up to the number of samples
    details: dict[str, float] = {}
    for k in sorted({*powers, samples} - {1}):
        values = [pass_at_k(samples, sum(row.accuracy == 1 for row in group), k) for group in groups]
        details |= _interval(f"pass_at_{k}", values)
        if all(row.given is not None for group in groups for row in group if row.accuracy == 1):
            details |= _interval(f"majority_at_{k}", [majority_at_k(*_votes(group), k) for group in groups])
    details["completion_tokens_mean"] = float(np.mean([row.num_tokens for group in groups for row in group]))
    for name in sorted({group[0].group for group in groups if group[0].group is not None}):
        own = [_accuracy(group) for group in groups if group[0].group == name]
        details |= _interval(f"group/{_UNUSUAL.sub('_', name)}/accuracy", own)
    return details


_UNUSUAL = re.compile(r"[^\w.\- ]", re.ASCII)  # MLflow refuses these in the name of a metric, and "/" starts a folder


def _interval(name: str, per_problem: Sequence[float]) -> dict[str, float]:
    low, high = bootstrap_interval(per_problem)
    return {name: float(np.mean(per_problem)), f"{name}_low": low, f"{name}_high": high}


def _votes(group: Sequence[EvalRow]) -> tuple[int, list[int], int]:
    """Samples with the right answer, samples of each wrong answer, and samples without an answer.

    Right answers are one, because the reward calls each of them equal to the truth. Wrong ones are the same if their
    texts are."""
    right = sum(row.accuracy == 1 for row in group)
    wrong = Counter(row.given for row in group if row.accuracy != 1 and row.given is not None)
    return right, list(wrong.values()), len(group) - right - wrong.total()


def _accuracy(group: Sequence[EvalRow]) -> float:
    """Share of right samples of one problem; an ungraded sample is not right."""
    return float(np.mean([row.accuracy or 0.0 for row in group]))
