"""How much better a completion is than could be expected: rewards in, advantages out, in float64.

B problems of a rollout batch, G completions of each, C the most tokens of any completion. Ungraded completions (no
verdict in time) take part in no mean and no deviation and get exactly 0. Rewards that lie within ``MIN_SPREAD`` of
each other are equal: what is left is rounding, and dividing by it would amplify it. So nothing is ever divided by a
deviation plus epsilon.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    """What each completion of a batch is worth."""

    values: Tensor  # [B, G] float64, or [B, G, C] where it differs from token to token

    @property
    def signal(self) -> Tensor:
        """[B] bool: whether any value of the group is not 0. Without signal a group adds exactly nothing to the loss.
        This is the only definition of signal; every other place asks this one."""
        return self.values.ne(0).flatten(1).any(-1)


def grpo(rewards: Tensor, graded: Tensor, *, std: Literal["sample", "population"]) -> Advantages:
    """(reward - mean) / deviation over the graded completions of the group.

    Args:
        rewards: [B, G] float. Entries of ungraded completions may hold anything.
        graded: [B, G] bool.
        std: divisor G - 1 (as EasyR1, verl and TRL) or G under the root.

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

    Groups with signal have 0 < p < 1 where rewards are 0 or 1. Where the p of the batch do not vary, or vary more than
    any Beta does, there is nothing to fit and a = b = 0 leaves a density of 1: the plain centred reward. A density
    below ``MIN_DENSITY`` counts as that: a group far off the others must not outweigh the whole batch.

    Source: BNPO, arXiv:2506.02864; the sample variance and the bound are its authors' code's.
    """
    centred, spread = _centred(rewards, graded)
    means = _mean(rewards, graded)
    p = means[graded.any(-1), 0]
    total = centred.new_zeros(())
    if p.numel() > 1 and bool(p.max() - p.min() > MIN_SPREAD):
        total = (p.mean() * (1 - p.mean()) / p.var(unbiased=True) - 1).clamp_min(0)
    a, b = (p.mean() * total, (1 - p.mean()) * total) if p.numel() else (total, total)
    density = _beta_density(means.clamp(MIN_SPREAD, 1 - MIN_SPREAD), 1 + a / 3, 1 + b / 3)
    return _where(spread, centred / density.clamp_min(MIN_DENSITY))


def _beta_density(x: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    scale = torch.lgamma(alpha + beta) - torch.lgamma(alpha) - torch.lgamma(beta)
    return (scale + (alpha - 1) * x.log() + (beta - 1) * (-x).log1p()).exp()


def pass_at_k(rewards: Tensor, graded: Tensor, *, k: int) -> Advantages:
    """What a completion adds to the best of k: (E[best of k | it is among them] - E[best of k]) / deviation of the
    best of k, over all subsets of k graded completions of the group.

    With rewards 0 and 1 these are the paper's closed forms; this holds for any rewards. A group with k graded
    completions or fewer has no two subsets to compare and no signal; nor has one where every subset has the same best.
    Arguments as ``grpo``.

    Source: Pass@k training, arXiv:2508.10751, "Analytical Derivation".
    """
    values = torch.zeros(rewards.shape, dtype=torch.float64)
    for row, (group, counted) in enumerate(zip(rewards.double(), graded, strict=True)):
        found = _pass_at_k_of_group(group[counted], k)
        if found is not None:
            values[row, counted] = found
    return Advantages(values)


def _pass_at_k_of_group(rewards: Tensor, k: int) -> Tensor | None:
    """[n], or None where every subset of k has the same best."""
    n = len(rewards)
    if n <= k:
        return None
    ranked, order = rewards.sort()
    # in rank order, ranked[j] is the best of comb(j, k - 1) subsets of k, ...
    share = torch.tensor([comb(j, k - 1) / comb(n, k) for j in range(n)], dtype=torch.float64)
    mean = (share * ranked).sum()
    deviation = (share * (ranked - mean).square()).sum().sqrt()
    if not bool(deviation > MIN_SPREAD):
        return None
    # ... and, of the comb(n - 1, k - 1) that i is in, of comb(j - 1, k - 2) if j is above i; i of comb(i, k - 1)
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
        baselines: [B] float, and baseline_graded [B] bool: without a graded baseline a group is all 0.

    Source: ReMax, arXiv:2310.10505.
    """
    values = torch.where(graded & baseline_graded[:, None], rewards.double() - baselines.double()[:, None], 0.0)
    return Advantages(torch.where(values.abs() > MIN_SPREAD, values, 0.0))


