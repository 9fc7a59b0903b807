"""The paired comparison, with quantiles worked out by hand."""

from __future__ import annotations

import pytest

from rlcore.evaluation.intervals import compare
from rlcore.evaluation.rows import EvalRow, accuracy_per_problem


def named(*values: float) -> dict[str, float]:
    return {f"p{index}": value for index, value in enumerate(values)}


def test_a_difference_that_every_problem_shares_is_certain() -> None:
    found = compare(named(0.5, 0.0, 0.25), named(0.75, 0.25, 0.5))
    assert (found.difference, found.low, found.high) == (0.25, 0.25, 0.25)


def test_seven_of_eight_problems_gained_are_significant() -> None:
    """A resample's mean is Binomial(8, 7/8) / 8: P(X <= 4) = 1.1 %, P(X <= 5) = 6.7 %, P(X = 8) = 34 %. So the 2.5 %
    quantile is 5/8 and the 97.5 % one is 1."""
    found = compare(named(*[0.0] * 8), named(*[1.0] * 7, 0.0))
    assert (found.difference, found.low, found.high, found.num_problems) == (7 / 8, 5 / 8, 1.0, 8)


def test_one_gained_of_two_is_not() -> None:
    """Means 0, 1/2, 1 with chances 1/4, 1/2, 1/4: the interval is [0, 1]."""
    found = compare(named(0.0, 1.0), named(1.0, 1.0))
    assert (found.difference, found.low, found.high) == (0.5, 0.0, 1.0)


def test_as_many_lost_as_gained_is_no_difference_and_losses_are_below_zero() -> None:
    assert compare(named(1.0, 0.0), named(0.0, 1.0)).difference == 0.0
    assert compare(named(1.0, 1.0), named(0.0, 0.0)).high == -1.0


def test_pairs_are_by_name_and_problems_of_one_side_are_left_out() -> None:
    found = compare({"a": 0.0, "b": 1.0, "only": 0.0}, {"b": 1.0, "a": 0.5, "other": 1.0})
    assert (found.difference, found.num_problems) == (0.25, 2)
    with pytest.raises(ValueError, match="the 1 and the 1 problems have none in common"):
        compare({"a": 0.0}, {"b": 0.0})


def test_samples_of_a_problem_are_averaged_and_no_verdict_is_not_right() -> None:
    rows = [
        EvalRow(name, sample, "q", "a", "c", 0.0, accuracy, None, accuracy is not None, "stop", 3)
        for name, sample, accuracy in (("x", 0, 1.0), ("x", 1, None), ("y", 0, 0.0), ("y", 1, 0.0))
    ]
    assert accuracy_per_problem(rows) == {"x": 0.5, "y": 0.0}
