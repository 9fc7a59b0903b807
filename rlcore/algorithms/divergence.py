"""How two policies differ on the same tokens: estimates of the KL divergence, and importance weights.

KL estimates are per token, in nats, from tokens that the policy sampled (Schulman, "Approximating KL divergence", 2020,
http://joschu.net/blog/kl-approx.html). Importance weights compare the trainer with the sampler, over N tokens that the
sampler generated and the trainer scored again. The sampler's log-probs are of the distribution that it sampled from:
under top-p or top-k, the policy restricted to the remaining tokens and renormalised. Add
``logprobs.truncation_logprobs`` to bring them to the whole distribution first. Otherwise the truncation itself looks
like a mismatch.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp() of an unbounded log-ratio overflows, and 0 * inf in backward is NaN


def clamped_log_ratio(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """[N] log(p / q), clamped to +-``MAX_LOG_RATIO``. A clamped value has no gradient."""
    return (logprobs - other_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """[N] log p - log q: unbiased, can be negative. Its gradient has mean 0, so it is never a loss."""
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """[N] (log p - log q)^2 / 2: biased, but its on-policy gradient is that of the KL."""
    return 0.5 * (logprobs - ref_logprobs).square()


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """[N] q/p - 1 - log(q/p): unbiased and never negative; the KL term of GRPO, arXiv:2402.03300, eq. 4.

    Value and gradient are exactly 0 if both policies agree. The log-ratio is clamped: a token on which they differ by
    more than ``MAX_LOG_RATIO`` nats has a finite value and no gradient.
    """
    log_ratio = clamped_log_ratio(ref_logprobs, logprobs)
    # expm1 is exact near 0, where exp(x) - 1 is not; rounding can still give a value slightly below 0
    return (torch.expm1(log_ratio) - log_ratio).clamp_min(0.0)


def straight_through(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """[N] the value of k3 with the gradient of k2, whose on-policy mean is the gradient of the KL.

    Source: "Rethinking KL regularization in RLHF", arXiv:2510.01555.
    """
    value, path = k3(logprobs, ref_logprobs), k2(logprobs, ref_logprobs)
    return path + (value - path).detach()


def k3_weighted(logprobs: Tensor, ref_logprobs: Tensor, ratios: Tensor) -> Tensor:
    """[N] ratio * k3: the mean over tokens of another policy is the KL, and its gradient that of the KL.

    On policy it has the value of k3 and the gradient of k2.

    Args:
        ratios: [N] p / (probability under the policy that sampled the token). p is the policy of ``logprobs``, and the
            gradient goes through it.

    Source: the unbiased KL estimate of arXiv:2512.02556, eq. 7.
    """
    return ratios * k3(logprobs, ref_logprobs)


def teacher_signal(logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """[N] log p_teacher - log p of tokens sampled from p: the estimate of -KL(p || teacher) from one sample, clamped to
    +-``MAX_LOG_RATIO``. As an advantage without a gradient of its own, its mean policy gradient is the gradient of
    -KL(p || teacher) at each token.

    Args:
        teacher_logprobs: [N], -inf for a token that the teacher lacks.

    Source: Thinking Machines, "On-Policy Distillation", 2025, https://thinkingmachines.ai/blog/on-policy-distillation/;
    the reverse KL by policy gradient, without the terms of later tokens: MiniLLM, arXiv:2306.08543, section 2.2.
    """
    return clamped_log_ratio(teacher_logprobs, logprobs).detach()


def next_coefficient(coefficient: float, kl: float, *, target: float, horizon: int, completions: int) -> float:
    """The adaptive KL coefficient after a step. It changes in proportion to kl / target - 1, clamped to +-20%.

    Args:
        kl: nats, mean per token of the step.
        completions: number trained in the step. ``horizon`` has the same unit, and must exceed a fifth of it: else the
            factor is not positive.

    Source: Ziegler et al., arXiv:1909.08593, section 2.2.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coefficient * (1 + error * completions / horizon)


Dtype = Literal["float32", "float16", "bfloat16"]
QUANTISED_LIMIT = 0.5
"""``normal_limit`` of a sampler with linear layers in 8-bit floats. Measured: 0.19, text of 1.5 B, random weights."""


