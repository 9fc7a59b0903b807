"""Which of two policies is better on problems like these: a test that may be looked at after every problem. No torch.

Waudby-Smith and Ramdas 2024, "Estimating means of bounded random variables by betting", JRSS-B 86(1),
arXiv:2010.09686: the hedged capital process and its confidence sequence (theorem 3). Each side's bets are a mixture of
constant shares of the capital, which the paper calls diversified Kelly betting.

The observations are paired differences in [-1, 1], one for each problem. Problems are taken for a random sample of
problems like these, so they have to come in a random order (``random_order``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]
Verdict = Literal["better", "worse", "undecided"]

STAKES = (1 / 16, 1 / 8, 1 / 4, 1 / 2)
"""Shares of the capital that are bet on each problem, mixed equally. Small ones win on small differences."""
_HALVINGS = 40  # of an interval of length 2
_AGAIN = 50  # how often ``more`` repeats the problems


@dataclass(frozen=True, slots=True)
class SequentialTest:
    """The test after all problems so far."""

    verdict: Verdict  # of the mean difference: better is above 0
    decided_after: int | None  # problems; later ones change nothing
    e_value: float  # after all problems; it does not depend on their order. Evidence against no difference
    peak: float  # the largest e-value so far; 1 / alpha decides
    low: float  # confidence sequence of the mean difference: holds at all numbers of problems together
    high: float
    more: int | None  # further problems until a verdict, if they are like these; None: decided, or not foreseeable


def random_order(problem_ids: Iterable[str], seed: int = 0) -> list[str]:
    """The problems in an order that depends on the seed and their ids only, not on the order of a file."""
    return sorted(problem_ids, key=lambda name: hashlib.blake2b(f"{seed}\n{name}".encode(), digest_size=16).digest())


def log_capital(differences: Values, mean: float = 0.0) -> tuple[Values, Values]:
    """Log of what 1 has become after each problem, by bets that the mean is above ``mean``, and that it is below.

    If the mean is at most ``mean``, the first ever exceeds log(x) with a probability of at most 1 / x (Ville), and so
    does the second if it is at least ``mean``.

    Args:
        differences: [..., T], each in [-1, 1].
        mean: in (-1, 1).

    Returns:
        both [..., T]. The last entries do not depend on the order of the problems.
    """
    above, below = (differences - mean) / (1 + mean), (differences - mean) / (mean - 1)  # at least -1
    return _mixture(above), _mixture(below)


def _mixture(gains: Values) -> Values:
    logs = [np.cumsum(np.log1p(stake * gains), axis=-1) for stake in STAKES]
    mixture: Values = np.logaddexp.reduce(logs, axis=0) - np.log(len(STAKES))
    return mixture


def sequential_test(differences: Values, alpha: float = 0.05) -> SequentialTest:
    """The test of a mean difference of 0, in the given order of the problems.

    Whatever the number of problems and of looks, a mean of at most 0 is called better with a probability of at most
    ``alpha`` / 2, one of at least 0 worse likewise, and the confidence sequence misses the mean with at most ``alpha``.

    Args:
        differences: [T], each in [-1, 1], in a random order.

    Raises:
        ValueError: there are no differences, or one is outside [-1, 1].
    """
    values = np.asarray(differences, np.float64)
    if values.size == 0 or not (np.abs(values) <= 1).all():
        raise ValueError(f"the test needs differences in [-1, 1], at least one; found {values.size} of them: {values}.")
    logs, threshold = log_capital(values), np.log(2 / alpha)  # each side has half of the capital
    first = {"better": _first(logs[0] >= threshold), "worse": _first(logs[1] >= threshold)}
    decided = min((after for after in first.values() if after is not None), default=None)
    verdict: Verdict = "undecided"
    if decided is not None:
        verdict = "better" if first["better"] == decided else "worse"
    return SequentialTest(
        verdict=verdict,
        decided_after=decided,
        e_value=_e_value(max(log[-1] for log in logs)),
        peak=_e_value(max(log.max() for log in logs)),
        low=_lower(values, threshold),
        high=-_lower(-values, threshold),
        more=_more(values, threshold) if decided is None else None,
    )


def _e_value(log: float) -> float:
    return float(np.exp(min(log, 700.0)) / 2)  # 700: near the largest float


def _first(hits: npt.NDArray[np.bool_]) -> int | None:
    return int(hits.argmax()) + 1 if hits.any() else None


def _lower(values: Values, threshold: float) -> float:
    """The largest mean that the bets above it have refuted; -1: none."""
    low, high = -1.0, 1.0
    for _ in range(_HALVINGS):  # the capital falls with the mean
        middle = (low + high) / 2
        if log_capital(values, middle)[0].max() >= threshold:
            low = middle
        else:
            high = middle
    return low


def _more(values: Values, threshold: float) -> int | None:
    """Problems that are missing if the same ones came again and again."""
    repeated = np.tile(values if values.mean() > 0 else -values, _AGAIN)
    needed = _first(log_capital(repeated)[0] >= threshold)
    return None if needed is None else needed - values.size
