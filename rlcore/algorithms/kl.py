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
