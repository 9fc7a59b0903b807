import math

import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from rlcore.algorithms.advantage import group_advantages
from rlcore.algorithms.filtering import OutcomeCounts, count_outcomes, group_outcome

ALL = torch.ones(4, dtype=torch.bool)


def test_equals_the_values_worked_out_by_hand():
    # mean of 1, 0, 0, 1 is 0.5; sum of squares 4 * 0.25 = 1; sample variance 1 / 3; std 0.57735
    # (1 - 0.5) / 0.57735 = 0.866025 = sqrt(3) / 2
    result = group_advantages(tensor([1.0, 0.0, 0.0, 1.0]), ALL, normalize_by_std=True)
    half_root_3 = math.sqrt(3) / 2
    assert_close(result.values, tensor([1, -1, -1, 1], dtype=torch.float64) * half_root_3)
    assert result.signal
    assert_close(result.mean, tensor(0.5, dtype=torch.float64))
    assert_close(result.std, tensor(math.sqrt(1 / 3), dtype=torch.float64))


def test_without_std_is_centred_only():
    # mean of 1, 0.1, 0, 0.1 is 0.3
    result = group_advantages(tensor([1.0, 0.1, 0.0, 0.1]), ALL, normalize_by_std=False)
    assert_close(result.values, tensor([0.7, -0.2, -0.3, -0.2], dtype=torch.float64), rtol=0, atol=1e-7)


def test_an_ungraded_member_gets_0_and_moves_nobody():
    graded = tensor([True, False, True, True])
    with_noise = group_advantages(tensor([1.0, float("nan"), 0.0, 0.0]), graded, normalize_by_std=True)
    alone = group_advantages(tensor([1.0, 0.0, 0.0]), ALL[:3], normalize_by_std=True)
    assert with_noise.values[1] == 0
    assert torch.equal(with_noise.values[graded], alone.values)


@pytest.mark.parametrize(
    ("rewards", "graded"),
    [
        ([0.9, 0.9, 0.9, 0.9], [True] * 4),
        # 0.1 + 0.2 != 0.3 in floats: rounding is no signal
        ([0.1 + 0.2, 0.3, 0.3, 0.3], [True] * 4),
        ([1.0, 0.0, 0.0, 0.0], [True, False, False, False]),
        ([1.0, 0.0, 1.0, 0.0], [False] * 4),
    ],
)
def test_a_group_without_signal_is_exactly_0(rewards, graded):
    result = group_advantages(tensor(rewards, dtype=torch.float64), tensor(graded), normalize_by_std=True)
    assert not result.signal
    assert torch.equal(result.values, torch.zeros(4, dtype=torch.float64))
    assert result.std == 0


def test_does_not_depend_on_the_order_scale_or_offset_of_a_group():
    rewards = tensor([1.0, 0.3, 0.0, 0.7], dtype=torch.float64)
    order = tensor([2, 0, 3, 1])
    base = group_advantages(rewards, ALL, normalize_by_std=True).values
    assert_close(group_advantages(rewards[order], ALL, normalize_by_std=True).values, base[order])
    assert_close(group_advantages(5 * rewards - 2, ALL, normalize_by_std=True).values, base)
    assert_close(base.sum(), tensor(0.0, dtype=torch.float64))


def test_outcomes_say_all_right_all_wrong_mixed_and_ungraded():
    assert group_outcome([1, 1, 0], [True, True, False]) == "all_right"
    assert group_outcome([0, 1, 0], [True, False, True]) == "all_wrong"
    assert group_outcome([0, 1, 0], [True, True, True]) == "mixed"
    assert group_outcome([1, 1, 1], [True, False, False]) == "ungraded"


def test_outcomes_are_counted_over_a_step():
    pairs = [("all_right", False), ("all_wrong", True), ("mixed", True), ("ungraded", False)]
    counts = count_outcomes(pairs)
    assert counts == OutcomeCounts(groups=4, all_right=1, all_wrong=1, ungraded=1, zero_signal=2)
    assert count_outcomes(pairs[:1]) + count_outcomes(pairs[1:]) == counts
