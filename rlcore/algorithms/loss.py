"""Policy losses over N trained tokens: log-probs in, a loss per token out. The step's loss is their weighted sum.

Common arguments, all [N]: ``logprobs`` in nats of the policy being trained, the only input with a gradient;
``old_logprobs`` of the policy in the ratio's denominator (if it is the policy being trained, pass
``logprobs.detach()``, and the ratio is exactly 1); ``advantages``. Log-ratios are clamped to +-20 before exp: a token
beyond that has no gradient.

The step's loss is sum over tokens of weight * token loss (``token_weights``). The weights contain the denominators of
the whole optimizer step, over all microbatches and ranks. So the losses of any split of the step add up to the loss of
the undivided batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, assert_never

import torch
from torch import Tensor

from rlcore.algorithms.divergence import MAX_LOG_RATIO, clamped_log_ratio
from rlcore.config.algorithm import CispoLoss, GspoLoss, GspoTokenLoss, PolicyLoss, PpoClipLoss, SapoLoss, VespoLoss

Aggregation = Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"]
Level = Literal["token", "sequence"]


@dataclass(frozen=True, slots=True, eq=False)
class TokenLosses:
    """The loss of each token, and how it was clipped. All but ``values`` are detached."""

    values: Tensor  # [N] differentiable
    ratios: Tensor  # [N] new / old as the loss uses it: of the token, or of its sequence
    clipped_low: Tensor  # [N] bool: the ratio was so low that the loss cut or changed the gradient
    clipped_high: Tensor  # [N] bool: the ratio was so high that the loss cut or changed the gradient


def policy_loss(
    loss: PolicyLoss,
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    sequence_index: Tensor,
    lengths: Tensor,
    *,
    log_weights: Tensor | None = None,
) -> TokenLosses:
    """The configured loss. Arguments: see the module's docstring, ``gspo`` and ``vespo``."""
    match loss:
        case PpoClipLoss():
            return ppo_clip(
                logprobs, old, advantages, clip_low=loss.clip_low, clip_high=loss.clip_high, dual_clip=loss.dual_clip
            )
        case GspoLoss() | GspoTokenLoss():
            of_sequence = gspo if isinstance(loss, GspoLoss) else gspo_token
            return of_sequence(
                logprobs, old, advantages, sequence_index, lengths, clip_low=loss.clip_low, clip_high=loss.clip_high
            )
        case CispoLoss():
            return cispo(logprobs, old, advantages, sequence_index, lengths, level=loss.level, max_ratio=loss.max_ratio)
        case SapoLoss():
            return sapo(
                *(logprobs, old, advantages, sequence_index, lengths),
                level=loss.level,
                tau_positive=loss.tau_positive,
                tau_negative=loss.tau_negative,
            )
        case VespoLoss():
            return vespo(
                *(logprobs, old, advantages, sequence_index, lengths),
                log_weights=log_weights,
                k_positive=loss.k_positive,
                lambda_positive=loss.lambda_positive,
                k_negative=loss.k_negative,
                lambda_negative=loss.lambda_negative,
            )
    assert_never(loss)


def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> TokenLosses:
    """-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A); with ``dual_clip`` c, for A < 0, at most -c * A.

    Clipping is active, and counted, only if it removes the gradient: for a ratio above the band with A > 0, or below it
    with A < 0. The dual clip counts as high.

    Source: PPO, arXiv:1707.06347, eq. 7; separate bounds: DAPO, arXiv:2503.14476, section 3.1; dual clip:
    arXiv:1912.09729, eq. 5.
    """
    advantages = advantages.to(logprobs.dtype)
    ratios = clamped_log_ratio(logprobs, old_logprobs.detach()).exp()
    return _clipped(ratios, advantages, clip_low, clip_high, dual_clip)


def gspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequence_index: Tensor,
    lengths: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLosses:
    """The clipped surrogate on the ratio of the whole sequence, s = (p_new / p_old)^(1 / length).

    All tokens of a sequence have the sequence's ratio. If they have the same advantage too, the mean over them is the
    paper's loss of the sequence.

    Args:
        sequence_index: [N] int64 in 0..B-1; lengths [B] int64, trained tokens of each sequence.

    Source: GSPO, arXiv:2507.18071, eq. 5 and 7.
    """
    ratios = _sequence_ratios(logprobs, old_logprobs.detach(), sequence_index, lengths)
    return _clipped(ratios, advantages.to(logprobs.dtype), clip_low, clip_high)


