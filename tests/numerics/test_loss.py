from typing import get_args

import pytest
import torch
from torch import Tensor, tensor
from torch.testing import assert_close

from rlcore.algorithms.aggregation import Aggregation, StepTotals, token_weights
from rlcore.algorithms.loss import clipped_policy_loss
from rlcore.config import AlgorithmConfig

OLD, NEW = tensor([-1.0, -1.0, -1.0]), tensor([-0.5, -1.0, -2.0])
ADVANTAGES, THIRDS = tensor([2.0, 2.0, -1.0]), torch.full((3,), 1 / 3)


def weights_of(mode: Aggregation) -> Tensor:
    # two sequences here, of 1 and 3 trained tokens; one of 2 on another rank: 6 tokens in 3 sequences
    return token_weights(
        tensor([0, 1, 1, 1]),
        tensor([1, 3]),
        mode=mode,
        totals=StepTotals(tokens=6, sequences=3),
        max_completion_tokens=10,
    )


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token_mean", [1 / 6, 1 / 6, 1 / 6, 1 / 6]),
        ("sequence_mean_token_mean", [1 / 3, 1 / 9, 1 / 9, 1 / 9]),  # 1 / (3 * 1), 1 / (3 * 3)
        ("sequence_mean_token_sum", [1 / 3, 1 / 3, 1 / 3, 1 / 3]),
        ("constant", [1 / 30, 1 / 30, 1 / 30, 1 / 30]),  # 1 / (3 * 10)
    ],
)
def test_weights_equal_the_values_worked_out_by_hand(mode, expected):
    assert torch.equal(weights_of(mode), tensor(expected, dtype=torch.float64))


def test_every_aggregation_of_the_config_is_known_here():
    assert get_args(Aggregation) == get_args(AlgorithmConfig.model_fields["aggregation"].annotation)


@pytest.mark.parametrize(("tokens", "sequences"), [(0, 4), (4, 0)])
def test_a_step_with_nothing_to_train_on_is_refused(tokens, sequences):
    with pytest.raises(ValueError, match="nothing to train on"):
        StepTotals(tokens=tokens, sequences=sequences)


def test_loss_equals_the_value_worked_out_by_hand():
    # ratios e^0.5 = 1.649, 1, e^-1 = 0.368
    # min(1.649 * 2, 1.2 * 2) = 2.4; min(2, 2) = 2; min(-0.368, -0.8) = -0.8; -(2.4 + 2 - 0.8) / 3 = -1.2
    out = clipped_policy_loss(NEW, OLD, ADVANTAGES, THIRDS, clip_low=0.2, clip_high=0.2)
    assert_close(out.loss, tensor(-1.2))
    assert out.sums.clipped_low == 1
    assert out.sums.clipped_high == 1
    assert_close(out.sums.ratio, tensor(1.6487213 + 1 + 0.3678794))
    assert_close(out.sums.ratio_max, tensor(1.6487213))
    assert_close(out.sums.kl_k1, tensor(0.5))  # old - new: -0.5 + 0 + 1
    # ratio - 1 - log ratio: 1.6487 - 1 - 0.5 = 0.1487; 0; 0.3679 - 1 + 1 = 0.3679
    assert_close(out.sums.kl_k3, tensor(0.1487213 + 0.3678794))


def test_clipping_counts_only_where_it_stops_a_move_that_would_pay():
    # the same ratios with the signs turned: min(-3.297, -2.4) and min(0.368, 0.8) are the unclipped ones
    out = clipped_policy_loss(NEW, OLD, -ADVANTAGES, THIRDS, clip_low=0.2, clip_high=0.2)
    assert_close(out.loss, tensor((1.6487213 * 2 + 2 - 0.3678794) / 3))
    assert out.sums.clipped_low == 0
    assert out.sums.clipped_high == 0


