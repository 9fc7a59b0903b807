"""Intervals, p and the table over seeds and problems, with chances worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from rlcore.ablation.table import PointNumbers, differences_at, make_rows
from rlcore.evaluation.intervals import (
    adjusted,
    compare,
    compare_seeds,
    crossed_interval,
    estimate,
    mean_difference,
    sign_flip_p,
)


def named(*values: float) -> dict[str, float]:
    return {f"p{index}": value for index, value in enumerate(values)}


def test_seeds_that_differ_widen_the_interval_where_problems_do_not() -> None:
    """Rows 0 and 1, every column alike: a resample's mean is 0, 1/2 or 1 with chances 1/4, 1/2, 1/4."""
    assert crossed_interval(np.array([[0.0] * 50, [1.0] * 50])) == (0.0, 1.0)
    assert crossed_interval(np.array([[0.5] * 50] * 2)) == (0.5, 0.5)


def test_with_one_seed_it_is_the_bootstrap_over_problems() -> None:
    """Binomial(8, 7/8) / 8: P(X <= 4) = 1.1 %, P(X <= 5) = 6.7 %, P(X = 8) = 34 %."""
    assert crossed_interval(np.array([[1.0] * 7 + [0.0]])) == (5 / 8, 1.0)
    before, after = named(*[0.0] * 8), named(*[1.0] * 7, 0.0)
    assert compare_seeds({4: before}, {4: after}).paired == compare(before, after)


def test_the_spread_of_resampled_means_is_the_one_of_the_formula() -> None:
    """Independent entries of variance 1 in R rows and C columns: rows add (1 - 1/C) / (R C), columns (1 - 1/R) / (R C),
    both together (1 - 1/R)(1 - 1/C) / (R C) more: about 3 / (R C) in all, the known excess over 1 / (R C)."""
    values = np.random.default_rng(1).standard_normal((20, 30))
    low, high = crossed_interval(values)
    # the sum of the three parts for these very values, by the variance of a multinomial's counts
    centred = values - values.mean()
    rows, columns = values.shape
    of_rows = (centred.mean(1) ** 2).sum() / rows**2
    of_columns = (centred.mean(0) ** 2).sum() / columns**2
    inner = centred - centred.mean(1, keepdims=True) - centred.mean(0, keepdims=True)
    both = (inner**2).sum() / (rows * columns) ** 2
    sigma = float(np.sqrt(of_rows + of_columns + both))
    assert (high - low) / (2 * 1.96 * sigma) == pytest.approx(1, abs=0.05)


def test_an_estimate_is_the_mean_over_seeds_of_the_problems_that_all_have() -> None:
    found = estimate({0: named(1.0, 0.0), 7: {"p0": 1.0, "p1": 1.0, "other": 0.0}})
    assert (found.mean, found.num_seeds, found.num_problems) == (0.75, 2, 2)
    with pytest.raises(ValueError, match="0 seeds and 0 problems"):
        estimate({})


def test_pairs_are_by_seed_and_problem() -> None:
    base = {0: named(0.0, 1.0), 1: named(1.0, 0.0), 2: named(0.0, 0.0)}
    other = {1: named(1.0, 0.5), 0: named(0.5, 1.0)}
    found = compare_seeds(base, other)
    assert (found.paired.difference, found.num_seeds, found.paired.num_problems) == (0.25, 2, 2)
    assert mean_difference(base, other) == 0.25
    with pytest.raises(ValueError, match="0 seeds"):
        compare_seeds({0: named(1.0)}, {1: named(1.0)})


def test_p_counts_signs() -> None:
    """Three equal gains: of the 8 ways to sign them 1 is as high and 1 as low: 2 / 8."""
    assert sign_flip_p(np.array([1.0, 1.0, 1.0])) == 0.25
    assert sign_flip_p(np.array([1.0, -1.0])) == 1.0
    assert sign_flip_p(np.zeros(4)) == 1.0
    assert sign_flip_p(np.ones(10)) == pytest.approx(2 / 1024)


def test_p_of_several_comparisons_is_adjusted() -> None:
    """Sorted 0.01, 0.02, 0.9 times 3/1, 3/2, 3/3, then never above a later one."""
    assert adjusted([0.02, 0.9, 0.01]) == pytest.approx([0.03, 0.9, 0.03])
    assert adjusted([]) == []


def test_a_row_compares_at_the_step_that_the_point_has_reached() -> None:
    base = {4: {0: named(*[0.0] * 4)}, 8: {0: named(*[1.0] * 4)}}
    rows = make_rows(
        [
            PointNumbers("base", "base", "finished", base, 2.0),
            PointNumbers("p01", "dropped at 4", "dropped", {4: {0: named(1.0, 1.0, 1.0, 0.0)}}, 1.0),
            PointNumbers("p02", "to the end", "finished", {8: {0: named(0.0, 0.0, 0.0, 0.0)}}, 2.0),
            PointNumbers("p03", "another seed", "finished", {8: {1: named(1.0, 1.0, 1.0, 1.0)}}, 2.0),
            PointNumbers("p04", "failed", "failed", {}, 0.5),
        ]
    )
    assert [(row.steps, row.accuracy, row.difference, row.seeds) for row in rows] == [
        (8, 1.0, None, 1), (4, 0.75, 0.75, 1), (8, 0.0, -1.0, 1), (8, 1.0, None, 1), (None, None, None, 0),
    ]  # fmt: skip
    # three gains and a 0: 2 of 8 signs; four losses: 2 of 16
    assert [row.p for row in rows] == [None, 0.25, 0.125, None, None]
    assert [row.p_adjusted for row in rows] == [None, 0.25, 0.25, None, None]
    assert (rows[2].difference_low, rows[2].difference_high, rows[4].gpu_hours) == (-1.0, -1.0, 0.5)


def test_a_rung_decides_by_the_difference_on_common_seeds() -> None:
    base = {0: named(0.0, 0.0), 1: named(1.0, 1.0)}
    scores = differences_at({"base": base, "lucky": {1: named(1.0, 1.0)}, "none": {}, "good": {0: named(0.5, 0.5)}})
    assert scores == {"base": 0.0, "lucky": 0.0, "good": 0.5}
