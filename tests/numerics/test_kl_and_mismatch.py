import math
from typing import get_args

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import tensor
from torch.testing import assert_close

from rlcore.algorithms.divergence import (
    MAX_LOG_RATIO,
    effective_sample_size,
    importance_ratios,
    k1,
    k2,
    k3,
    k3_weighted,
    masked_importance,
    next_coefficient,
    sequence_log_weights,
    straight_through,
    truncated_importance,
)
from rlcore.algorithms.objective import kl_estimate
from rlcore.config.algorithm import KlConfig, KlEstimator

LOGPROBS = st.floats(min_value=-1e4, max_value=0, width=32)


def test_estimates_equal_the_values_worked_out_by_hand():
    # p = e^-1, q = e^-2: log q/p = -1. k1 = 1; k2 = 1/2; k3 = e^-1 - 1 + 1 = 0.367879
    p, q = tensor([-1.0]), tensor([-2.0])
    assert_close(k1(p, q), tensor([1.0]))
    assert_close(k2(p, q), tensor([0.5]))
    assert_close(k3(p, q), tensor([0.36787944]))


def test_k1_and_k3_average_to_the_divergence():
    # p = (0.7, 0.3), q = (0.4, 0.6): sum p ln p/q = 0.7 ln 1.75 + 0.3 ln 0.5 = 0.391731 - 0.207944
    p, q = tensor([0.7, 0.3]), tensor([0.4, 0.6])
    exact = tensor(0.7 * math.log(1.75) + 0.3 * math.log(0.5))
    assert_close((p * k1(p.log(), q.log())).sum(), exact)
    assert_close((p * k3(p.log(), q.log())).sum(), exact)


@given(p=LOGPROBS, q=LOGPROBS)
def test_k3_is_never_negative_and_always_finite(p, q):
    a = tensor([p]).requires_grad_()
    value = k3(a, tensor([q]))
    value.sum().backward()
    assert 0 <= float(value.detach()) < math.inf
    assert torch.isfinite(a.grad).all()


@given(p=LOGPROBS)
def test_k3_is_exactly_0_with_gradient_exactly_0_where_the_two_agree(p):
    a = tensor([p]).requires_grad_()
    value = k3(a, tensor([p]))
    value.sum().backward()
    assert value == 0
    assert a.grad == 0


def test_gradients_agree_with_finite_differences():
    a = tensor([-1.0, -0.3, -4.0], dtype=torch.float64, requires_grad=True)
    b = tensor([-1.5, -0.2, -1.0], dtype=torch.float64)
    for estimate in (k1, k2, k3):  # straight_through's gradient is not its value's: below
        assert torch.autograd.gradcheck(lambda x, estimate=estimate: estimate(x, b), (a,))


def test_the_expected_gradient_of_k2_on_policy_is_that_of_the_divergence():
    logits = tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    ref = tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    logp = logits.log_softmax(0)
    (expected,) = torch.autograd.grad((logp.exp() * (logp - ref)).sum(), logits, retain_graph=True)
    (of_k2,) = torch.autograd.grad((logp.detach().exp() * k2(logp, ref)).sum(), logits)
    assert_close(of_k2, expected)
    (of_straight,) = torch.autograd.grad(
        (logp.detach().exp() * straight_through(logits.log_softmax(0), ref)).sum(), logits
    )
    assert_close(of_straight, expected)


def test_the_expected_gradient_of_k3_on_policy_is_that_of_the_other_direction():
    logits = tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    ref = tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    logp = logits.log_softmax(0)
    (expected,) = torch.autograd.grad((ref.exp() * (ref - logp)).sum(), logits, retain_graph=True)
    (of_k3,) = torch.autograd.grad((logp.detach().exp() * k3(logp, ref)).sum(), logits)
    assert_close(of_k3, expected)


