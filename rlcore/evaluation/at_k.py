"""What k of n samples of a problem are worth: any of them right, or most of them. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Unbiased estimate of the probability that at least one of ``k`` samples is right: 1 - C(n - c, k) / C(n, k).
    Chen et al. 2021, arXiv:2107.03374, equation 1.

    Args:
        samples: n, at least ``k``.
        right: c, how many of them are right.
    """
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def majority_at_k(right: int, wrong: Sequence[int], silent: int, k: int) -> float:
    """Probability that the most frequent answer of ``k`` samples is right, over all subsets of ``k`` of the n samples.

    Exact: the subsets are counted, not drawn. If several answers lead, each is chosen equally often. A subset without
    any answer is not right. Self-consistency: Wang et al. 2023, arXiv:2203.11171.

    Args:
        right: number of samples with the right answer, however it is written.
        wrong: for each wrong answer the number of samples that give it.
        silent: number of samples without an answer; they do not vote.
        k: at most n = right + sum(wrong) + silent.
    """
    total = Fraction(0)
    for votes in range(1, min(right, k) + 1):
        total += math.comb(right, votes) * _chances(votes, wrong, silent, k - votes)
    return float(total / math.comb(right + sum(wrong) + silent, k))


def _chances(votes: int, wrong: Sequence[int], silent: int, rest: int) -> Fraction:
    """Sum over the ways to take ``rest`` samples that are not right, with at most ``votes`` of each wrong answer, of
    1 / (1 + number of wrong answers with exactly ``votes``)."""
    # An answer that cannot reach ``votes`` is no rival: its samples count as silent ones.
    free = silent + sum(count for count in wrong if count < votes)
    ways = {(taken, 0): math.comb(free, taken) for taken in range(min(free, rest) + 1)}  # by (samples, ties)
    for count in wrong:
        if count >= votes:
            more: dict[tuple[int, int], int] = {}
            for (taken, ties), number in ways.items():
                for own in range(min(votes, rest - taken) + 1):
                    key = taken + own, ties + (own == votes)
                    more[key] = more.get(key, 0) + number * math.comb(count, own)
            ways = more
    return sum((Fraction(number, 1 + ties) for (taken, ties), number in ways.items() if taken == rest), Fraction(0))
