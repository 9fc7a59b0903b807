import math

import hypothesis.strategies as st
import torch
from hypothesis import given, settings
from torch import tensor
from torch.testing import assert_close

from rlcore.algorithms.kl import k1, k2, k3
from rlcore.algorithms.mismatch import mismatch

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
@settings(deadline=None)
def test_k3_is_never_negative_and_always_finite(p, q):
    a = tensor([p]).requires_grad_()
    value = k3(a, tensor([q]))
    value.sum().backward()
    assert 0 <= float(value.detach()) < math.inf
    assert torch.isfinite(a.grad).all()


@given(p=LOGPROBS)
@settings(deadline=None)
def test_k3_is_exactly_0_with_gradient_exactly_0_where_the_two_agree(p):
    a = tensor([p]).requires_grad_()
    value = k3(a, tensor([p]))
    value.sum().backward()
    assert value == 0
    assert a.grad == 0


def test_gradients_agree_with_finite_differences():
    a = tensor([-1.0, -0.3, -4.0], dtype=torch.float64, requires_grad=True)
    b = tensor([-1.5, -0.2, -1.0], dtype=torch.float64)
    for estimate in (k1, k2, k3):
        assert torch.autograd.gradcheck(lambda x, estimate=estimate: estimate(x, b), (a,))


def test_the_expected_gradient_of_k2_on_policy_is_that_of_the_divergence():
    logits = tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    ref = tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    logp = logits.log_softmax(0)
    (expected,) = torch.autograd.grad((logp.exp() * (logp - ref)).sum(), logits, retain_graph=True)
    (of_k2,) = torch.autograd.grad((logp.detach().exp() * k2(logp, ref)).sum(), logits)
    assert_close(of_k2, expected)


def test_mismatch_equals_the_values_worked_out_by_hand():
    # w = p_trainer / p_sampler: 2, 1, 1/2. |delta| = ln 2, 0, ln 2
    # sum w = 3.5; sum w^2 = 4 + 1 + 0.25 = 5.25; effective tokens 12.25 / 5.25 = 2.3333
    # k3 = w - 1 - ln w: 1 - 0.693147; 0; -0.5 + 0.693147: together 0.5
    trainer, sampler = tensor([0.4, 0.5, 0.1]).log(), tensor([0.2, 0.5, 0.2]).log()
    sums = mismatch(trainer, sampler)
    assert_close(sums.abs_delta, tensor(2 * math.log(2)))
    assert_close(sums.abs_delta_max, tensor(math.log(2)))
    assert_close(sums.weight, tensor(3.5))
    assert_close(sums.weight_squared, tensor(5.25))
    assert_close(sums.effective_sample_size(), tensor(12.25 / 5.25))
    assert_close(sums.k3, tensor(0.5))


def test_sampler_and_trainer_that_agree_lose_no_sample():
    logprobs = torch.randn(50) - 2
    sums = mismatch(logprobs, logprobs)
    assert sums.abs_delta == sums.k3 == 0
    assert sums.effective_sample_size() == 50


def test_mismatch_merges_and_survives_extremes():
    a, b = tensor([-1.0, -500.0, 0.0]), tensor([-1.2, 0.0, -500.0])
    whole = mismatch(a, b)
    merged = mismatch(a[:1], b[:1]).merge(mismatch(a[1:], b[1:]))
    for name in ("abs_delta", "abs_delta_max", "weight", "weight_squared", "k3"):
        assert torch.isfinite(getattr(whole, name))
        assert_close(getattr(merged, name), getattr(whole, name))
    assert whole.abs_delta_max == 500  # not clamped
    nothing = mismatch(torch.empty(0), torch.empty(0))
    assert nothing.effective_sample_size() == nothing.abs_delta_max == 0