def reinforce_plus_plus(returns: Tensor, tokens: Tensor, graded: Tensor) -> Advantages:
    """(return - mean) / deviation, both over all trained tokens of the batch.

    Args:
        returns: [B, G, C] float, reward to go: the score less the KL penalties from the token on.
        tokens: [B, G, C] bool, True on trained tokens.
        graded: [B, G] bool.

    Source: REINFORCE++, arXiv:2501.03262v9, eq. 4 and 5 (discount 1).
    """
    returns = returns.double()
    counted = tokens & graded[..., None]
    found = returns[counted]
    if found.numel() < 2 or not bool(found.max() - found.min() > MIN_SPREAD):
        return Advantages(torch.zeros_like(returns))
    return Advantages(torch.where(counted, (returns - found.mean()) / found.std(unbiased=False), 0.0))


def reinforce_plus_plus_baseline(rewards: Tensor, graded: Tensor, lengths: Tensor) -> Advantages:
    """reward - mean of the group, then normalised as ``reinforce_plus_plus``.

    Groups without spread keep exactly 0: the mean that would shift them is 0 up to the lengths of completions.

    Args:
        rewards, graded: as ``grpo``.
        lengths: [B, G] int, trained tokens of each completion; what it counts in mean and deviation.

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
    """[B, 1], over graded completions; 0 where there is none."""
    counts = graded.sum(-1, keepdim=True).clamp_min(1)
    return torch.where(graded, rewards.double(), 0.0).sum(-1, keepdim=True) / counts


def _centred(rewards: Tensor, graded: Tensor) -> tuple[Tensor, Tensor]:
    """[B, G] rewards less the group's mean, 0 where ungraded, and [B] whether the group has spread."""
    rewards = rewards.double()
    highest = torch.where(graded, rewards, -torch.inf).amax(-1)
    lowest = torch.where(graded, rewards, torch.inf).amin(-1)
    spread = (graded.sum(-1) >= 2) & (highest - lowest > MIN_SPREAD)
    return torch.where(graded, rewards - _mean(rewards, graded), 0.0), spread


def _where(spread: Tensor, values: Tensor) -> Advantages:
    return Advantages(torch.where(spread[:, None], values, 0.0))


# --- what the groups of a batch are worth, counted for the metrics ---


def group_outcome(accuracy: Sequence[float], graded: Sequence[bool]) -> GroupOutcome:
    """Say whether the graded members of a group are all right (accuracy 1), all wrong (0) or mixed.

    Fewer than two graded members are ``ungraded``: no comparison was possible.

    Args:
        accuracy: [G], the accuracy part of each score. Entries of ungraded members may hold anything.
        graded: [G].
    """
    counted = [value for value, ok in zip(accuracy, graded, strict=True) if ok]
    if len(counted) < 2:
        return "ungraded"
    if all(value >= 1 for value in counted):
        return "all_right"
    return "all_wrong" if all(value <= 0 for value in counted) else "mixed"


@dataclass(frozen=True, slots=True)
class OutcomeCounts:
    """Groups of a step by outcome."""

    groups: int
    all_right: int
    all_wrong: int
    ungraded: int
    zero_signal: int  # groups that contribute nothing; an all-wrong group can still have signal from its format


def count_outcomes(groups: Iterable[tuple[GroupOutcome, bool]]) -> OutcomeCounts:
    """Count (outcome, signal) pairs, one per group."""
    pairs = list(groups)
    outcomes = [outcome for outcome, _ in pairs]
    return OutcomeCounts(
        groups=len(pairs),
        all_right=outcomes.count("all_right"),
        all_wrong=outcomes.count("all_wrong"),
        ungraded=outcomes.count("ungraded"),
        zero_signal=sum(not signal for _, signal in pairs),
    )
