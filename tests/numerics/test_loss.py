"""Policy losses: numbers worked out by hand, gradients, and what must hold at ratio 1. Loops: test_references.py."""

import math
from collections.abc import Callable
from typing import get_args

import pytest
import torch
from torch import Tensor, tensor
from torch.testing import assert_close

from rlcore.algorithms.loss import (
    Aggregation,
    StepTotals,
    TokenLosses,
    cispo,
    gspo,
    gspo_token,
    high_entropy,
    ppo_clip,
    sapo,
    token_weights,
    vespo,
    within_off_policy_threshold,
)
from rlcore.config import AlgorithmConfig

OLD, NEW = tensor([-1.0, -1.0, -1.0]), tensor([-0.5, -1.0, -2.0])
ADVANTAGES = tensor([2.0, 2.0, -1.0])
OWN_SEQUENCES = (tensor([0, 1, 2]), tensor([1, 1, 1]))
KERNEL = {"k_positive": 2.0, "lambda_positive": 3.0, "k_negative": 3.0, "lambda_negative": 2.0}

Loss = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], TokenLosses]  # new, old, advantages, sequence_index, lengths
LOSSES: dict[str, Loss] = {
    "ppo_clip": lambda n, o, a, i, c: ppo_clip(n, o, a, clip_low=0.2, clip_high=0.28),
    "dual_clip": lambda n, o, a, i, c: ppo_clip(n, o, a, clip_low=0.2, clip_high=0.28, dual_clip=1.5),
    "gspo": lambda n, o, a, i, c: gspo(n, o, a, i, c, clip_low=0.1, clip_high=0.2),
    "gspo_token": lambda n, o, a, i, c: gspo_token(n, o, a, i, c, clip_low=0.1, clip_high=0.2),
    "cispo": lambda n, o, a, i, c: cispo(n, o, a, i, c, level="token", max_ratio=1.2),
    "cispo_sequence": lambda n, o, a, i, c: cispo(n, o, a, i, c, level="sequence", max_ratio=1.2),
    "sapo": lambda n, o, a, i, c: sapo(n, o, a, i, c, level="token", tau_positive=1.0, tau_negative=1.3),
    "sapo_sequence": lambda n, o, a, i, c: sapo(n, o, a, i, c, level="sequence", tau_positive=1.0, tau_negative=1.3),
    "vespo": lambda n, o, a, i, c: vespo(n, o, a, i, c, **KERNEL),
    "vespo_corrected": lambda n, o, a, i, c: vespo(n, o, a, i, c, log_weights=torch.zeros(len(c)), **KERNEL),
}
each_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())