def test_the_weighted_k3_is_unbiased_in_value_and_gradient_over_the_tokens_of_another_policy():
    """Its mean over another policy's tokens is the divergence, and the mean of its gradient that of the divergence; the
    means of k3 are neither."""
    logits = tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    ref, sampler = (tensor(p, dtype=torch.float64).log() for p in ([0.2, 0.5, 0.3], [0.6, 0.3, 0.1]))
    logp = logits.log_softmax(0)
    divergence = (logp.exp() * (logp - ref)).sum()
    (expected,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    weighted = (sampler.exp() * k3_weighted(logp, ref, (logp - sampler).exp())).sum()
    assert_close(weighted, divergence)
    assert_close(torch.autograd.grad(weighted, logits, retain_graph=True)[0], expected)
    plain = (sampler.exp() * k3(logp, ref)).sum()
    assert abs(plain - divergence) > 0.05
    assert (torch.autograd.grad(plain, logits)[0] - expected).abs().max() > 0.05


def test_straight_through_has_the_value_of_k3_and_the_gradient_of_k2():
    a = tensor([-1.0, -0.3, -4.0, -2.0], dtype=torch.float64, requires_grad=True)
    b = tensor([-1.5, -0.2, -1.0, -2.0], dtype=torch.float64)
    value = straight_through(a, b)
    assert_close(value, k3(a, b))
    assert_close(torch.autograd.grad(value.sum(), a)[0], (a - b).detach())


def test_the_adaptive_coefficient_equals_the_values_worked_out_by_hand():
    # target 0.1, horizon 1000, 100 completions: an error of +10% moves it by 1%, more than 20% by 2% at most
    def moved(kl: float) -> float:
        return next_coefficient(0.5, kl, target=0.1, horizon=1000, completions=100)

    assert moved(0.11) == pytest.approx(0.5 * 1.01)
    assert moved(0.1) == pytest.approx(0.5)
    assert moved(0.4) == pytest.approx(0.5 * 1.02)
    assert moved(0.0) == moved(-1.0) == pytest.approx(0.5 * 0.98)


def test_the_adaptive_coefficient_settles_where_the_kl_is_on_target():
    coefficient = 1.0
    for _ in range(2000):  # a policy whose KL falls as the coefficient rises: 0.1 where it is 0.4
        coefficient = next_coefficient(coefficient, 0.04 / coefficient, target=0.1, horizon=1000, completions=50)
    assert coefficient == pytest.approx(0.4, rel=1e-3)


def test_the_effective_sample_size_equals_the_value_worked_out_by_hand():
    # w = p_trainer / p_sampler: 2, 1, 1/2
    # sum w = 3.5; sum w^2 = 4 + 1 + 0.25 = 5.25; effective tokens 12.25 / 5.25 = 2.3333
    trainer, sampler = tensor([0.4, 0.5, 0.1]).log(), tensor([0.2, 0.5, 0.2]).log()
    ratios = importance_ratios(trainer, sampler)
    assert_close(ratios, tensor([2.0, 1.0, 0.5]))
    assert_close(effective_sample_size(ratios.sum(), ratios.square().sum()), tensor(12.25 / 5.25))


def test_agreement_gives_the_whole_effective_sample_size():
    logprobs = torch.randn(50) - 2
    ratios = importance_ratios(logprobs, logprobs)
    assert effective_sample_size(ratios.sum(), ratios.square().sum()) == 50


def test_ratios_and_the_effective_sample_size_survive_extremes():
    ratios = importance_ratios(tensor([-1.0, -500.0, 0.0]), tensor([-1.2, 0.0, -500.0]))
    assert torch.isfinite(ratios.square()).all()
    nothing = importance_ratios(torch.empty(0), torch.empty(0)).sum()
    assert effective_sample_size(nothing, nothing.square()) == 0


def test_importance_weights_equal_the_values_worked_out_by_hand():
    # ratios 2, 1/2 | 4; of the sequences 1 and 4
    trainer, sampler = tensor([0.4, 0.1, 0.8]).log(), tensor([0.2, 0.2, 0.2]).log()
    index = tensor([0, 0, 1])
    assert_close(truncated_importance(trainer, sampler, None, max_weight=3.0), tensor([2.0, 0.5, 3.0]))
    assert_close(truncated_importance(trainer, sampler, index, max_weight=3.0), tensor([1.0, 1.0, 3.0]))
    masked = masked_importance(trainer, sampler, None, min_weight=0.6, max_weight=3.0)
    assert_close(masked, tensor([2.0, 0.0, 0.0]))
    masked = masked_importance(trainer, sampler, index, min_weight=0.6, max_weight=3.0)
    assert_close(masked, tensor([1.0, 1.0, 0.0]))


def test_log_weights_of_sequences_by_hand():
    index, lengths = tensor([0, 0, 1]), tensor([2, 1, 0])
    tokens, of_sequences = tensor([2.0, 0.25, 4.0]), tensor([0.5, 0.5, 4.0])
    expected = tensor([math.log(0.5), math.log(4), 0.0])
    assert_close(sequence_log_weights(tokens, index, lengths, level="token"), expected)
    assert_close(sequence_log_weights(of_sequences, index, lengths, level="sequence"), expected)
    for level in ("token", "sequence"):
        masked = sequence_log_weights(tensor([0.0, 0.0, 1.0]), index, lengths, level=level)
        assert masked.tolist() == [-MAX_LOG_RATIO, 0.0, 0.0]


def test_importance_weights_have_no_gradient_and_stay_finite():
    trainer = tensor([0.0, -500.0]).requires_grad_()
    sampler = tensor([-500.0, 0.0])
    for index in (None, tensor([0, 1])):
        for weights in (
            truncated_importance(trainer, sampler, index, max_weight=2.0),
            masked_importance(trainer, sampler, index, min_weight=0.0, max_weight=2.0),
        ):
            assert not weights.requires_grad
            assert torch.isfinite(weights).all()
    smallest = truncated_importance(trainer, sampler, None, max_weight=2.0)[1]
    assert smallest.item() == pytest.approx(math.exp(-MAX_LOG_RATIO), rel=1e-6)
    nothing = torch.empty(0)
    assert truncated_importance(nothing, nothing, torch.empty(0, dtype=torch.int64), max_weight=2.0).shape == (0,)


def test_sampler_and_trainer_that_agree_have_weights_of_exactly_1():
    logprobs = torch.randn(50) - 2
    index = torch.arange(50) // 7
    for of_sequence in (None, index):
        assert torch.equal(
            masked_importance(logprobs, logprobs, of_sequence, min_weight=1.0, max_weight=1.0), torch.ones(50)
        )


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [
        ("k1", 0.5, 1.0),
        ("k2", 0.125, 0.5),
        ("k3", math.exp(-0.5) - 0.5, 1 - math.exp(-0.5)),
        ("straight_through", math.exp(-0.5) - 0.5, 0.5),
        # ratio 2: twice the value of k3; the gradient is 2 (k3 + k3's slope) = 2 (e^-0.5 - 0.5 + 1 - e^-0.5)
        ("k3_weighted", 2 * (math.exp(-0.5) - 0.5), 1.0),
    ],
)
def test_each_configured_estimator_is_its_own(estimator: KlEstimator, value: float, slope: float):
    """log p = -1, log q = -1.5: the log-ratio is 0.5, and k3 is exp(-0.5) - 1 + 0.5. The sampler's p is half of p."""
    p = tensor([-1.0], dtype=torch.float64, requires_grad=True)
    ratios = (p - tensor([-1.0 - math.log(2)], dtype=torch.float64)).exp()
    found = kl_estimate(estimator, p, tensor([-1.5], dtype=torch.float64), ratios)
    found.sum().backward()
    assert float(found.detach()) == pytest.approx(value, rel=1e-12)
    assert float(p.grad) == pytest.approx(slope, rel=1e-12)


@pytest.mark.parametrize(
    ("place", "estimator", "allowed"),
    [
        ("loss", "k1", "Use k2, k3, straight_through or k3_weighted"),
        ("reward", "straight_through", "Use k1, k2 or k3"),
        (
            "reward",
            "k3_weighted",
            "k3_weighted in the reward, where it has no gradient and equals k3. Use k1, k2 or k3",
        ),
    ],
)
def test_an_estimator_in_the_wrong_place_is_told_which_ones_are_allowed(place: str, estimator: str, allowed: str):
    with pytest.raises(ValueError, match=allowed):
        KlConfig.model_validate({"place": place, "estimator": estimator})


def test_every_estimator_of_the_config_is_in_the_table_above():
    assert set(get_args(KlEstimator)) == {"k1", "k2", "k3", "straight_through", "k3_weighted"}
