"""The sequential test: capital worked out by hand, its interval, and its error over many simulated experiments."""

from __future__ import annotations

import math
from itertools import pairwise, permutations

import numpy as np
import pytest

from rlcore.evaluation.sequential import log_capital, random_order, sequential_test
from tests.bench.sequential import NULLS, decisions

# ---- by hand: stakes 1/16, 1/8, 1/4, 1/2; their sum is 15/16, that of their squares 85/256


def test_the_capital_by_hand() -> None:
    up, down = (np.exp(log) for log in log_capital(np.array([1.0, -1.0, 0.0])))
    won, lost, both = 1 + 15 / 64, 1 - 15 / 64, 1 - 85 / 1024  # (1 + s), (1 - s), (1 + s)(1 - s), mean over stakes
    assert up == pytest.approx([won, both, both])
    assert down == pytest.approx([lost, both, both])


def test_another_mean_has_other_odds() -> None:
    """At mean 1/2 a difference of 1 wins (1 - 1/2) / (1 + 1/2) = 1/3 of the stake above, and loses all of it below."""
    up, down = (np.exp(log) for log in log_capital(np.array([1.0]), 0.5))
    assert up == pytest.approx([1 + 15 / 64 / 3])
    assert down == pytest.approx([1 - 15 / 64])


def test_ten_gains_in_a_row_decide() -> None:
    """Mean over stakes of (1 + s)^10 is 18.0, of (1 + s)^12 37.6, of (1 + s)^13 54.9; each side decides at 40."""
    capital = [sum((1 + stake) ** n for stake in (1 / 16, 1 / 8, 1 / 4, 1 / 2)) / 4 for n in (10, 12, 13)]
    assert capital == pytest.approx([18.0, 37.6, 54.9], abs=0.05)
    found = sequential_test(np.ones(20))
    assert (found.verdict, found.decided_after, found.more) == ("better", 13, None)
    assert found.e_value == found.peak == pytest.approx(sum((1 + s) ** 20 for s in (1 / 16, 1 / 8, 1 / 4, 1 / 2)) / 8)
    ten = sequential_test(np.ones(10))
    assert (ten.verdict, ten.decided_after, ten.more) == ("undecided", None, 3)
    assert ten.e_value == pytest.approx(capital[0] / 2)
    assert sequential_test(np.ones(12), alpha=2 / 37).verdict == "better"  # 37.6 is enough for 37


def test_no_difference_is_no_evidence_and_has_no_end() -> None:
    found = sequential_test(np.zeros(500))
    assert (found.verdict, found.e_value, found.peak, found.more) == ("undecided", 0.5, 0.5, None)
    assert found.low < 0 < found.high


def test_a_swap_of_the_two_turns_the_verdict_and_the_interval() -> None:
    values = np.random.default_rng(1).choice([-1.0, 0.0, 0.5, 1.0], 200)
    one, other = sequential_test(values), sequential_test(-values)
    assert (one.verdict, other.verdict) == ("better", "worse")
    assert (one.low, one.high) == pytest.approx((-other.high, -other.low))
    assert (one.e_value, one.decided_after) == (pytest.approx(other.e_value), other.decided_after)


def test_the_interval_has_the_means_that_are_not_refuted() -> None:
    values = np.random.default_rng(2).choice([-1.0, 0.0, 1.0], 300, p=[0.1, 0.6, 0.3])
    found = sequential_test(values, alpha=0.1)
    assert found.low < values.mean() < found.high
    for mean, refuted in [(found.low - 1e-6, True), (found.low + 1e-6, False)]:
        assert (log_capital(values, mean)[0].max() >= math.log(20)) is np.bool_(refuted)
    for mean, refuted in [(found.high + 1e-6, True), (found.high - 1e-6, False)]:
        assert (log_capital(values, mean)[1].max() >= math.log(20)) is np.bool_(refuted)
    lows = [sequential_test(values[:n]).low for n in (50, 100, 200, 300)]
    assert all(before <= after for before, after in pairwise(lows)), "what was refuted stays so"


def test_the_e_value_does_not_depend_on_the_order() -> None:
    values = {sequential_test(np.array(order)).e_value for order in permutations([1.0, -0.5, 0.25, 0.0])}
    assert max(values) == pytest.approx(min(values))


def test_values_outside_the_bounds_and_no_values_are_refused() -> None:
    for wrong in ([], [0.0, 1.5], [math.nan]):
        with pytest.raises(ValueError, match=r"differences in \[-1, 1\], at least one"):
            sequential_test(np.array(wrong))


def test_the_order_of_problems_is_fixed_by_the_seed_and_their_names() -> None:
    names = [f"p{index}" for index in range(50)]
    order = random_order(names)
    assert order == random_order(reversed(names))
    assert sorted(order) == sorted(names)
    assert order not in (names, random_order(names, seed=1))
    assert [name for name in order if name in names[:20]] == random_order(names[:20])


# ---- simulated


@pytest.mark.parametrize("name", NULLS)
def test_policies_that_are_equally_good_are_told_apart_in_at_most_five_of_a_hundred(name: str) -> None:
    """10,000 experiments with a look after each of 100 problems. With less evidence asked for, the test does err."""
    values = NULLS[name](np.random.default_rng(0), 10_000, 100)
    assert abs(values.mean()) < 0.01
    assert np.mean(decisions(values) > 0) <= 0.05
    assert 0.05 < np.mean(decisions(values, alpha=0.9) > 0) <= 0.9
