"""How good, and how much better, over several seeds and the problems that all of them have answered. No torch.

Seeds and problems cross: every seed's policy answers every problem. Both are drawn, so an interval covers another
training run as well as other problems. Formulas: docs/ablations.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats

from rlcore.evaluation.paired import Comparison

Values = npt.NDArray[np.float64]
BySeed = Mapping[int, Mapping[str, float]]
"""Seed to problem id to the share of right samples."""

_RESAMPLES = 10_000
_CHUNK = 500  # resamples at a time: all at once would be gigabytes for a large benchmark


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
    p: float  # of no difference between these policies over problems like these, two-sided


def compare_seeds(base: BySeed, other: BySeed, confidence: float = 0.95, resamples: int = _RESAMPLES) -> SeedComparison:
    """Paired by seed and problem, so that how hard a problem is, and how lucky a seed's order, cancels.

    The interval draws seeds and problems; p flips the signs of the problems' differences (means over seeds).

    Raises:
        ValueError: no seed, or no problem, is of both.
    """
    differences = _differences(base, other)
    low, high = crossed_interval(differences, confidence, resamples)
    num_seeds, num_problems = differences.shape
    paired = Comparison(float(differences.mean()), low, high, num_problems)
    return SeedComparison(paired, num_seeds, sign_flip_p(differences.mean(axis=0)))


def mean_difference(base: BySeed, other: BySeed) -> float:
    """other - base, mean over the seeds and problems of both.

    Raises:
        ValueError: no seed, or no problem, is of both.
    """
    return float(_differences(base, other).mean())


def crossed_interval(
    values: Values, confidence: float = 0.95, resamples: int = _RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """Percentile interval of the mean of ``values`` [seeds, problems], drawing rows and columns each on their own with
    replacement: the pigeonhole bootstrap, Owen 2007, arXiv:0712.1111. With one row it is the bootstrap over problems.
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
    found = stats.permutation_test(
        (differences,),
        lambda values, axis: np.mean(values, axis=axis),
        permutation_type="samples",
        n_resamples=resamples,
        vectorized=True,
        batch=1000,
        rng=np.random.default_rng(0),
    )
    return float(found.pvalue)


def adjusted(ps: Sequence[float]) -> list[float]:
    """For as many comparisons: Benjamini and Hochberg 1995, the share of false ones among those below it."""
    return [float(p) for p in stats.false_discovery_control(ps)] if ps else []


def _differences(base: BySeed, other: BySeed) -> Values:
    """[seeds, problems] that both have."""
    seeds = [seed for seed in base if seed in other]
    problems = sorted(set(_problems(base)) & set(_problems(other)))
    return _table(other, seeds, problems) - _table(base, seeds, problems)


def _problems(accuracy: BySeed) -> list[str]:
    """Those that every seed has."""
    sets = [set(values) for values in accuracy.values()]
    return sorted(set.intersection(*sets)) if sets else []


def _table(accuracy: BySeed, seeds: Sequence[int], problems: Sequence[str]) -> Values:
    if not seeds or not problems:
        raise ValueError(f"{len(seeds)} seeds and {len(problems)} problems in common: at least one of each is needed.")
    return np.array([[accuracy[seed][name] for name in problems] for seed in seeds], np.float64)