def gspo_token(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequence_index: Tensor,
    lengths: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLosses:
    """GSPO with a gradient per token: the ratio is sg[s] * p / sg[p]. Arguments as ``gspo``.

    Equal to ``gspo`` in value. Equal in gradient too if advantages and token weights are constant along a sequence.

    Source: GSPO, arXiv:2507.18071, eq. 13 and 14.
    """
    sequence_ratios = _sequence_ratios(logprobs.detach(), old_logprobs.detach(), sequence_index, lengths)
    ratios = sequence_ratios * (logprobs - logprobs.detach()).exp()
    return _clipped(ratios, advantages.to(logprobs.dtype), clip_low, clip_high)


def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequence_index: Tensor,
    lengths: Tensor,
    *,
    level: Level,
    max_ratio: float,
) -> TokenLosses:
    """-sg[min(ratio, max_ratio)] * A * log p: every token keeps a gradient.

    Args:
        sequence_index, lengths: as ``gspo``.
        level: token: the ratio of each token. sequence: the ratio s of ``gspo``.

    Source: MiniMax-M1, arXiv:2506.13585, eq. 4 and 5; an upper bound only: ScaleRL, arXiv:2510.13786. The papers have
    token ratios only.
    """
    ratios = _ratios(logprobs.detach(), old_logprobs.detach(), sequence_index, lengths, level)
    values = -ratios.clamp_max(max_ratio) * advantages.to(logprobs.dtype) * logprobs
    return TokenLosses(values, ratios, clipped_low=torch.zeros_like(ratios).bool(), clipped_high=ratios > max_ratio)


def sapo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequence_index: Tensor,
    lengths: Tensor,
    *,
    level: Level,
    tau_positive: float,
    tau_negative: float,
) -> TokenLosses:
    """-(4 / tau) * sigmoid(tau * (ratio - 1)) * A, with tau by the sign of A. Nothing is clipped.

    At ratio 1 the gradient is the plain policy gradient. It fades with the distance from 1.

    Args:
        sequence_index, lengths, level: as ``cispo``.

    Source: SAPO, arXiv:2511.20347, eq. 5 and 6. The paper has token ratios only.
    """
    advantages = advantages.to(logprobs.dtype)
    ratios = _ratios(logprobs, old_logprobs.detach(), sequence_index, lengths, level)
    tau = _by_sign(advantages > 0, tau_positive, tau_negative, logprobs)
    values = -4 / tau * torch.sigmoid(tau * (ratios - 1)) * advantages
    nothing = torch.zeros_like(values).bool()
    return TokenLosses(values, ratios.detach(), clipped_low=nothing, clipped_high=nothing)


def vespo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequence_index: Tensor,
    lengths: Tensor,
    *,
    log_weights: Tensor | None = None,
    k_positive: float,
    lambda_positive: float,
    k_negative: float,
    lambda_negative: float,
) -> TokenLosses:
    """-sg[W^k * exp(lambda * (1 - W))] * A * log p, with W = w * p_new / p_old of the whole sequence, not normalised by
    its length, and k and lambda by the sign of A. The factor sg[...] is 1 at W = 1.

    Args:
        sequence_index, lengths: as ``gspo``.
        log_weights: [B] log w, of ``divergence.sequence_log_weights``: W is then the ratio to the policy that sampled.
            None: w = 1.

    Source: VESPO, arXiv:2602.10693, section 3.3 (the shifted form of eq. 17) and eq. 20.
    """
    advantages = advantages.to(logprobs.dtype)
    log_ratios = clamped_log_ratio(logprobs.detach(), old_logprobs.detach())
    totals = log_ratios.new_zeros(len(lengths)).index_add(0, sequence_index, log_ratios)
    if log_weights is not None:
        totals = totals + log_weights
    log_w = totals.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)[sequence_index]
    k = _by_sign(advantages >= 0, k_positive, k_negative, logprobs)
    rate = _by_sign(advantages >= 0, lambda_positive, lambda_negative, logprobs)
    kernel = (k * log_w + rate * (1 - log_w.exp())).exp()
    nothing = torch.zeros_like(kernel).bool()
    return TokenLosses(-kernel * advantages * logprobs, log_w.exp(), clipped_low=nothing, clipped_high=nothing)


