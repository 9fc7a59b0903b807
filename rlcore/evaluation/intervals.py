"""Confidence intervals of an evaluation. No torch.

Problems are the unit of resampling: samples of one problem are not independent of each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]


def bootstrap_interval(
    per_problem_values: Sequence[float], confidence: float = 0.95, resamples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean over problems; the same seed gives the same interval.

    Raises:
        ValueError: no problems.
    """
    values = np.asarray(per_problem_values, np.float64)
    if values.size == 0:
        raise ValueError("an interval of no problems was asked for. Evaluate at least one.")
    generator = np.random.default_rng(seed)
    # One resample at a time: all indices at once would be gigabytes for a large benchmark.
    means = [values[generator.integers(values.size, size=values.size)].mean() for _ in range(resamples)]
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def bootstrap_difference(
    before: Sequence[float],
    after: Sequence[float],
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """Interval of mean(after) - mean(before), paired: entry p of both is of the same problem.

    Narrower than what two separate intervals suggest, because how hard a problem is cancels.

    Raises:
        ValueError: the two are of different numbers of problems, or of none.
    """
    if len(before) != len(after):
        raise ValueError(
            f"a paired difference of {len(before)} and {len(after)} problems: both must be of the same "
            "problems, in the same order."
        )
    differences: Values = np.asarray(after, np.float64) - np.asarray(before, np.float64)
    return bootstrap_interval(differences.tolist(), confidence, resamples, seed)
