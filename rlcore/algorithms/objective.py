"""What one microbatch adds to the loss and to the sums of its optimizer step: the algorithm's choices, dispatched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Self, assert_never

import torch
import torch.distributed as dist
from torch import Tensor

from rlcore.algorithms import kl
from rlcore.algorithms.aggregation import StepTotals, token_weights
from rlcore.algorithms.loss import (
    LossSums,
    TokenLosses,
    cispo,
    gspo,
    gspo_token,
    loss_sums,
    ppo_clip,
    sapo,
    vespo,
)
from rlcore.algorithms.mismatch import MismatchSums, masked_importance, mismatch, truncated_importance
from rlcore.batch import Microbatch
from rlcore.config import AlgorithmConfig
from rlcore.config.algorithm import (
    CispoLoss,
    GspoLoss,
    GspoTokenLoss,
    ImportanceCorrection,
    KlEstimator,
    MaskedImportance,
    PolicyLoss,
    PpoClipLoss,
    SapoLoss,
    TruncatedImportance,
    VespoLoss,
)


class PolicyTokens(NamedTuple):
    """A policy's forward pass over the N trained tokens of a microbatch, in packing order."""

    logprobs: Tensor  # [N], differentiable
    entropy: Tensor  # [N]
    log_kept: Tensor  # [N]