def normal_limit(device: str, trainer: Dtype, sampler: Dtype) -> float:
    """The largest mean |log p_trainer - log p_sampler|, in nats per token, that rounding explains.

    The coarser of the two dtypes decides. Measured means, and the limits:

    - bfloat16 (8 bits of precision): 0.0124 to 0.0251 on an H200, for text and vision models of 1.5 to 3.75 B
      parameters; TRL's are the same. Limit 0.05, twice the largest.
    - float16 (11 bits) is eight times finer, so rounding explains up to 0.003. Limit 0.01, also for float32 on a GPU,
      because its matrix products may run in TF32, which has 11 bits too. Not measured.
    - float32 (24 bits) on a CPU: about 0.00001, below 0.0001 in every test. Limit 0.001.

    Different weights, templates or attention give 0.1 and more.
    """
    dtypes = {trainer, sampler}
    if "bfloat16" in dtypes:
        return 0.05
    return 0.001 if dtypes == {"float32"} and device == "cpu" else 0.01


def effective_sample_size(weight: Tensor, weight_squared: Tensor) -> Tensor:
    """(sum w)^2 / sum w^2 of importance weights w: the number of tokens if sampler and trainer agree, less if not, 0
    over no tokens.

    Args:
        weight, weight_squared: [] sums over the whole step.

    Source: Kong 1992; Owen, "Monte Carlo theory, methods and examples", eq. 9.13.
    """
    return weight.square() / weight_squared.clamp_min(torch.finfo(weight.dtype).tiny)


def truncated_importance(
    logprobs: Tensor, sampler_logprobs: Tensor, sequence_index: Tensor | None, *, max_weight: float
) -> Tensor:
    """[N] min(p_trainer / p_sampler, max_weight), detached. TIS.

    Args:
        sequence_index: [N] int64: the ratio is that of the whole sequence, the product over its tokens. None: that of
            each token.

    Source: "Your efficient RL framework secretly brings you off-policy RL training" (Yao et al. 2025); the truncation:
    Ionides, "Truncated importance sampling" (2008).
    """
    return importance_ratios(logprobs, sampler_logprobs, sequence_index).clamp_max(max_weight)


def masked_importance(
    logprobs: Tensor, sampler_logprobs: Tensor, sequence_index: Tensor | None, *, min_weight: float, max_weight: float
) -> Tensor:
    """[N] p_trainer / p_sampler if it is within [min_weight, max_weight], else 0; detached. MIS.

    Arguments as ``truncated_importance``. Source: "When speed kills stability" (Liu et al. 2025); IcePop,
    arXiv:2510.18855.
    """
    weights = importance_ratios(logprobs, sampler_logprobs, sequence_index)
    return torch.where((weights >= min_weight) & (weights <= max_weight), weights, 0.0)


def sequence_log_weights(
    weights: Tensor, sequence_index: Tensor, lengths: Tensor, *, level: Literal["token", "sequence"]
) -> Tensor:
    """[B] log of the importance weight of each whole sequence, at least -20, so also for a weight of 0.

    Args:
        weights: [N] of ``truncated_importance`` or ``masked_importance``.
        sequence_index: [N] int64 in 0..B-1; lengths [B] int64, trained tokens of each sequence.
        level: that of ``weights``. token: the sequence's weight is the product of its tokens' weights. sequence: each
            token has the sequence's weight.
    """
    sums = weights.new_zeros(len(lengths)).index_add(0, sequence_index, weights.log().clamp_min(-MAX_LOG_RATIO))
    log_weights = sums if level == "token" else sums / lengths.clamp_min(1)
    return log_weights.clamp_min(-MAX_LOG_RATIO)


def importance_ratios(logprobs: Tensor, sampler_logprobs: Tensor, sequence_index: Tensor | None = None) -> Tensor:
    """[N] p_trainer / p_sampler, detached, the log clamped to +-20. Arguments as ``truncated_importance``."""
    log_ratios = (logprobs - sampler_logprobs).detach()
    if sequence_index is not None and len(log_ratios):
        count = int(sequence_index.max()) + 1
        log_ratios = log_ratios.new_zeros(count).index_add(0, sequence_index, log_ratios)[sequence_index]
    return log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
