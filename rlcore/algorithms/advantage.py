"""Group-relative advantages: how much better a completion is than its G - 1 siblings."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MIN_SPREAD = 1e-6  # rewards closer than this are equal: what is left is rounding, and dividing by it would amplify it


@dataclass(frozen=True, slots=True, eq=False)
class GroupAdvantages:
    """The advantages of one group."""

    values: Tensor  # [G] float64, exactly 0 for ungraded members and for a group without signal
    signal: bool  # False: the group teaches nothing
    mean: Tensor  # [] float64, reward over graded members; 0 where there is none
    std: Tensor  # [] float64, the divisor under normalize_by_std; 0 without signal


def group_advantages(rewards: Tensor, graded: Tensor, *, normalize_by_std: bool) -> GroupAdvantages:
    """Centre the rewards of a group on its mean and, if asked, divide by their standard deviation.

    Mean and deviation are over graded members alone, in float64. The deviation is the sample one (divisor
    n - 1), as in EasyR1, verl and TRL, so that their learning rates carry over; no epsilon is added, because
    a spread that would need one is no signal. Fewer than two graded members, or rewards within ``MIN_SPREAD``
    of each other, give exactly 0 for all.

    Args:
        rewards: [G] float. Entries of ungraded members may hold anything.
        graded: [G] bool.
        normalize_by_std: True is GRPO; False is Dr.GRPO, where a problem's difficulty does not weight it.

    Source: GRPO, arXiv:2402.03300, section 4.1.2; Dr.GRPO, arXiv:2503.20783, section 3.
    """
    rewards = rewards.to(torch.float64)
    counted = rewards[graded]
    zero = rewards.new_zeros(())
    mean = counted.mean() if counted.numel() else zero
    if counted.numel() < 2 or not bool(counted.max() - counted.min() > MIN_SPREAD):
        return GroupAdvantages(torch.zeros_like(rewards), signal=False, mean=mean, std=zero)
    std = counted.std(unbiased=True)
    values = (rewards - mean) / std if normalize_by_std else rewards - mean
    return GroupAdvantages(torch.where(graded, values, 0.0), signal=True, mean=mean, std=std)
