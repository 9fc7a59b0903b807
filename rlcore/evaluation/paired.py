"""Is one policy better than another? Paired over the problems that both have answered. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from rlcore.evaluation.evaluate import EvalRow
from rlcore.evaluation.intervals import bootstrap_difference


@dataclass(frozen=True, slots=True)
class Comparison:
    """mean(after) - mean(before) over the same problems, with its bootstrap interval."""

    difference: float
    low: float
    high: float
    num_problems: int

    @property
    def better(self) -> bool:
        """The interval lies above 0: more than chance."""
        return self.low > 0

    def __str__(self) -> str:
        return f"{self.difference:+.3f} [{self.low:+.3f}, {self.high:+.3f}] on {self.num_problems} problems"


def compare(
    before: Mapping[str, float], after: Mapping[str, float], confidence: float = 0.95, resamples: int = 10_000
) -> Comparison:
    """Compare the accuracy per problem id of two policies; a problem that only one of them has is left out.

    The bootstrap draws problems, each with both its values, so how hard a problem is cancels.

    Raises:
        ValueError: the two have no problem in common.
    """
    common = sorted(before.keys() & after.keys())
    if not common:
        raise ValueError(
            f"no problem is among both the {len(before)} and the {len(after)}: they are of different benchmarks."
        )
    old, new = [before[name] for name in common], [after[name] for name in common]
    low, high = bootstrap_difference(old, new, confidence, resamples)
    return Comparison(float(np.mean(new) - np.mean(old)), low, high, len(common))


def accuracy_per_problem(rows: Iterable[EvalRow]) -> dict[str, float]:
    """Share of right samples per problem; one without a verdict is not right. ``rows``: problem by problem."""
    grouped = groupby(rows, key=lambda row: row.problem_id)
    return {name: float(np.mean([row.accuracy or 0.0 for row in group])) for name, group in grouped}
