"""Advantages: numbers worked out by hand, then what holds for any rewards. Against the loops: test_references.py."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, tensor
from torch.testing import assert_close

from rlcore.algorithms import advantage
from rlcore.algorithms.advantage import group_outcome
from tests.numerics import reference

NAN = float("nan")


def doubles(values: object) -> Tensor:
    return tensor(values, dtype=torch.float64)


def everyone(rewards: Tensor) -> Tensor:
    return torch.ones(rewards.shape, dtype=torch.bool)


# every estimator that compares the members of a group; reinforce_plus_plus and remax compare with something else
BY_GROUP = {
    "grpo_sample": lambda r, g: advantage.grpo(r, g, std="sample"),
    "grpo_population": lambda r, g: advantage.grpo(r, g, std="population"),
    "dr_grpo": advantage.dr_grpo,
    "batch_std": advantage.batch_std,
    "rloo": advantage.rloo,
    "bnpo": advantage.bnpo,
    "pass_at_2": lambda r, g: advantage.pass_at_k(r, g, k=2),
    "reinforce_plus_plus_baseline": lambda r, g: advantage.reinforce_plus_plus_baseline(
        r, g, torch.full(r.shape, 3, dtype=torch.int64)
    ),
}
each_estimator = pytest.mark.parametrize("estimate", BY_GROUP.values(), ids=BY_GROUP.keys())


def test_grpo_equals_the_values_worked_out_by_hand():
    # mean of 1, 0, 0, 1 is 0.5; sum of squares 4 * 0.25 = 1; sample variance 1 / 3, population 1 / 4
    # 0.5 / sqrt(1 / 3) = 0.866025 = sqrt(3) / 2; 0.5 / sqrt(1 / 4) = 1
    rewards = doubles([[1.0, 0.0, 0.0, 1.0]])
    signs = doubles([[1, -1, -1, 1]])
    assert_close(advantage.grpo(rewards, everyone(rewards), std="sample").values, signs * math.sqrt(3) / 2)
    assert_close(advantage.grpo(rewards, everyone(rewards), std="population").values, signs)


def test_dr_grpo_and_rloo_equal_the_values_worked_out_by_hand():
    # mean of 1, 0.1, 0, 0.1 is 0.3; the others of the first have mean 0.2 / 3
    rewards = doubles([[1.0, 0.1, 0.0, 0.1]])
    assert_close(advantage.dr_grpo(rewards, everyone(rewards)).values, doubles([[0.7, -0.2, -0.3, -0.2]]))
    assert_close(advantage.rloo(rewards, everyone(rewards)).values[0, 0], doubles(1 - 0.2 / 3))


def test_batch_std_equals_the_values_worked_out_by_hand():
    # rewards 1, 0 | 1, 1: mean 0.75; squares 0.0625 * 3 + 0.5625 = 0.75; sample variance 0.25, deviation 0.5
    rewards = doubles([[1.0, 0.0], [1.0, 1.0]])
    found = advantage.batch_std(rewards, everyone(rewards))
    assert_close(found.values, doubles([[1, -1], [0, 0]]))
    assert found.signal.tolist() == [True, False]


def test_bnpo_equals_the_values_worked_out_by_hand():
    # p = 1/4, 3/4: mean 1/2, sample variance 1/8; 1/4 / (1/8) - 1 = 1, so a = b = 1/2, Beta(7/6, 7/6)
    rewards = doubles([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]])
    scale = math.gamma(7 / 3) / math.gamma(7 / 6) ** 2
    density = scale * (3 / 16) ** (1 / 6)  # the same at 1/4 and at 3/4
    found = advantage.bnpo(rewards, everyone(rewards)).values
    expected = doubles([[0.75, -0.25, -0.25, -0.25], [0.25, 0.25, 0.25, -0.75]]) / density
    assert_close(found, expected)


@pytest.mark.parametrize(
    "rewards",
    [
        [[1.0, 0.0], [1.0, 0.0]],  # every p is 1/2: nothing varies
        [[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]],  # p = 1/2, 1, 0: 1/4 / (1/4) - 1 = 0
        [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]],  # varies more than any Beta does
    ],
)
def test_bnpo_without_a_beta_to_fit_is_the_centred_reward(rewards):
    rewards = doubles(rewards)
    expected = advantage.dr_grpo(rewards, everyone(rewards)).values
    assert_close(advantage.bnpo(rewards, everyone(rewards)).values, expected)


def test_bnpo_bounds_the_weight_of_an_outlier_group():
    rewards = doubles([[1.0] + [0.0] * 15] + [[1.0] * 8 + [0.0] * 8] * 400)  # p = 1/16 against 400 times 1/2
    found = advantage.bnpo(rewards, everyone(rewards)).values
    assert_close(found[0, 0], doubles((1 - 1 / 16) / advantage.MIN_DENSITY))


def test_pass_at_k_equals_the_values_worked_out_by_hand():
    # rewards 1, 0, 0 and k = 2: the pairs are worth 1, 1, 0; mean 2/3, deviation sqrt(2)/3
    # the right one is in pairs worth 1, 1: (1 - 2/3) * 3 / sqrt(2) = 1 / sqrt(2)
    # a wrong one in pairs worth 1, 0: (1/2 - 2/3) * 3 / sqrt(2) = -1 / (2 sqrt(2))
    rewards = doubles([[1.0, 0.0, 0.0]])
    found = advantage.pass_at_k(rewards, everyone(rewards), k=2)
    assert_close(found.values, doubles([[1, -0.5, -0.5]]) / math.sqrt(2))


@pytest.mark.parametrize("k", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("right", range(1, 8))
def test_pass_at_k_equals_the_papers_closed_form(right, k):
    rewards = doubles([[1.0] * right + [0.0] * (8 - right)])
    found = advantage.pass_at_k(rewards, everyone(rewards), k=k)
    if 8 - right < k:  # every subset holds a right one
        assert not found.signal
        assert not found.values.any()
        return
    of_right, of_wrong = reference.pass_at_k_binary(right, 8 - right, k)
    assert_close(found.values, doubles([[of_right] * right + [of_wrong] * (8 - right)]))


def test_pass_at_1_is_grpo_with_the_population_deviation():
    rewards = torch.rand(5, 6, dtype=torch.float64)
    expected = advantage.grpo(rewards, everyone(rewards), std="population").values
    assert_close(advantage.pass_at_k(rewards, everyone(rewards), k=1).values, expected)


def test_pass_at_k_has_no_signal_with_k_completions_or_fewer():
    rewards = doubles([[1.0, 0.0, 0.0]])
    for k in (3, 4):
        found = advantage.pass_at_k(rewards, everyone(rewards), k=k)
        assert not found.signal
        assert not found.values.any()


def test_pass_at_k_counts_subsets_of_large_groups_without_overflow():
    rewards = doubles([[1.0] * 4 + [0.0] * 508])
    of_right, of_wrong = reference.pass_at_k_binary(4, 508, 64)
    found = advantage.pass_at_k(rewards, everyone(rewards), k=64).values
    assert_close(found[0, [0, -1]], doubles([of_right, of_wrong]))


def test_rloo_is_dr_grpo_up_to_the_size_of_the_group():
    rewards = torch.rand(3, 5, dtype=torch.float64)
    of_rloo, of_dr = (f(rewards, everyone(rewards)).values for f in (advantage.rloo, advantage.dr_grpo))
    assert_close(of_rloo, of_dr * 5 / 4)


def test_remax_equals_the_values_worked_out_by_hand():
    rewards = doubles([[1.0, 0.0, NAN], [1.0, 0.0, 0.0], [0.5, 0.5, 0.5]])
    graded = tensor([[True, True, False], [True] * 3, [True] * 3])
    found = advantage.remax(rewards, graded, doubles([0.25, NAN, 0.5]), tensor([True, False, True]))
    assert_close(found.values, doubles([[0.75, -0.25, 0], [0, 0, 0], [0, 0, 0]]))
    assert found.signal.tolist() == [True, False, False]


def test_reinforce_plus_plus_equals_the_values_worked_out_by_hand():
    # tokens worth 1, 1 | 0 | (ungraded): mean 2/3, population variance 2/9, deviation sqrt(2)/3
    returns = doubles([[[1.0, 1.0], [0.0, 9.0], [NAN, 7.0]]])
    tokens = tensor([[[True, True], [True, False], [True, True]]])
    found = advantage.reinforce_plus_plus(returns, tokens, tensor([[True, True, False]]))
    expected = doubles([[[1 / 3, 1 / 3], [-2 / 3, 0], [0, 0]]]) * 3 / math.sqrt(2)
    assert_close(found.values, expected)


def test_reinforce_plus_plus_baseline_equals_the_values_worked_out_by_hand():
    # centred 0.5, -0.5 with 3 and 1 tokens: mean 0.25; squares 3 * 0.0625 + 0.5625 = 0.75, / 4; deviation sqrt(3)/4
    rewards = doubles([[1.0, 0.0]])
    found = advantage.reinforce_plus_plus_baseline(rewards, everyone(rewards), tensor([[3, 1]]))
    assert_close(found.values, doubles([[0.25, -0.75]]) * 4 / math.sqrt(3))
    # a group without spread beside it shifts the normalisation and keeps exactly 0
    rewards = doubles([[1.0, 0.0], [1.0, 1.0]])
    found = advantage.reinforce_plus_plus_baseline(rewards, everyone(rewards), tensor([[3, 1], [2, 2]]))
    assert torch.equal(found.values[1], doubles([0, 0]))


@each_estimator
def test_an_ungraded_completion_gets_exactly_0_and_changes_no_other(estimate):
    rewards = doubles([[1.0, NAN, 0.0, 0.0], [0.0, 1.0, NAN, 0.5]])
    graded = ~rewards.isnan()
    found = estimate(rewards, graded).values
    other = estimate(rewards.nan_to_num(1e9), graded).values
    assert torch.equal(found, other)
    assert torch.equal(found[~graded], doubles([0, 0]))
    alone = estimate(doubles([[1.0, 0.0, 0.0], [0.0, 1.0, 0.5]]), torch.ones(2, 3, dtype=torch.bool)).values
    assert_close(found[graded], alone.flatten())


@each_estimator
@pytest.mark.parametrize(
    ("rewards", "graded"),
    [
        ([0.9, 0.9, 0.9, 0.9], [True] * 4),
        # 0.1 + 0.2 != 0.3 in floats: rounding is no signal
        ([0.1 + 0.2, 0.3, 0.3, 0.3], [True] * 4),
        ([1.0, 0.0, 0.0, 0.0], [True, False, False, False]),
        ([NAN, NAN, NAN, NAN], [False] * 4),
    ],
)
def test_a_group_without_signal_is_exactly_0_next_to_one_with_signal(estimate, rewards, graded):
    batch, verdicts = doubles([rewards, [1.0, 0.0, 0.0, 0.5]]), tensor([graded, [True] * 4])
    found = estimate(batch, verdicts)
    assert found.signal.tolist() == [False, True]
    assert torch.equal(found.values[0], doubles([0] * 4))
    assert found.values[1].ne(0).any()
    alone = estimate(batch[:1], verdicts[:1])
    assert not alone.signal.any()
    assert not alone.values.any()


@each_estimator
def test_a_group_of_one_has_no_signal(estimate):
    rewards = doubles([[1.0], [0.0]])
    found = estimate(rewards, everyone(rewards))
    assert not found.signal.any()
    assert torch.equal(found.values, torch.zeros(2, 1, dtype=torch.float64))


@each_estimator
def test_the_order_within_a_group_and_of_the_groups_changes_nothing(estimate):
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(4, 6, generator=generator, dtype=torch.float64)
    graded = torch.rand(4, 6, generator=generator) < 0.8
    members, groups = torch.randperm(6, generator=generator), torch.randperm(4, generator=generator)
    base = estimate(rewards, graded)
    turned = estimate(rewards[:, members][groups], graded[:, members][groups])
    assert_close(turned.values, base.values[:, members][groups])
    assert torch.equal(turned.signal, base.signal[groups])


@pytest.mark.parametrize(
    "name", ["grpo_sample", "grpo_population", "pass_at_2", "batch_std", "reinforce_plus_plus_baseline"]
)
@given(scale=st.floats(0.1, 100), offset=st.floats(-10, 10))
@settings(max_examples=30)
def test_normalised_advantages_do_not_depend_on_scale_or_offset(name, scale, offset):
    rewards = doubles([[1.0, 0.3, 0.0, 0.7], [0.5, 0.1, 0.9, 0.9]])
    base = BY_GROUP[name](rewards, everyone(rewards)).values
    moved = BY_GROUP[name](scale * rewards + offset, everyone(rewards)).values
    assert_close(moved, base, rtol=1e-9, atol=1e-9)


@given(
    st.lists(st.lists(st.sampled_from([0.0, 0.1, 0.9, 1.0]), min_size=4, max_size=4), min_size=1, max_size=5),
    st.randoms(use_true_random=False),
)
@settings(max_examples=60)
def test_signal_says_whether_a_group_has_any_advantage_and_nothing_is_ever_infinite(rewards, random):
    batch = doubles(rewards)
    graded = tensor([[random.random() < 0.8 for _ in row] for row in rewards])
    for estimate in BY_GROUP.values():
        found = estimate(batch, graded)
        assert torch.isfinite(found.values).all()
        assert torch.equal(found.values.ne(0).any(-1), found.signal)


def test_outcomes_say_all_right_all_wrong_mixed_and_ungraded():
    assert group_outcome([1, 1, 0], [True, True, False]) == "all_right"
    assert group_outcome([0, 1, 0], [True, False, True]) == "all_wrong"
    assert group_outcome([0, 1, 0], [True, True, True]) == "mixed"
    assert group_outcome([1, 1, 1], [True, False, False]) == "ungraded"


@each_estimator
@pytest.mark.parametrize("spread", [0.0, 1e-7, advantage.MIN_SPREAD])
def test_rewards_within_the_smallest_spread_are_equal(estimate, spread):
    rewards = doubles([[0.0, spread, 0.0, spread]])
    assert not estimate(rewards, everyone(rewards)).values.any()


@pytest.mark.parametrize(
    "name", ["grpo_sample", "dr_grpo", "batch_std", "rloo", "bnpo", "reinforce_plus_plus_baseline"]
)
def test_rewards_beyond_the_smallest_spread_are_not(name):
    rewards = doubles([[0.0, 3 * advantage.MIN_SPREAD]])
    assert BY_GROUP[name](rewards, everyone(rewards)).values.sign().tolist() == [[-1, 1]]


def test_estimators_that_compare_with_something_else_know_the_smallest_spread_as_well():
    least, all_of = advantage.MIN_SPREAD, tensor([[True, True]])
    assert not advantage.remax(doubles([[least, 0]]), all_of, doubles([0.0]), tensor([True])).values.any()
    assert advantage.remax(doubles([[3 * least, 0]]), all_of, doubles([0.0]), tensor([True])).signal.all()
    one_token = tensor([[[True], [True]]])
    assert not advantage.reinforce_plus_plus(doubles([[[0], [least]]]), one_token, all_of).values.any()
    assert advantage.reinforce_plus_plus(doubles([[[0], [3 * least]]]), one_token, all_of).signal.all()
    # with two completions of a deviation of exactly the least
    assert not advantage.pass_at_k(doubles([[0, 2 * least]]), all_of, k=1).values.any()
    lengths = tensor([[3, 3]])
    assert not advantage.reinforce_plus_plus_baseline(doubles([[0, 2 * least]]), all_of, lengths).values.any()