@dataclass(frozen=True, slots=True, eq=False)
class StepSums:
    """[] tensors, sums over a step unless said otherwise. Merge microbatches, then ranks.

    Everything without a note of its own is over the ``tokens``: those whose advantage is not 0. The trainer leaves out
    sequences that cannot move the policy, and whether it may depends on the KL term; these tokens are always there.
    """

    tokens: Tensor  # trained, with an advantage other than 0
    computed: Tensor  # all trained tokens that were computed; with a KL term these are all trained tokens of the step
    policy_loss: Tensor  # weighted: already the step's mean once everything is merged
    kl_loss: Tensor  # weighted, before the coefficient
    kl_ref: Tensor  # KL(policy || reference) in the configured estimator, nats, over ``computed``
    entropy: Tensor  # nats
    importance: Tensor  # weights against the mismatch of sampler and trainer
    importance_zero: Tensor  # tokens that they leave out
    loss: LossSums
    mismatch: MismatchSums

    @classmethod
    def zero(cls, device: torch.device) -> Self:
        def none() -> Tensor:
            return torch.zeros((), dtype=torch.float64, device=device)

        return cls(
            tokens=none(),
            computed=none(),
            policy_loss=none(),
            kl_loss=none(),
            kl_ref=none(),
            entropy=none(),
            importance=none(),
            importance_zero=none(),
            loss=LossSums(*(none() for _ in LossSums.__slots__)),
            mismatch=MismatchSums(*(none() for _ in MismatchSums.__slots__)),
        )

    def merge(self, other: StepSums) -> StepSums:
        return StepSums(
            tokens=self.tokens + other.tokens,
            computed=self.computed + other.computed,
            policy_loss=self.policy_loss + other.policy_loss,
            kl_loss=self.kl_loss + other.kl_loss,
            kl_ref=self.kl_ref + other.kl_ref,
            entropy=self.entropy + other.entropy,
            importance=self.importance + other.importance,
            importance_zero=self.importance_zero + other.importance_zero,
            loss=self.loss.merge(other.loss),
            mismatch=self.mismatch.merge(other.mismatch),
        )

    def all_reduce(self) -> StepSums:
        """The merge over all ranks, on CPU: one collective for everything."""
        mine = [getattr(self, name) for name in _OWN]
        mine += [getattr(self.loss, name) for name in LossSums.__slots__]
        mine += [getattr(self.mismatch, name) for name in MismatchSums.__slots__]
        row = torch.stack([value.double() for value in mine])
        rows = row[None]
        if dist.is_initialized() and dist.get_world_size() > 1:
            rows = row.new_empty(dist.get_world_size(), len(mine))
            dist.all_gather_into_tensor(rows.flatten(), row)
        parts = [_from_row(values) for values in rows.cpu()]
        total = parts[0]
        for part in parts[1:]:
            total = total.merge(part)
        return total


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What one optimizer step did; the same on every rank."""

    sums: StepSums
    grad_norm: float
    skipped: bool  # the gradient was not finite


_OWN = ("tokens", "computed", "policy_loss", "kl_loss", "kl_ref", "entropy", "importance", "importance_zero")


def _from_row(values: Tensor) -> StepSums:
    tokens, computed, policy_loss, kl_loss, kl_ref, entropy, importance, importance_zero, *rest = values.unbind()
    split = len(LossSums.__slots__)
    return StepSums(
        tokens,
        computed,
        policy_loss=policy_loss,
        kl_loss=kl_loss,
        kl_ref=kl_ref,
        entropy=entropy,
        importance=importance,
        importance_zero=importance_zero,
        loss=LossSums(*rest[:split]),
        mismatch=MismatchSums(*rest[split:]),
    )


def microbatch_loss(
    batch: Microbatch,
    tokens: PolicyTokens,
    algorithm: AlgorithmConfig,
    totals: StepTotals,
    *,
    kl_coefficient: float,
    max_completion_tokens: int,
) -> tuple[Tensor, StepSums]:
    """The microbatch's share of the step's loss; the shares of all microbatches and ranks add up to the loss.

    Args:
        totals: of the whole optimizer step.
        kl_coefficient: of the KL term, which is there where the batch carries reference log-probs.
    """
    logprobs, sequence_index, lengths = tokens.logprobs, batch.sequence_index, batch.sequence_lengths
    weights = token_weights(
        sequence_index,
        lengths,
        mode=algorithm.aggregation,
        totals=totals,
        max_completion_tokens=max_completion_tokens,
    ).to(logprobs.dtype)
    old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    # under top-p and top-k the sampler tells log-probs of what they left; the trainer's are of the whole distribution
    sampler = batch.sampler_logprobs + (tokens.log_kept if batch.log_kept is None else batch.log_kept)

    losses = policy_loss(algorithm.loss, logprobs, old, batch.advantages, sequence_index, lengths)
    importance = importance_weights(algorithm.correction, old, sampler, sequence_index)
    loss = policy = (weights * importance * losses.values).sum()
    kl_loss = kl_ref = logprobs.new_zeros(())
    if batch.ref_logprobs is not None:
        per_token = kl_estimate(algorithm.kl.estimator, logprobs, batch.ref_logprobs)
        weighted = (weights * per_token).sum()
        loss = policy + kl_coefficient * weighted
        kl_loss, kl_ref = weighted.detach(), per_token.detach().sum()
    counted = batch.advantages.ne(0)
    sums = StepSums(
        tokens=counted.sum(),
        computed=lengths.sum(),
        policy_loss=policy.detach(),
        kl_loss=kl_loss,
        kl_ref=kl_ref,
        entropy=torch.where(counted, tokens.entropy, 0).sum(),
        importance=torch.where(counted, importance, 0).sum(),
        importance_zero=(counted & importance.eq(0)).sum(),
        loss=loss_sums(losses, logprobs, old, counted),
        mismatch=mismatch(old, sampler, counted),
    )
    return loss, sums


def policy_loss(
    loss: PolicyLoss, logprobs: Tensor, old: Tensor, advantages: Tensor, sequence_index: Tensor, lengths: Tensor
) -> TokenLosses:
    """The configured loss; arguments as in ``rlcore.algorithms.loss``."""
    match loss:
        case PpoClipLoss():
            return ppo_clip(
                logprobs,
                old,
                advantages,
                clip_low=loss.clip_low,
                clip_high=loss.clip_high,
                dual_clip=loss.dual_clip,
            )
        case GspoLoss() | GspoTokenLoss():
            of_sequence = gspo if isinstance(loss, GspoLoss) else gspo_token
            return of_sequence(
                logprobs, old, advantages, sequence_index, lengths, clip_low=loss.clip_low, clip_high=loss.clip_high
            )
        case CispoLoss():
            return cispo(logprobs, old, advantages, max_ratio=loss.max_ratio)
        case SapoLoss():
            return sapo(logprobs, old, advantages, tau_positive=loss.tau_positive, tau_negative=loss.tau_negative)
        case VespoLoss():
            return vespo(
                logprobs,
                old,
                advantages,
                sequence_index,
                lengths,
                k_positive=loss.k_positive,
                lambda_positive=loss.lambda_positive,
                k_negative=loss.k_negative,
                lambda_negative=loss.lambda_negative,
            )
    assert_never(loss)


def importance_weights(
    correction: ImportanceCorrection | None, old: Tensor, sampler: Tensor, sequence_index: Tensor
) -> Tensor:
    """[N] the configured weights of p_trainer / p_sampler; all 1 without correction."""
    match correction:
        case None:
            return torch.ones_like(old)
        case TruncatedImportance():
            level = sequence_index if correction.level == "sequence" else None
            return truncated_importance(old, sampler, level, max_weight=correction.max_weight)
        case MaskedImportance():
            level = sequence_index if correction.level == "sequence" else None
            return masked_importance(
                old, sampler, level, min_weight=correction.min_weight, max_weight=correction.max_weight
            )
    assert_never(correction)


def kl_estimate(estimator: KlEstimator, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """[N] the configured estimate of KL(policy || reference) per token, nats."""
    match estimator:
        case "k1":
            return kl.k1(logprobs, ref_logprobs)
        case "k2":
            return kl.k2(logprobs, ref_logprobs)
        case "k3":
            return kl.k3(logprobs, ref_logprobs)
        case "straight_through":
            return kl.straight_through(logprobs, ref_logprobs)
    assert_never(estimator)