def draw(distance: float = 0.4) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Four sequences of 1, 5, 2 and 4 tokens in float64; one advantage each, of either sign."""
    generator = torch.Generator().manual_seed(0)
    lengths = tensor([1, 5, 2, 4])
    index = torch.repeat_interleave(torch.arange(4), lengths)
    new = torch.randn(12, generator=generator, dtype=torch.float64) * 0.4 - 2
    old = new + torch.randn(12, generator=generator, dtype=torch.float64) * distance
    return new.requires_grad_(), old, tensor([1.0, -0.7, 0.5, -1.2], dtype=torch.float64)[index], index, lengths


def gradient_of(values: Tensor, logprobs: Tensor, weights: Tensor | float = 1.0) -> Tensor:
    return torch.autograd.grad((values * weights).sum(), logprobs, retain_graph=True)[0]


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


@pytest.mark.parametrize(
    ("mask", "setting", "bound"),
    [
        ("entropy_mask", {"share": 0.0}, "greater than 0"),
        ("entropy_mask", {"share": 1.5}, "less than or equal to 1"),
        ("off_policy_mask", {"threshold": 0.0}, "greater than 0"),
        ("loss", {"name": "cispo", "level": "batch"}, "'token' or 'sequence'"),
    ],
)
def test_a_setting_out_of_bounds_is_told_the_bound(mask, setting, bound):
    with pytest.raises(ValueError, match=bound):
        AlgorithmConfig.model_validate({mask: setting})


def test_ppo_clip_equals_the_values_worked_out_by_hand():
    # ratios e^0.5 = 1.649, 1, e^-1 = 0.368
    # min(1.649 * 2, 1.2 * 2) = 2.4; min(2, 2) = 2; min(-0.368, -0.8) = -0.8
    out = ppo_clip(NEW, OLD, ADVANTAGES, clip_low=0.2, clip_high=0.2)
    assert_close(out.values, tensor([-2.4, -2.0, 0.8]))
    assert out.clipped_low.tolist() == [False, False, True]
    assert out.clipped_high.tolist() == [True, False, False]
    assert_close(out.ratios, tensor([1.6487213, 1, 0.3678794]))


def test_clipping_counts_only_where_it_stops_a_move_that_would_pay():
    # the same ratios with the signs turned: min(-3.297, -2.4) and min(0.368, 0.8) are the unclipped ones
    out = ppo_clip(NEW, OLD, -ADVANTAGES, clip_low=0.2, clip_high=0.2)
    assert_close(out.values, tensor([1.6487213 * 2, 2.0, -0.3678794]))
    assert not (out.clipped_low | out.clipped_high).any()


def test_the_two_bounds_are_separate():
    # log 1.25 = 0.223: inside 1 + 0.28, outside 1 + 0.2
    new, old, one = tensor([0.0]), tensor([-0.2231]), tensor([1.0])
    assert not ppo_clip(new, old, one, clip_low=0.2, clip_high=0.28).clipped_high
    assert ppo_clip(new, old, one, clip_low=0.28, clip_high=0.2).clipped_high


def test_dual_clip_equals_the_values_worked_out_by_hand():
    # ratio e^2 = 7.389 with A = -1: 7.389 without, 3 with c = 3 and no gradient; A = 1 is PPO's 1.2; 2.5 is below c
    new, old = tensor([0.0, 0.0, 0.0]).requires_grad_(), tensor([-2.0, -2.0, -math.log(2.5)])
    out = ppo_clip(new, old, tensor([-1.0, 1.0, -1.0]), clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    assert_close(out.values, tensor([3.0, -1.2, 2.5]))
    assert out.clipped_high.tolist() == [True, True, False]
    assert_close(gradient_of(out.values, new), tensor([0.0, 0.0, 2.5]))


def test_gspo_equals_the_values_worked_out_by_hand():
    # one sequence: log-ratios 0.5, 0, -1: mean -1/6, s = e^(-1/6) = 0.846. A = 1: as it is; A = -1: cut at 0.9
    index, lengths = tensor([0, 0, 0]), tensor([3])
    for loss in (gspo, gspo_token):
        up = loss(NEW, OLD, torch.ones(3), index, lengths, clip_low=0.1, clip_high=0.1)
        assert_close(up.values, torch.full((3,), -math.exp(-1 / 6)))
        down = loss(NEW, OLD, -torch.ones(3), index, lengths, clip_low=0.1, clip_high=0.1)
        assert_close(down.values, torch.full((3,), 0.9))
        assert down.clipped_low.all()


def test_cispo_equals_the_values_worked_out_by_hand():
    # weights min(1.649, 1.2), 1, 0.368 (not raised); times A times log p: 1.2 * 2 * 0.5, 2 * 1, -0.368 * 2
    out = cispo(NEW, OLD, ADVANTAGES, *OWN_SEQUENCES, level="token", max_ratio=1.2)
    assert_close(out.values, tensor([1.2, 2.0, -0.7357589]))
    assert out.clipped_high.tolist() == [True, False, False]


def test_cispo_by_sequence_equals_the_values_worked_out_by_hand():
    # log-ratios 0.5, 0 | -1: s = e^0.25 = 1.284 and e^-1 = 0.368. Bound 1.2: 1.2 * 2 * 0.5, 1.2 * 2 * 1, -0.368 * 2
    out = cispo(NEW, OLD, ADVANTAGES, tensor([0, 0, 1]), tensor([2, 1]), level="sequence", max_ratio=1.2)
    assert_close(out.values, tensor([1.2, 2.4, -0.7357589]))
    assert_close(out.ratios, tensor([1.2840254, 1.2840254, 0.3678794]))
    assert out.clipped_high.tolist() == [True, True, False]


def test_sapo_equals_the_values_worked_out_by_hand():
    # A > 0, tau 1, ratio 2: -4 * sigmoid(1) = -2.924234; A < 0, tau 2, ratio 2: 2 * sigmoid(2) = 1.761594
    new, old = tensor([0.0, 0.0]), tensor([-math.log(2), -math.log(2)])
    index, lengths = tensor([0, 1]), tensor([1, 1])
    out = sapo(new, old, tensor([1.0, -1.0]), index, lengths, level="token", tau_positive=1.0, tau_negative=2.0)
    assert_close(out.values, tensor([-2.9242343, 1.7615942]))


def test_sapo_by_sequence_equals_the_values_worked_out_by_hand():
    # ratios 4 and 1: s = 4^(1/2) = 2. A > 0, tau 1: -4 * sigmoid(1) = -2.924234 for both tokens
    # d s / d log p = s / 2 for each of two tokens: the sum's gradient is 2 * -4 * sigmoid(1) (1 - sigmoid(1)) * 2 / 2
    new, old = tensor([0.0, 0.0]).requires_grad_(), tensor([-math.log(4), 0.0])
    index, lengths = tensor([0, 0]), tensor([2])
    out = sapo(new, old, torch.ones(2), index, lengths, level="sequence", tau_positive=1.0, tau_negative=2.0)
    assert_close(out.values.detach(), tensor([-2.9242343, -2.9242343]))
    assert_close(out.ratios, tensor([2.0, 2.0]))
    assert_close(gradient_of(out.values, new), torch.full((2,), -1.5728954))


def test_vespo_equals_the_values_worked_out_by_hand():
    # W = 2 * 1/4 = 1/2. A > 0: (1/2)^2 e^(3/2) = 1.120422; A < 0: (1/2)^3 e = 0.339785; times -A log p, log p = -1
    new, old = tensor([-1.0, -1.0]), tensor([-1 - math.log(2), -1 + math.log(4)])
    index, lengths = tensor([0, 0]), tensor([2])
    up = vespo(new, old, torch.ones(2), index, lengths, **KERNEL)
    assert_close(up.values, torch.full((2,), 1.1204223))
    assert_close(up.ratios, torch.full((2,), 0.5))
    down = vespo(new, old, -torch.ones(2), index, lengths, **KERNEL)
    assert_close(down.values, torch.full((2,), -0.3397852))


def test_vespo_takes_the_samplers_weight_into_its_ratio():
    # p_new / p_old = 2 * 1/4 and w = 2: W = 1, the kernel is 1, and the loss -A log p = 1
    new, old = tensor([-1.0, -1.0]), tensor([-1 - math.log(2), -1 + math.log(4)])
    index, lengths = tensor([0, 0]), tensor([2])
    out = vespo(new, old, torch.ones(2), index, lengths, log_weights=tensor([math.log(2)]), **KERNEL)
    assert_close(out.values, torch.ones(2))
    assert_close(out.ratios, torch.ones(2))
    # a weight of 0 masks the sequence: log W = -20 at most, (e^-20)^2 e^3 = 8.5e-17
    masked = vespo(new, old, torch.ones(2), index, lengths, log_weights=tensor([-20.0]), **KERNEL)
    assert 0 < float(masked.values.abs().max()) < 1e-16


def test_the_tokens_of_highest_entropy_by_hand():
    entropies = tensor([0.1, 2.0, 0.5, 1.5, 0.2])
    assert high_entropy(entropies, 0.4).tolist() == [False, True, False, True, False]
    assert high_entropy(entropies, 0.41).tolist() == [False, True, True, True, False]  # ceil(2.05)
    assert high_entropy(entropies, 0.01).tolist() == [False, True, False, False, False]
    assert high_entropy(entropies, 1.0).all()
    ties = tensor([1.0, 2.0, 2.0, 0.0])
    assert high_entropy(ties, 0.25).tolist() == [False, True, True, False]
    assert int(high_entropy(torch.arange(30.0), 0.1).sum()) == 3  # 0.1 * 30 is 3.0000000000000004 or 3, by machine
    assert high_entropy(torch.empty(0), 0.2).shape == (0,)


def test_the_tokens_of_highest_entropy_do_not_depend_on_the_order():
    generator = torch.Generator().manual_seed(0)
    entropies = torch.rand(501, generator=generator).mul(50).round()  # many ties
    kept, order = high_entropy(entropies, 0.2), torch.randperm(501, generator=generator)
    assert torch.equal(high_entropy(entropies[order], 0.2), kept[order])
    assert 0.2 <= float(kept.float().mean()) < 0.25
    assert entropies[kept].min() > entropies[~kept].max()


def test_the_off_policy_mask_by_hand():
    # means of log(p_sampler / p_new): (1 + 0.25) / 2 = 0.625; 0.5; 0.75; the threshold is 0.5
    new, sampler = torch.full((5,), -2.0), tensor([-1.0, -1.75, -1.5, -1.5, -1.25])
    index, lengths = tensor([0, 0, 1, 1, 2]), tensor([2, 2, 1])

    def kept(*advantages: float) -> list[bool]:
        found = within_off_policy_threshold(new, sampler, tensor(advantages), index, lengths, threshold=0.5)
        return found.tolist()

    assert kept(-1, -1, -1, -1, -1) == [False, False, True, True, False]  # a mean on the threshold is kept
    assert kept(-1, -1, -1, -1, 0.5) == [False, False, True, True, True]
    assert kept(-1, 1, 0, 0, 0) == [False, True, True, True, True]  # advantages by token


@each_loss
def test_on_policy_the_ratio_is_exactly_1_and_the_gradient_the_plain_one(loss):
    logprobs, _, advantages, index, lengths = draw()
    logprobs = logprobs.detach().float().requires_grad_()
    out = loss(logprobs, logprobs.detach(), advantages, index, lengths)
    assert torch.equal(out.ratios, torch.ones(12))
    assert not (out.clipped_low | out.clipped_high).any()
    assert_close(gradient_of(out.values, logprobs), -advantages.float())


@each_loss
def test_an_advantage_of_0_gives_a_gradient_of_exactly_0(loss):
    new, old, advantages, index, lengths = draw()
    out = loss(new, old, torch.zeros_like(advantages), index, lengths)
    assert torch.equal(gradient_of(out.values, new), torch.zeros_like(new))
    assert not out.values.any()


@each_loss
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_wild_ratio_stays_finite(loss, sign):
    new = tensor([0.0, -1000.0, -1.0]).requires_grad_()
    out = loss(new, tensor([-1000.0, 0.0, -1.0]), torch.full((3,), sign), tensor([0, 1, 1]), tensor([1, 2]))
    assert torch.isfinite(out.values).all()
    assert torch.isfinite(gradient_of(out.values, new)).all()
    assert torch.isfinite(out.ratios).all()


@pytest.mark.parametrize("name", ["ppo_clip", "dual_clip", "gspo", "sapo", "sapo_sequence"])
def test_gradient_agrees_with_finite_differences(name):
    new, old, advantages, index, lengths = draw()

    def values(x: Tensor) -> Tensor:
        return LOSSES[name](x, old, advantages, index, lengths).values

    assert torch.autograd.gradcheck(values, (new,), eps=1e-7, atol=1e-6)
    if not name.startswith("sapo"):
        gradient = gradient_of(values(new), new)
        assert 0 < int((gradient == 0).sum()) < 12  # some are clipped, some are not: both sides were checked


def test_gradients_through_detached_weights_are_the_intended_ones():
    new, old, advantages, index, lengths = draw()
    ratios = (new - old).detach().exp()

    found = gradient_of(LOSSES["cispo"](new, old, advantages, index, lengths).values, new)
    assert_close(found, -ratios.clamp_max(1.2) * advantages)

    totals = torch.zeros(4, dtype=torch.float64).index_add(0, index, (new - old).detach())
    w = totals.exp()[index]
    s = (totals / lengths).exp()[index]
    found = gradient_of(LOSSES["cispo_sequence"](new, old, advantages, index, lengths).values, new)
    assert_close(found, -s.clamp_max(1.2) * advantages)

    kernel = torch.where(advantages > 0, w**2 * (3 * (1 - w)).exp(), w**3 * (2 * (1 - w)).exp())
    found = gradient_of(LOSSES["vespo"](new, old, advantages, index, lengths).values, new)
    assert_close(found, -kernel * advantages)

    # of gspo_token: s * A for each token on its own, 0 where it is clipped
    stopped = ((s > 1.2) & (advantages > 0)) | ((s < 0.9) & (advantages < 0))
    out = LOSSES["gspo_token"](new, old, advantages, index, lengths)
    assert_close(gradient_of(out.values, new), torch.where(stopped, 0.0, -s * advantages))
    assert torch.equal(out.clipped_low | out.clipped_high, stopped)


def test_sapos_gate_is_the_papers_gradient_weight():
    # d/d log p of the loss is -4 sigmoid (1 - sigmoid) * ratio * A: the weight fades on both sides of ratio 1
    new, old, advantages, index, lengths = draw()
    ratios = (new - old).detach().exp()
    gate = torch.sigmoid(torch.where(advantages > 0, 1.0, 1.3) * (ratios - 1))
    found = gradient_of(LOSSES["sapo"](new, old, advantages, index, lengths).values, new)
    assert_close(found, -4 * gate * (1 - gate) * ratios * advantages)


def test_gspo_token_equals_gspo_in_value_and_where_advantages_are_constant_in_gradient():
    new, old, advantages, index, lengths = draw()
    whole, by_token = (LOSSES[name](new, old, advantages, index, lengths) for name in ("gspo", "gspo_token"))
    assert_close(whole.values, by_token.values)
    totals = StepTotals(tokens=12, sequences=4)

    def gradients(mode: Aggregation) -> list[Tensor]:
        weights = token_weights(index, lengths, mode=mode, totals=totals, max_completion_tokens=5)
        return [gradient_of(out.values, new, weights) for out in (whole, by_token)]

    for mode in get_args(Aggregation):  # within a sequence the weights of all modes are equal, so under each of them
        first, second = gradients(mode)
        assert_close(first, second)
    # advantages that differ along a sequence part the two
    uneven = advantages * torch.linspace(0.5, 1.5, 12, dtype=torch.float64)
    first, second = (
        gradient_of(LOSSES[name](new, old, uneven, index, lengths).values, new) for name in ("gspo", "gspo_token")
    )
    assert (first - second).abs().max() > 1e-2


def test_gspo_with_token_sums_is_luspo():
    # LUSPO scales GSPO's loss of each sequence by its length: mean over sequences of length * surrogate
    new, old, advantages, index, lengths = draw()
    totals = StepTotals(tokens=12, sequences=4)
    weights = token_weights(index, lengths, mode="sequence_mean_token_sum", totals=totals, max_completion_tokens=5)
    out = LOSSES["gspo"](new, old, advantages, index, lengths)
    first_of = tensor([0, 1, 6, 8])
    assert_close((weights * out.values).sum(), (lengths * out.values[first_of]).mean())


@each_loss
def test_no_tokens_give_a_loss_of_0_that_can_be_differentiated(loss):
    nothing = torch.empty(0, requires_grad=True)
    out = loss(nothing, nothing.detach(), nothing.detach(), torch.empty(0, dtype=torch.int64), tensor([0]))
    out.values.sum().backward()
    assert out.values.sum() == 0


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_ratio_on_its_bound_is_not_clipped(sign):
    advantages = sign * torch.ones(3)
    for out in (
        ppo_clip(NEW, NEW, advantages, clip_low=0.0, clip_high=0.0, dual_clip=1.0),
        gspo(NEW, NEW, advantages, tensor([0, 0, 1]), tensor([2, 1]), clip_low=0.0, clip_high=0.0),
        cispo(NEW, NEW, advantages, *OWN_SEQUENCES, level="token", max_ratio=1.0),
        cispo(NEW, NEW, advantages, *OWN_SEQUENCES, level="sequence", max_ratio=1.0),
    ):
        assert out.ratios.eq(1).all()
        assert not out.clipped_low.any()
        assert not out.clipped_high.any()


@each_loss
def test_a_loss_is_computed_in_the_dtype_of_the_log_probs(loss):
    index, lengths = tensor([0, 0, 1]), tensor([2, 1])
    assert loss(NEW, OLD, ADVANTAGES.double(), index, lengths).values.dtype == NEW.dtype