def _clipped(
    ratios: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> TokenLosses:
    values = -torch.minimum(ratios * advantages, ratios.clamp(1 - clip_low, 1 + clip_high) * advantages)
    detached = ratios.detach()
    low = (detached < 1 - clip_low) & (advantages < 0)
    high = (detached > 1 + clip_high) & (advantages > 0)
    if dual_clip is not None:
        runaway = (detached > dual_clip) & (advantages < 0)
        values = torch.where(runaway, -dual_clip * advantages, values)
        high = high | runaway
    return TokenLosses(values, detached, clipped_low=low, clipped_high=high)


def _by_sign(positive: Tensor, if_positive: float, if_negative: float, like: Tensor) -> Tensor:
    # torch.where of two Python floats would be float32
    return torch.where(positive, like.new_tensor(if_positive), like.new_tensor(if_negative))


def _ratios(new: Tensor, old: Tensor, sequence_index: Tensor, lengths: Tensor, level: Level) -> Tensor:
    """[N] p_new / p_old of each token, or the ratio s of ``gspo``."""
    if level == "sequence":
        return _sequence_ratios(new, old, sequence_index, lengths)
    return clamped_log_ratio(new, old).exp()


def _sequence_ratios(new: Tensor, old: Tensor, sequence_index: Tensor, lengths: Tensor) -> Tensor:
    """[N] the ratio s of ``gspo`` of the sequence of each token."""
    mean_log_ratio = _sequence_log_ratio(new, old, sequence_index, lengths)
    return mean_log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()[sequence_index]


def _sequence_log_ratio(new: Tensor, old: Tensor, sequence_index: Tensor, lengths: Tensor) -> Tensor:
    """[B] mean over the trained tokens of each sequence; 0 for a sequence without trained tokens."""
    log_ratios = new - old
    sums = log_ratios.new_zeros(len(lengths)).index_add(0, sequence_index, log_ratios)
    return sums / lengths.clamp_min(1)


# --- which tokens have a policy loss ---


def high_entropy(entropies: Tensor, share: float) -> Tensor:
    """[N] bool: True on the ceil(share * N) tokens with the highest entropy, and on tokens that tie with the last of
    them. So the result does not depend on the order of the tokens.

    Args:
        entropies: [N] of all trained tokens of the optimizer step, nats.
        share: in (0, 1].

    Source: "Beyond the 80/20 rule", arXiv:2506.01939, section 5: the indicator of entropies of at least tau, the
    threshold of the batch. The loss keeps the denominator of all tokens.
    """
    count = len(entropies)
    # a share such as 0.1 is no exact binary number, and 0.1 * 30 must not become 4
    kept = math.ceil(share * count - 1e-9)
    if kept >= count:
        return torch.ones_like(entropies, dtype=torch.bool)
    return entropies >= entropies.kthvalue(count - max(1, kept) + 1).values


def within_off_policy_threshold(
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    advantages: Tensor,
    sequence_index: Tensor,
    lengths: Tensor,
    *,
    threshold: float,
) -> Tensor:
    """[N] bool: False on tokens with a negative advantage, in a sequence whose mean of log(p_sampler / p_new) exceeds
    ``threshold``, in nats per token.

    Args:
        sampler_logprobs: [N] as the sampler reported them, of the whole distribution. So the mean covers updates since
            sampling, and the numerical mismatch.
        sequence_index, lengths: as ``gspo``.

    Source: off-policy sequence masking, arXiv:2512.02556, eq. 9.
    """
    means = _sequence_log_ratio(sampler_logprobs.detach(), logprobs.detach(), sequence_index, lengths)
    return (advantages >= 0) | (means <= threshold)[sequence_index]


# --- from the losses of tokens to the loss of the optimizer step ---


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Denominators of one optimizer step, over all microbatches and ranks.

    Sequences with advantage 0 (no signal, not graded) are counted: the scale of a step must not depend on the number of
    groups with signal.

    Raises:
        ValueError: a total is below 1.
    """

    tokens: int  # trained
    sequences: int

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.sequences < 1:
            raise ValueError(
                f"the step has {self.tokens} trained tokens in {self.sequences} sequences: nothing to train on. Both "
                "must be at least 1. Skip this step."
            )


def token_weights(
    sequence_index: Tensor, lengths: Tensor, *, mode: Aggregation, totals: StepTotals, max_completion_tokens: int
) -> Tensor:
    """The weight of each token's loss: [N] float64.

    Args:
        sequence_index: [N] int64 in 0..B-1.
        lengths: [B] int64, trained tokens of each sequence.
        mode: with D tokens in S sequences in the whole step, and L trained tokens in the token's sequence:
            ``token_mean`` 1 / D (DAPO, arXiv:2503.14476, section 3.3);
            ``sequence_mean_token_mean`` 1 / (S * L) (GRPO, arXiv:2402.03300, eq. 3);
            ``sequence_mean_token_sum`` 1 / S;
            ``constant`` 1 / (S * max_completion_tokens) (Dr.GRPO, arXiv:2503.20783, section 3).
        max_completion_tokens: the limit of a completion; used by ``constant`` only.
    """
    denominators = torch.ones_like(sequence_index, dtype=torch.float64)
    match mode:
        case "token_mean":
            denominators *= totals.tokens
        case "sequence_mean_token_mean":
            denominators *= totals.sequences * lengths[sequence_index]
        case "sequence_mean_token_sum":
            denominators *= totals.sequences
        case "constant":
            denominators *= totals.sequences * max_completion_tokens
    return denominators.reciprocal()
