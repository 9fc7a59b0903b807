"""Which of several evaluated policies is better, suite by suite, on the same problems. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlcore.artifacts import Artifact
from rlcore.errors import ConfigError
from rlcore.evaluation.intervals import bootstrap_interval, compare
from rlcore.evaluation.rows import EvalRow, accuracy_per_problem
from rlcore.evaluation.sequential import Verdict, random_order, sequential_test

_SHOWN = 3  # problems that a note names


@dataclass(frozen=True, slots=True)
class Evaluated:
    """One policy's completions on one suite."""

    policy: str  # as the user named it
    suite: str
    dataset_digest: str  # empty: unknown
    step: int | None
    rows: Sequence[EvalRow]  # ordered by problem


class AgainstFirst(Artifact):
    """A policy minus the first one, over the problems of both. The confidence is adjusted for all compared policies."""

    problems: int
    difference: float
    low: float  # paired bootstrap over problems, for one look at this number of problems
    high: float
    confidence: float
    verdict: Verdict  # of the sequential test, on this policy
    decided_after: int | None  # problems, in a random order
    e_value: float  # after all problems
    peak_e_value: float
    needed_e_value: float
    sequence_low: float  # confidence sequence, for any number of looks
    sequence_high: float
    more_problems: int | None  # until a verdict, if further problems are like these

    def __str__(self) -> str:
        known = f"decided after {self.decided_after}" if self.decided_after else "undecided"
        return (
            f"{self.difference:+.3f} [{self.low:+.3f}, {self.high:+.3f}] on {self.problems} problems "
            f"(e-value {self.e_value:.3g}, {known})"
        )


class PolicyOnSuite(Artifact):
    """One line of the table."""

    policy: str
    step: int | None
    problems: int
    samples: int
    accuracy: float  # over all of its problems
    accuracy_low: float  # 95 % bootstrap interval over problems
    accuracy_high: float
    against_first: AgainstFirst | None  # None: it is the first


class SuiteComparison(Artifact):
    suite: str
    policies: tuple[PolicyOnSuite, ...]
    notes: tuple[str, ...]  # what does not match


def compare_on_suite(first: Evaluated, others: Sequence[Evaluated], alpha: float = 0.05) -> SuiteComparison:
    """Compare each of ``others`` with ``first`` on the problems that both have: same id, question and answer.

    With several others, each comparison has ``alpha`` / their number (Bonferroni), for intervals and e-values alike, so
    that all statements of the suite hold together with a probability of at least 1 - ``alpha``.

    Raises:
        ConfigError: two policies have no problem in common.
    """
    notes = [note for other in others for note in _notes(first, other)]
    lines = [_line(first, None)]
    for other in others:
        before, after = _common(first, other)
        lines.append(_line(other, compare_pair(before, after, alpha / len(others))))
    return SuiteComparison(suite=first.suite, policies=tuple(lines), notes=tuple(notes))


def _line(evaluated: Evaluated, against: AgainstFirst | None) -> PolicyOnSuite:
    accuracy = list(accuracy_per_problem(evaluated.rows).values())
    low, high = bootstrap_interval(accuracy)
    return PolicyOnSuite(
        policy=evaluated.policy,
        step=evaluated.step,
        problems=len(accuracy),
        samples=_samples(evaluated),
        accuracy=float(np.mean(accuracy)),
        accuracy_low=low,
        accuracy_high=high,
        against_first=against,
    )


def compare_pair(before: Mapping[str, float], after: Mapping[str, float], alpha: float) -> AgainstFirst:
    """Compare two policies by their accuracies per problem id, which are the same problems."""
    paired = compare(before, after, confidence=1 - alpha)
    test = sequential_test(np.array([after[name] - before[name] for name in random_order(before)]), alpha)
    return AgainstFirst(
        problems=paired.num_problems,
        difference=paired.difference,
        low=paired.low,
        high=paired.high,
        confidence=1 - alpha,
        verdict=test.verdict,
        decided_after=test.decided_after,
        e_value=test.e_value,
        peak_e_value=test.peak,
        needed_e_value=1 / alpha,
        sequence_low=test.low,
        sequence_high=test.high,
        more_problems=test.more,
    )


def _common(first: Evaluated, other: Evaluated) -> tuple[dict[str, float], dict[str, float]]:
    """Accuracy of both by problem, of the problems that are the same."""
    texts, others = _texts(first), _texts(other)
    same = {name for name, text in texts.items() if others.get(name) == text}
    if not same:
        raise ConfigError(
            f"{first.policy} and {other.policy} have no problem in common on {first.suite}: {len(texts)} and "
            f"{len(others)} problems, none with the same id, question and answer. Evaluate both on the same data: "
            "rlflow evaluate RUN --on EXPERIMENT."
        )
    before, after = accuracy_per_problem(first.rows), accuracy_per_problem(other.rows)
    return {name: before[name] for name in same}, {name: after[name] for name in same}


def _notes(first: Evaluated, other: Evaluated) -> list[str]:
    """What differs between the two evaluations besides the policy."""
    texts, others = _texts(first), _texts(other)
    notes = []
    if "" not in (first.dataset_digest, other.dataset_digest) and first.dataset_digest != other.dataset_digest:
        digests = f"{first.dataset_digest[:8]} and {other.dataset_digest[:8]}"
        notes.append(f"{first.policy} and {other.policy} have differently prepared data (digests {digests})")
    for one, names in ((other, texts.keys() - others.keys()), (first, others.keys() - texts.keys())):
        if names:
            notes.append(f"{one.policy} lacks {_listed(names)}; left out of the difference")
    changed = {name for name in texts.keys() & others.keys() if texts[name] != others[name]}
    if changed:
        notes.append(f"{other.policy} has another question or answer for {_listed(changed)}; left out")
    if _samples(first) != _samples(other):
        samples = f"{_samples(first)} and {_samples(other)}"
        notes.append(f"{first.policy} and {other.policy} have {samples} samples per problem")
    return notes


def _listed(names: set[str]) -> str:
    shown = ", ".join(sorted(names)[:_SHOWN])
    return f"{len(names)} problem{'s' if len(names) > 1 else ''} ({shown}{', ...' if len(names) > _SHOWN else ''})"


def _texts(evaluated: Evaluated) -> dict[str, tuple[str, str]]:
    return {row.problem_id: (row.question, row.answer) for row in evaluated.rows}


def _samples(evaluated: Evaluated) -> int:
    return max(row.sample for row in evaluated.rows) + 1
