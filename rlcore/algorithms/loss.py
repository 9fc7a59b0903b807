"""The policy loss over N trained tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlcore.algorithms.kl import clamped_log_ratio, k1, k3


@dataclass(frozen=True, slots=True, eq=False)
class LossSums:
    """What the loss saw: [] tensors, detached, summed over trained tokens.

    Divide by the step's trained tokens after merging all microbatches and ranks.
    """

    clipped_low: Tensor  # tokens with advantage < 0 and ratio < 1 - clip_low: clipped away, no gradient
    clipped_high: Tensor  # tokens with advantage > 0 and ratio > 1 + clip_high: clipped away, no gradient
    ratio: Tensor  # new / old
    ratio_max: Tensor  # a maximum, not a sum; 0 over no tokens
    kl_k1: Tensor  # of KL(old || new), nats
    kl_k3: Tensor  # of KL(old || new), nats

    def merge(self, other: LossSums) -> LossSums:
        """The sums of both parts together."""
        return LossSums(
            clipped_low=self.clipped_low + other.clipped_low,
            clipped_high=self.clipped_high + other.clipped_high,
            ratio=self.ratio + other.ratio,
            ratio_max=torch.maximum(self.ratio_max, other.ratio_max),
            kl_k1=self.kl_k1 + other.kl_k1,
            kl_k3=self.kl_k3 + other.kl_k3,
        )


@dataclass(frozen=True, slots=True, eq=False)
class LossOutput:
    loss: Tensor  # [] differentiable; the losses of a step's microbatches add up to the step's
    sums: LossSums


def clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> LossOutput:
    """PPO's clipped surrogate: minus the weighted sum of min(ratio * A, clip(ratio) * A).

    Clipping is active, and counted, only where it stops a move that would pay: a ratio above the band with
    A > 0, or below it with A < 0. The log-ratio is clamped to +-20 before exp; a token beyond that has no
    gradient.

    Args:
        logprobs: [N] float, nats, under the policy being trained; the only input with a gradient.
        old_logprobs: [N] float, nats, under the policy that the ratio is taken against. Where that is the
            policy being trained, pass ``logprobs.detach()``: the ratio is then exactly 1.
        advantages: [N] float, of each token's sequence.
        weights: [N] float, from ``token_weights``.
        clip_low, clip_high: the ratio counts only within [1 - clip_low, 1 + clip_high].

    Source: PPO, arXiv:1707.06347, eq. 7; separate bounds: DAPO, arXiv:2503.14476, section 3.1.
    """
    old_logprobs = old_logprobs.detach()
    advantages, weights = advantages.to(logprobs.dtype), weights.to(logprobs.dtype)
    ratio = clamped_log_ratio(logprobs, old_logprobs).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    loss = -(weights * surrogate).sum()
    with torch.no_grad():
        sums = LossSums(
            clipped_low=((ratio < 1 - clip_low) & (advantages < 0)).sum(dtype=ratio.dtype),
            clipped_high=((ratio > 1 + clip_high) & (advantages > 0)).sum(dtype=ratio.dtype),
            ratio=ratio.sum(),
            ratio_max=torch.cat([ratio, ratio.new_zeros(1)]).max(),
            kl_k1=k1(old_logprobs, logprobs).sum(),
            kl_k3=k3(old_logprobs, logprobs).sum(),
        )
    return LossOutput(loss, sums)