def test_the_two_bounds_are_separate():
    # log 1.25 = 0.223: inside 1 + 0.28, outside 1 + 0.2
    new, old, one = tensor([0.0]), tensor([-0.2231]), tensor([1.0])
    assert clipped_policy_loss(new, old, one, one, clip_low=0.2, clip_high=0.28).sums.clipped_high == 0
    assert clipped_policy_loss(new, old, one, one, clip_low=0.28, clip_high=0.2).sums.clipped_high == 1


def test_on_policy_ratio_is_exactly_1():
    logprobs = torch.randn(1000).sub(3).requires_grad_()
    advantages, weights = torch.randn(1000), torch.full((1000,), 1e-3)
    out = clipped_policy_loss(logprobs, logprobs.detach(), advantages, weights, clip_low=0.2, clip_high=0.28)
    assert out.sums.clipped_low == out.sums.clipped_high == 0
    assert out.sums.ratio == 1000
    assert out.sums.ratio_max == 1
    assert out.sums.kl_k1 == out.sums.kl_k3 == 0
    (gradient,) = torch.autograd.grad(out.loss, logprobs)
    assert torch.equal(gradient, -(weights * advantages))  # the plain policy gradient


def test_an_advantage_of_0_gives_a_gradient_of_exactly_0():
    new = tensor([-0.5, -5.0, 0.0, -1.0]).requires_grad_()
    out = clipped_policy_loss(new, torch.full((4,), -1.0), torch.zeros(4), torch.ones(4), clip_low=0.2, clip_high=0.2)
    (gradient,) = torch.autograd.grad(out.loss, new)
    assert out.loss == 0
    assert torch.equal(gradient, torch.zeros(4))


def test_a_wild_ratio_stays_finite():
    new = tensor([0.0, -1000.0]).requires_grad_()
    out = clipped_policy_loss(
        new, tensor([-1000.0, 0.0]), tensor([-1.0, 1.0]), torch.ones(2), clip_low=0.2, clip_high=0.2
    )
    (gradient,) = torch.autograd.grad(out.loss, new)
    assert torch.isfinite(out.loss)
    assert torch.isfinite(gradient).all()
    assert torch.isfinite(out.sums.kl_k3)


def test_gradient_agrees_with_finite_differences():
    generator = torch.Generator().manual_seed(0)
    new = torch.randn(12, generator=generator, dtype=torch.float64).mul(0.4).requires_grad_()
    old = torch.randn(12, generator=generator, dtype=torch.float64) * 0.4
    advantages = torch.randn(12, generator=generator, dtype=torch.float64)
    weights = torch.rand(12, generator=generator, dtype=torch.float64)

    def loss(x: Tensor) -> Tensor:
        return clipped_policy_loss(x, old, advantages, weights, clip_low=0.2, clip_high=0.28).loss

    assert torch.autograd.gradcheck(loss, (new,), eps=1e-7, atol=1e-6)
    gradient = torch.autograd.grad(loss(new), new)[0]
    assert 0 < int((gradient == 0).sum()) < 12  # some are clipped, some are not: both sides were checked


def test_no_tokens_give_a_loss_of_0_that_can_be_differentiated():
    nothing = torch.empty(0, requires_grad=True)
    out = clipped_policy_loss(nothing, nothing, nothing, nothing, clip_low=0.2, clip_high=0.2)
    out.loss.backward()
    assert out.loss == 0
    assert out.sums.ratio_max == 0


def test_sums_of_parts_merge_to_the_sums_of_the_whole():
    def sums(part: slice):
        out = clipped_policy_loss(NEW[part], OLD[part], ADVANTAGES[part], THIRDS[part], clip_low=0.2, clip_high=0.2)
        return out.sums

    merged, whole = sums(slice(0, 2)).merge(sums(slice(2, 3))), sums(slice(None))
    for name in ("clipped_low", "clipped_high", "ratio", "ratio_max", "kl_k1", "kl_k3"):
        assert_close(getattr(merged, name), getattr(whole, name))
