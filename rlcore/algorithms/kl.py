"""Per-token estimates of KL(policy || reference) from tokens that the policy sampled, in nats.

Source: Schulman, "Approximating KL divergence" (2020), http://joschu.net/blog/kl-approx.html
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp() of an unbounded log-ratio overflows, and 0 * inf in backward is NaN


def clamped_log_ratio(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """[N] log of p / q, within +-``MAX_LOG_RATIO``; beyond it the gradient is 0."""
    return (logprobs - other_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """[N] log p - log q: unbiased, can be negative. Its own gradient has mean 0, so never a loss."""
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """[N] (log p - log q)^2 / 2: biased as a value, but its on-policy gradient is that of the KL."""
    return 0.5 * (logprobs - ref_logprobs).square()


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """[N] q/p - 1 - log(q/p): unbiased and never negative; the KL term of GRPO, arXiv:2402.03300, eq. 4.

    Value and gradient are exactly 0 where the two agree. The log-ratio is clamped, so a token on which policy
    and reference are more than ``MAX_LOG_RATIO`` nats apart gives a finite value and no gradient.
    """
    log_ratio = clamped_log_ratio(ref_logprobs, logprobs)
    # expm1 keeps the digits that exp(x) - 1 loses near 0; rounding may still leave a last bit below 0
    return (torch.expm1(log_ratio) - log_ratio).clamp_min(0.0)


def straight_through(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """[N] the value of k3 with the gradient of k2, whose mean on policy is the gradient of the KL.

    Source: "Rethinking KL regularization in RLHF", arXiv:2510.01555.
    """
    value, path = k3(logprobs, ref_logprobs), k2(logprobs, ref_logprobs)
    return path + (value - path).detach()


def next_coefficient(coefficient: float, kl: float, *, target: float, horizon: int, completions: int) -> float:
    """The adaptive coefficient after a step: moved in proportion to how far ``kl`` is off ``target``, by an error of
    20% at most.

    Args:
        kl: nats, mean per token of the step.
        completions: trained in the step; ``horizon`` counts in the same unit. At 5 horizons or more the factor would
            no longer be positive.

    Source: Ziegler et al., arXiv:1909.08593, section 2.2.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coefficient * (1 + error * completions / horizon)
