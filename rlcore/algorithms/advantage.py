"""How much better a completion is than expected: rewards in, advantages out, in float64.

B problems of a rollout batch, G completions of each, C tokens of the longest completion. Ungraded completions (no
verdict in time) enter no mean and no deviation, and get exactly 0. Rewards that differ by at most ``MIN_SPREAD`` count
as equal, because dividing by such a spread would amplify rounding. No deviation therefore needs an epsilon.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from typing import Literal

import torch
from torch import Tensor

MIN_SPREAD = 1e-6
MIN_DENSITY = 1e-6  # of BNPO's Beta

GroupOutcome = Literal["all_right", "all_wrong", "mixed", "ungraded"]


@dataclass(frozen=True, slots=True, eq=False)
class Advantages:
    """The advantages of a batch."""

    values: Tensor  # [B, G] float64, or [B, G, C] if they differ between tokens

    @property
    def signal(self) -> Tensor:
        """[B] bool: whether any value of the group is not 0. A group without signal adds exactly 0 to the loss.

        This is the only definition of signal.
        """
        return self.values.ne(0).flatten(1).any(-1)


def grpo(rewards: Tensor, graded: Tensor, *, std: Literal["sample", "population"]) -> Advantages:
    """(reward - mean) / deviation over the graded completions of the group.

    Args:
        rewards: [B, G] float. Values of ungraded completions are ignored.
        graded: [B, G] bool.
        std: the divisor under the root: G - 1 for "sample" (as EasyR1, verl and TRL), G for "population".

    Source: GRPO, arXiv:2402.03300, section 4.1.2.
    """
    centred, spread = _centred(rewards, graded)
    counts = graded.sum(-1, keepdim=True)
    divisor = counts - 1 if std == "sample" else counts
    deviation = (centred.square().sum(-1, keepdim=True) / divisor.clamp_min(1)).sqrt()
    return _where(spread, centred / deviation)


def dr_grpo(rewards: Tensor, graded: Tensor) -> Advantages:
    """reward - mean of the group. Arguments as ``grpo``. Source: Dr.GRPO, arXiv:2503.20783, section 3."""
    centred, spread = _centred(rewards, graded)
    return _where(spread, centred)


def batch_std(rewards: Tensor, graded: Tensor) -> Advantages:
    """(reward - mean of the group) / sample deviation of all graded rewards of the batch. Arguments as ``grpo``.

    Source: "Part I: Tricks or Traps?", arXiv:2508.08221, section 4.1.
    """
    centred, spread = _centred(rewards, graded)
    if not bool(spread.any()):
        return _where(spread, centred)
    return _where(spread, centred / rewards[graded].double().std(unbiased=True))


def rloo(rewards: Tensor, graded: Tensor) -> Advantages:
    """reward - mean of the other graded completions of the group. Arguments as ``grpo``.

    Source: RLOO, arXiv:2402.14740.
    """
    centred, spread = _centred(rewards, graded)
    counts = graded.sum(-1, keepdim=True).double()
    return _where(spread, centred * counts / (counts - 1).clamp_min(1))  # n / (n - 1) * (r - mean) is the same number


def bnpo(rewards: Tensor, graded: Tensor) -> Advantages:
    """(reward - mean p of the group) / density of Beta(1 + a/3, 1 + b/3) at p, with Beta(a, b) fitted to the p of all
    groups by their mean and sample variance. Arguments as ``grpo``; rewards in [0, 1].

    Groups with signal have 0 < p < 1 if rewards are 0 or 1. If the p of the batch do not vary, or vary more than those
    of any Beta, a = b = 0 gives a density of 1: the centred reward. Densities are at least ``MIN_DENSITY``, so that a
    group far from the others does not outweigh the whole batch.

    Source: BNPO, arXiv:2506.02864; the sample variance and the bound are from its authors' code.
    """
    centred, spread = _centred(rewards, graded)
    means = _mean(rewards, graded)
    p = means[graded.any(-1), 0]
    total = centred.new_zeros(())
    if p.numel() > 1 and bool(p.max() - p.min() > MIN_SPREAD):
        total = (p.mean() * (1 - p.mean()) / p.var(unbiased=True) - 1).clamp_min(0)
    a, b = (p.mean() * total, (1 - p.mean()) * total) if p.numel() else (total, total)
    x, alpha, beta = means.clamp(MIN_SPREAD, 1 - MIN_SPREAD), 1 + a / 3, 1 + b / 3
    scale = torch.lgamma(alpha + beta) - torch.lgamma(alpha) - torch.lgamma(beta)
    density = (scale + (alpha - 1) * x.log() + (beta - 1) * (-x).log1p()).exp()  # of Beta(alpha, beta) at x
    return _where(spread, centred / density.clamp_min(MIN_DENSITY))


def pass_at_k(rewards: Tensor, graded: Tensor, *, k: int) -> Advantages:
    """What a completion adds to the best of k, over all subsets of k graded completions of the group:
    (E[best of k | it is one of them] - E[best of k]) / deviation of the best of k.

    Exact for any rewards; for rewards 0 and 1 these are the paper's closed forms. A group has no signal with k graded
    completions or fewer (one subset only), or if every subset has the same best. Arguments as ``grpo``.

    Source: Pass@k training, arXiv:2508.10751, "Analytical Derivation".
    """
    values = torch.zeros(rewards.shape, dtype=torch.float64)
    for row, (group, counted) in enumerate(zip(rewards.double(), graded, strict=True)):
        of_group = _pass_at_k_of_group(group[counted], k)
        if of_group is not None:
            values[row, counted] = of_group
    return Advantages(values)


def _pass_at_k_of_group(rewards: Tensor, k: int) -> Tensor | None:
    """[n], or None if every subset of k has the same best."""
    n = len(rewards)
    if n <= k:
        return None
    ranked, order = rewards.sort()
    # in ascending order, ranked[j] is the best of comb(j, k - 1) subsets of k
    share = torch.tensor([comb(j, k - 1) / comb(n, k) for j in range(n)], dtype=torch.float64)
    mean = (share * ranked).sum()
    deviation = (share * (ranked - mean).square()).sum().sqrt()
    if not bool(deviation > MIN_SPREAD):
        return None
    # completion i is in comb(n - 1, k - 1) subsets: it is the best of comb(i, k - 1), and j > i of comb(j - 1, k - 2)
    with_i = comb(n - 1, k - 1)
    above = torch.tensor([comb(j - 1, k - 2) / with_i if j and k > 1 else 0.0 for j in range(n)], dtype=torch.float64)
    own = torch.tensor([comb(j, k - 1) / with_i for j in range(n)], dtype=torch.float64)
    tail = (above * ranked).flip(0).cumsum(0).flip(0) - above * ranked
    best_with = own * ranked + tail
    values = torch.empty(n, dtype=torch.float64)
    values[order] = (best_with - mean) / deviation
    return values


def remax(rewards: Tensor, graded: Tensor, baselines: Tensor, baseline_graded: Tensor) -> Advantages:
    """reward - reward of the greedy completion of the same problem.

    Args:
        rewards, graded: as ``grpo``.
        baselines: [B] float, rewards of the greedy completions.
        baseline_graded: [B] bool. A group without a graded baseline gets 0.

    Source: ReMax, arXiv:2310.10505.
    """
    values = torch.where(graded & baseline_graded[:, None], rewards.double() - baselines.double()[:, None], 0.0)
    return Advantages(torch.where(values.abs() > MIN_SPREAD, values, 0.0))


def reinforce_plus_plus(returns: Tensor, tokens: Tensor, graded: Tensor) -> Advantages:
    """(return - mean) / deviation, both over all trained tokens of the batch.

    Args:
        returns: [B, G, C] float, reward to go: the score minus the KL penalties from this token on.
        tokens: [B, G, C] bool, True on trained tokens.
        graded: [B, G] bool.

    Source: REINFORCE++, arXiv:2501.03262v9, eq. 4 and 5 (discount 1).
    """
    returns = returns.double()
    counted = tokens & graded[..., None]
    trained = returns[counted]
    if trained.numel() < 2 or not bool(trained.max() - trained.min() > MIN_SPREAD):
        return Advantages(torch.zeros_like(returns))
    return Advantages(torch.where(counted, (returns - trained.mean()) / trained.std(unbiased=False), 0.0))


def reinforce_plus_plus_baseline(rewards: Tensor, graded: Tensor, lengths: Tensor) -> Advantages:
    """reward - mean of the group, then normalised as ``reinforce_plus_plus``.

    Groups without spread keep exactly 0. The batch's mean would shift them only because completions differ in length.

    Args:
        rewards, graded: as ``grpo``.
        lengths: [B, G] int, trained tokens of each completion: its weight in the mean and the deviation.

    Source: REINFORCE++ with baseline, arXiv:2501.03262v9, eq. 6 and 7.
    """
    centred, spread = _centred(rewards, graded)
    weights = torch.where(graded, lengths, 0).double()
    total = weights.sum()
    if not bool(spread.any()) or not bool(total > 0):
        return Advantages(torch.zeros_like(centred))
    mean = (weights * centred).sum() / total
    deviation = ((weights * (centred - mean).square()).sum() / total).sqrt()
    if not bool(deviation > MIN_SPREAD):
        return Advantages(torch.zeros_like(centred))
    return _where(spread, torch.where(graded, (centred - mean) / deviation, 0.0))


def _mean(rewards: Tensor, graded: Tensor) -> Tensor:
    """[B, 1] mean over graded completions; 0 if there are none."""
    counts = graded.sum(-1, keepdim=True).clamp_min(1)
    return torch.where(graded, rewards.double(), 0.0).sum(-1, keepdim=True) / counts


def _centred(rewards: Tensor, graded: Tensor) -> tuple[Tensor, Tensor]:
    """[B, G] reward - mean of the group, 0 if ungraded; and [B] whether the rewards of the group differ."""
    rewards = rewards.double()
    highest = torch.where(graded, rewards, -torch.inf).amax(-1)
    lowest = torch.where(graded, rewards, torch.inf).amin(-1)
    spread = (graded.sum(-1) >= 2) & (highest - lowest > MIN_SPREAD)
    return torch.where(graded, rewards - _mean(rewards, graded), 0.0), spread


def _where(spread: Tensor, values: Tensor) -> Advantages:
    return Advantages(torch.where(spread[:, None], values, 0.0))


def group_outcome(accuracy: Sequence[float], graded: Sequence[bool]) -> GroupOutcome:
    """Whether the graded completions of a group are all right (accuracy 1), all wrong (0) or mixed.

    A group with fewer than two graded completions is ``ungraded``.

    Args:
        accuracy: [G], the accuracy part of each score. Values of ungraded completions are ignored.
        graded: [G].
    """
    counted = [value for value, ok in zip(accuracy, graded, strict=True) if ok]
    if len(counted) < 2:
        return "ungraded"
    if all(value >= 1 for value in counted):
        return "all_right"
    return "all_wrong" if all(value <= 0 for value in counted) else "mixed"
