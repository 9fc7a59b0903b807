"""Do sampler and trainer agree? Over N tokens that the sampler drew and the trainer scored again.

The sampler's log-probs are of the distribution that it drew from. Under top-p or top-k that is the policy cut to the
tokens that were kept and scaled up; add ``log_kept`` (``logprobs.log_kept``) to bring them to the whole
distribution first, or the cut itself would look like a mismatch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rlcore.algorithms.kl import MAX_LOG_RATIO, clamped_log_ratio, k3

Dtype = Literal["float32", "float16", "bfloat16"]


def normal_limit(device: str, trainer: Dtype, sampler: Dtype) -> float:
    """Mean |log p_trainer - log p_sampler|, nats per token, beyond which rounding is no explanation.

    The coarser of the two dtypes decides. Measured means, and the limits above them:

    - bfloat16 (8 bits of precision): 0.0124 to 0.0251 on an H200, for text and vision models of 1.5 to 3.75 B
      parameters; TRL's are the same. Limit 0.05, twice the largest.
    - float16 (11 bits) is eight times finer, so rounding explains up to 0.003. Limit 0.01. The same for float32 on a
      GPU, because its matrix products may run in TF32, which has 11 bits as well; not measured.
    - float32 (24 bits) on a CPU: about 0.00001, below 0.0001 in every test. Limit 0.001.

    A sampler with other weights, another template or another attention is at 0.1 and above.
    """
    dtypes = {trainer, sampler}
    if "bfloat16" in dtypes:
        return 0.05
    return 0.001 if dtypes == {"float32"} and device == "cpu" else 0.01


@dataclass(frozen=True, slots=True, eq=False)
class MismatchSums:
    """[] tensors, detached, summed over the counted tokens. Merge all microbatches and ranks before dividing."""

    abs_delta: Tensor  # |log p_trainer - log p_sampler|, nats
    abs_delta_max: Tensor  # a maximum, not a sum; 0 over no tokens
    weight: Tensor  # w = p_trainer / p_sampler of each token alone
    weight_squared: Tensor
    k3: Tensor  # of KL(sampler || trainer), nats

    def merge(self, other: MismatchSums) -> MismatchSums:
        """The sums of both parts together."""
        return MismatchSums(
            abs_delta=self.abs_delta + other.abs_delta,
            abs_delta_max=torch.maximum(self.abs_delta_max, other.abs_delta_max),
            weight=self.weight + other.weight,
            weight_squared=self.weight_squared + other.weight_squared,
            k3=self.k3 + other.k3,
        )

    def effective_sample_size(self) -> Tensor:
        """(sum w)^2 / sum w^2: as many tokens' worth as these are; N where both agree, 0 over no tokens.

        Source: Kong 1992; Owen, "Monte Carlo theory, methods and examples", eq. 9.13.
        """
        return self.weight.square() / self.weight_squared.clamp_min(torch.finfo(self.weight.dtype).tiny)


def mismatch(logprobs: Tensor, sampler_logprobs: Tensor, counted: Tensor | None = None) -> MismatchSums:
    """Compare the trainer's log-probs with the sampler's at the same weights.

    Importance weights are per token, their log clamped to +-20 (not per sequence: the product over a long
    completion says little about where the two differ). ``abs_delta`` is not clamped.

    Args:
        logprobs: [N] float, nats, the trainer's, before any update.
        sampler_logprobs: [N] float, nats.
        counted: [N] bool, the tokens to sum over. None: all.
    """
    logprobs, sampler_logprobs = logprobs.detach(), sampler_logprobs.detach()
    counted = torch.ones_like(logprobs, dtype=torch.bool) if counted is None else counted
    delta = torch.where(counted, (logprobs - sampler_logprobs).abs(), 0)
    weights = torch.where(counted, clamped_log_ratio(logprobs, sampler_logprobs).exp(), 0)
    return MismatchSums(
        abs_delta=delta.sum(),
        abs_delta_max=torch.cat([delta, delta.new_zeros(1)]).max(),
        weight=weights.sum(),
        weight_squared=weights.square().sum(),
        k3=torch.where(counted, k3(sampler_logprobs, logprobs), 0).sum(),
    )


def truncated_importance(
    logprobs: Tensor, sampler_logprobs: Tensor, sequence_index: Tensor | None, *, max_weight: float
) -> Tensor:
    """[N] min(p_trainer / p_sampler, max_weight), detached. TIS.

    Args:
        sequence_index: [N] int64; the ratio is then of the whole sequence (the product over its tokens). None: of the
            token alone.

    Source: "Your efficient RL framework secretly brings you off-policy RL training" (Yao et al. 2025); the cut:
    Ionides, "Truncated importance sampling" (2008).
    """
    return _importance(logprobs, sampler_logprobs, sequence_index).clamp_max(max_weight)


def masked_importance(
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    sequence_index: Tensor | None,
    *,
    min_weight: float,
    max_weight: float,
) -> Tensor:
    """[N] p_trainer / p_sampler where that is within [min_weight, max_weight], else 0; detached. MIS.

    Arguments as ``truncated_importance``. Source: "When speed kills stability" (Liu et al. 2025); IcePop,
    arXiv:2510.18855.
    """
    weights = _importance(logprobs, sampler_logprobs, sequence_index)
    return torch.where((weights >= min_weight) & (weights <= max_weight), weights, 0.0)


def _importance(logprobs: Tensor, sampler_logprobs: Tensor, sequence_index: Tensor | None) -> Tensor:
    log_ratios = (logprobs - sampler_logprobs).detach()
    if sequence_index is not None and len(log_ratios):
        count = int(sequence_index.max()) + 1
        log_ratios = log_ratios.new_zeros(count).index_add(0, sequence_index, log_ratios)[sequence_index]
    return log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
