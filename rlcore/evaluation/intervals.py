"""How good a policy is, and whether another one is better: intervals and comparisons of accuracies. No torch.

One seed: problems are the unit of resampling, because samples of one problem are not independent of each other.
Several seeds: every seed's policy answers every problem, and both are resampled, so that an interval covers another
training run as well as other problems. Formulas: docs/ablations.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]
BySeed = Mapping[int, Mapping[str, float]]
"""Seed to problem id to the share of right samples."""

_RESAMPLES = 10_000
_CHUNK = 500  # resamples at a time: all at once would take gigabytes for a large benchmark


def bootstrap_interval(
    per_problem_values: Sequence[float], confidence: float = 0.95, resamples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean over problems; the same seed gives the same interval.

    Raises:
        ValueError: no problems.
    """
    values = np.asarray(per_problem_values, np.float64)
    if values.size == 0:
        raise ValueError("there are no problems to compute an interval of. Evaluate at least one.")
    generator = np.random.default_rng(seed)
    means: list[Values] = []
    for start in range(0, resamples, _CHUNK):
        size = (min(_CHUNK, resamples - start), values.size)
        means.append(values[generator.integers(values.size, size=size)].mean(axis=1))
    low, high = np.quantile(np.concatenate(means), [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def bootstrap_difference(
    before: Sequence[float],
    after: Sequence[float],
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """Paired interval of mean(after) - mean(before): entry p of both belongs to the same problem.

    Narrower than two separate intervals suggest, because the difficulty of each problem cancels.

    Raises:
        ValueError: the numbers of problems differ or are 0.
    """
    if len(before) != len(after):
        raise ValueError(
            f"a paired difference needs the same problems in the same order, found {len(before)} and "
            f"{len(after)} problems."
        )
    differences: Values = np.asarray(after, np.float64) - np.asarray(before, np.float64)
    return bootstrap_interval(differences.tolist(), confidence, resamples, seed)


@dataclass(frozen=True, slots=True)
class Comparison:
    """mean(after) - mean(before) over the same problems, with its bootstrap interval."""

    difference: float
    low: float
    high: float
    num_problems: int

    def __str__(self) -> str:
        return f"{self.difference:+.3f} [{self.low:+.3f}, {self.high:+.3f}] on {self.num_problems} problems"


def compare(
    before: Mapping[str, float], after: Mapping[str, float], confidence: float = 0.95, resamples: int = 10_000
) -> Comparison:
    """Compare the accuracies per problem id of two policies, over the problems that both have.

    Raises:
        ValueError: they have no problem in common.
    """
    common = sorted(before.keys() & after.keys())
    if not common:
        raise ValueError(
            f"the {len(before)} and the {len(after)} problems have none in common: they belong to different benchmarks."
        )
    old, new = [before[name] for name in common], [after[name] for name in common]
    low, high = bootstrap_difference(old, new, confidence, resamples)
    return Comparison(float(np.mean(new) - np.mean(old)), low, high, len(common))


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds and problems with its interval."""

    mean: float
    low: float
    high: float
    num_seeds: int
    num_problems: int


def estimate(accuracy: BySeed, confidence: float = 0.95, resamples: int = _RESAMPLES) -> Estimate:
    """Mean accuracy over seeds and problems.

    Raises:
        ValueError: no seed, or no problem that all seeds have.
    """
    table = _table(accuracy, list(accuracy), _problems(accuracy))
    low, high = crossed_interval(table, confidence, resamples)
    return Estimate(float(table.mean()), low, high, *table.shape)


@dataclass(frozen=True, slots=True)
class SeedComparison:
    """other - base over the seeds and problems of both."""

    paired: Comparison
    num_seeds: int
    p: float  # two-sided, of no difference between these policies over problems like these


def compare_seeds(base: BySeed, other: BySeed, confidence: float = 0.95, resamples: int = _RESAMPLES) -> SeedComparison:
    """Paired by seed and problem, so that the difficulty of a problem and the luck of a seed's order cancel.

    The interval resamples seeds and problems; p flips the signs of the problems' differences (means over seeds).

    Raises:
        ValueError: they have no seed or no problem in common.
    """
    differences = _differences(base, other)
    low, high = crossed_interval(differences, confidence, resamples)
    num_seeds, num_problems = differences.shape
    paired = Comparison(float(differences.mean()), low, high, num_problems)
    return SeedComparison(paired, num_seeds, sign_flip_p(differences.mean(axis=0)))


def mean_difference(base: BySeed, other: BySeed) -> float:
    """other - base, mean over the seeds and problems of both.

    Raises:
        ValueError: they have no seed or no problem in common.
    """
    return float(_differences(base, other).mean())


def crossed_interval(
    values: Values, confidence: float = 0.95, resamples: int = _RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """Percentile interval of the mean of ``values`` [seeds, problems]. Rows and columns are resampled independently,
    with replacement: the pigeonhole bootstrap, Owen 2007, arXiv:0712.1111. With one row: the bootstrap over problems.
    """
    generator = np.random.default_rng(seed)
    rows, columns = values.shape
    means: list[Values] = []
    for start in range(0, resamples, _CHUNK):
        size = min(_CHUNK, resamples - start)
        seeds = generator.multinomial(rows, np.full(rows, 1 / rows), size=size)
        problems = generator.multinomial(columns, np.full(columns, 1 / columns), size=size)
        means.append(np.einsum("rs,sp,rp->r", seeds, values, problems, optimize=True) / (rows * columns))
    low, high = np.quantile(np.concatenate(means), [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def sign_flip_p(differences: Values, resamples: int = 9_999) -> float:
    """Two-sided p of a mean difference of 0 under random signs; exact where there are at most ``resamples`` signs."""
    from scipy import stats  # here, because importing vLLM takes longer once SciPy is imported

    result = stats.permutation_test(
        (differences,),
        lambda values, axis: np.mean(values, axis=axis),
        permutation_type="samples",
        n_resamples=resamples,
        vectorized=True,
        batch=1000,
        rng=np.random.default_rng(0),
    )
    return float(result.pvalue)


def adjusted(ps: Sequence[float]) -> list[float]:
    """Adjusted for several comparisons: Benjamini and Hochberg 1995, the rate of false discoveries."""
    from scipy import stats

    return [float(p) for p in stats.false_discovery_control(ps)] if ps else []


def _differences(base: BySeed, other: BySeed) -> Values:
    """other - base [seeds, problems], over what both have."""
    seeds = [seed for seed in base if seed in other]
    problems = sorted(set(_problems(base)) & set(_problems(other)))
    return _table(other, seeds, problems) - _table(base, seeds, problems)


def _problems(accuracy: BySeed) -> list[str]:
    """Problems that every seed has."""
    sets = [set(values) for values in accuracy.values()]
    return sorted(set.intersection(*sets)) if sets else []


def _table(accuracy: BySeed, seeds: Sequence[int], problems: Sequence[str]) -> Values:
    if not seeds or not problems:
        raise ValueError(f"{len(seeds)} seeds and {len(problems)} problems in common: at least one of each is needed.")
    return np.array([[accuracy[seed][name] for name in problems] for seed in seeds], np.float64)
