"""What one microbatch adds to the loss and to the sums of its optimizer step, as the configuration says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, assert_never

import torch
import torch.distributed as dist
from torch import Tensor

from rlcore.algorithms import divergence
from rlcore.algorithms.divergence import (
    clamped_log_ratio,
    importance_ratios,
    masked_importance,
    sequence_log_weights,
    truncated_importance,
)
from rlcore.algorithms.loss import StepTotals, policy_loss, token_weights, within_off_policy_threshold
from rlcore.batch import Microbatch
from rlcore.config import AlgorithmConfig
from rlcore.config.algorithm import (
    ImportanceCorrection,
    KlEstimator,
    MaskedImportance,
    TruncatedImportance,
    VespoLoss,
)

_Values = Mapping[str, Tensor]


class PolicyTokens(NamedTuple):
    """A policy's forward pass over the N trained tokens of a microbatch, in packing order."""

    logprobs: Tensor  # [N], differentiable
    entropy: Tensor  # [N]
    truncation_logprobs: Tensor  # [N]
    # [N], share of the layers with experts that would have chosen others than the sampler, for the token that predicts
    routes_differ: Tensor | None = None  # None: no router replay


@dataclass(frozen=True, slots=True, eq=False)
class StepSums:
    """Sums over microbatches, then over ranks: [] float64 tensors by name, detached. ``StepSums()`` is empty.

    Divide only after everything is merged. The names of ``means`` and ``maxima`` are metrics.
    """

    totals: _Values = field(default_factory=dict)
    means: _Values = field(default_factory=dict)  # sums; the metric is the sum / totals["tokens"]
    maxima: _Values = field(default_factory=dict)  # 0 over no tokens

    @classmethod
    def of(cls, counted: Tensor, *, totals: _Values, means: _Values, maxima: _Values) -> StepSums:
        """The sums of one microbatch.

        Args:
            counted: [N] bool, the tokens that ``means`` and ``maxima`` cover.
            totals: tensors of any shape. All elements are summed.
            means, maxima: [N] each.
        """

        def only_counted(value: Tensor) -> Tensor:
            return torch.where(counted, value.detach(), 0)

        def largest(value: Tensor) -> Tensor:
            return torch.cat([value, value.new_zeros(1)]).max()

        return cls(
            {name: value.detach().sum().double() for name, value in totals.items()},
            {name: only_counted(value).sum().double() for name, value in means.items()},
            {name: largest(only_counted(value)).double() for name, value in maxima.items()},
        )

    def merge(self, other: StepSums) -> StepSums:
        """The sums of both. A name that only one of them has keeps its value."""
        return StepSums(
            _merged(self.totals, other.totals, torch.add),
            _merged(self.means, other.means, torch.add),
            _merged(self.maxima, other.maxima, torch.maximum),
        )

    def zeros(self) -> StepSums:
        """The same names, all values 0."""
        return StepSums(*({name: torch.zeros_like(value) for name, value in part.items()} for part in self._parts()))

    def all_reduce(self) -> StepSums:
        """The merge over all ranks, on the CPU, in one collective. Every rank must have the same names."""
        row = torch.stack([value for part in self._parts() for value in part.values()])
        rows = row[None]
        if dist.is_initialized() and dist.get_world_size() > 1:
            rows = row.new_empty(dist.get_world_size(), len(row))
            dist.all_gather_into_tensor(rows.flatten(), row)
        total = StepSums()
        for values in rows.cpu():
            left = iter(values.unbind())
            total = total.merge(StepSums(*({name: next(left) for name in part} for part in self._parts())))
        return total

    def _parts(self) -> tuple[_Values, _Values, _Values]:
        return self.totals, self.means, self.maxima


def _merged(one: _Values, other: _Values, merge: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Tensor]:
    return {**one, **{name: merge(one[name], value) if name in one else value for name, value in other.items()}}


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """The result of one optimizer step, the same on every rank."""

    sums: StepSums
    grad_norm: float
    skipped: bool  # the gradient was not finite


def microbatch_loss(
    batch: Microbatch,
    tokens: PolicyTokens,
    algorithm: AlgorithmConfig,
    totals: StepTotals,
    *,
    kl_coefficient: float,
    max_completion_tokens: int,
) -> tuple[Tensor, StepSums]:
    """The microbatch's part of the step's loss, and its sums. The parts of all microbatches and ranks add up.

    Args:
        totals: of the whole optimizer step.
        kl_coefficient: of the KL term, which the loss has if the batch has reference log-probs.
    """
    logprobs, sequence_index, lengths = tokens.logprobs, batch.sequence_index, batch.sequence_lengths
    weights = token_weights(
        sequence_index, lengths, mode=algorithm.aggregation, totals=totals, max_completion_tokens=max_completion_tokens
    ).to(logprobs.dtype)
    old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    # with top-p and top-k the sampler's log-probs are those of the truncated distribution, the trainer's are not
    truncation = tokens.truncation_logprobs if batch.truncation_logprobs is None else batch.truncation_logprobs
    sampler = (batch.sampler_logprobs + truncation).detach()

    correction = algorithm.correction
    factor = importance = importance_weights(correction, old, sampler, sequence_index)
    log_weights = None
    if correction is not None and isinstance(algorithm.loss, VespoLoss):  # the weights are part of its kernel
        log_weights = sequence_log_weights(importance, sequence_index, lengths, level=correction.level)
        factor = torch.ones_like(importance)
    losses = policy_loss(
        algorithm.loss, logprobs, old, batch.advantages, sequence_index, lengths, log_weights=log_weights
    )
    masks = policy_masks(batch, logprobs, sampler, algorithm)
    for kept in masks.values():
        factor = factor * kept
    loss = policy = (weights * factor * losses.values).sum()
    kl_loss = kl_ref = logprobs.new_zeros(())
    if batch.ref_logprobs is not None:
        to_sampler = importance * clamped_log_ratio(logprobs, old).exp()
        per_token = kl_estimate(algorithm.kl.estimator, logprobs, batch.ref_logprobs, to_sampler)
        weighted = (weights * per_token).sum()
        loss = policy + kl_coefficient * weighted
        kl_loss, kl_ref = weighted, per_token
    # The trainer skips sequences without a gradient, and the KL term decides which ones have none. Tokens with an
    # advantage are never skipped, so means over them do not depend on an unrelated setting.
    counted = batch.advantages.ne(0)
    # per token: the product over a long completion does not show where sampler and trainer differ
    ratios = torch.where(counted, importance_ratios(old, sampler), 0)
    delta = (old - sampler).abs()  # nats, not clamped
    sums = StepSums.of(
        counted,
        totals={
            "tokens": counted,
            "computed": lengths,  # with a KL term, all trained tokens of the step
            "policy_loss": policy,  # weighted: the sum over the step is its mean
            "kl_loss": kl_loss,  # weighted, without the coefficient
            "kl_ref": kl_ref,  # over all computed tokens
            "importance_ratio": ratios,
            "importance_ratio_squared": ratios.square(),
        },
        means={
            "loss/entropy": tokens.entropy,
            "loss/kl_old": divergence.k3(old, logprobs.detach()),  # KL(old || new) from token log-probs, for any loss
            "loss/ratio_mean": losses.ratios,
            "loss/clip_fraction": losses.clipped_low | losses.clipped_high,
            "loss/clip_fraction_low": losses.clipped_low,
            "loss/clip_fraction_high": losses.clipped_high,
            "rollout/abs_delta_logprob_mean": delta,
            "rollout/kl_sampler_trainer": divergence.k3(sampler, old),
            "rollout/importance_weight_mean": importance,
            "rollout/importance_masked": importance.eq(0),
            **({} if tokens.routes_differ is None else {"rollout/routes_differ": tokens.routes_differ}),
            **{name: ~kept for name, kept in masks.items()},
        },
        maxima={"loss/ratio_max": losses.ratios, "rollout/abs_delta_logprob_max": delta},
    )
    return loss, sums


def policy_masks(
    batch: Microbatch, logprobs: Tensor, sampler_logprobs: Tensor, algorithm: AlgorithmConfig
) -> dict[str, Tensor]:
    """The configured masks, each [N] bool: True on tokens that keep their policy loss. The key is the metric that
    counts the other tokens."""
    masks = {}
    if algorithm.entropy_mask is not None:
        none = torch.ones_like(batch.advantages, dtype=torch.bool)
        masks["loss/entropy_masked"] = none if batch.high_entropy is None else batch.high_entropy
    if algorithm.off_policy_mask is not None:
        masks["loss/off_policy_masked"] = within_off_policy_threshold(
            *(logprobs, sampler_logprobs, batch.advantages, batch.sequence_index, batch.sequence_lengths),
            threshold=algorithm.off_policy_mask.threshold,
        )
    return masks


def importance_weights(
    correction: ImportanceCorrection | None, old: Tensor, sampler: Tensor, sequence_index: Tensor
) -> Tensor:
    """[N] the configured importance weights, 1 without correction."""
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


def kl_estimate(estimator: KlEstimator, logprobs: Tensor, ref_logprobs: Tensor, ratios: Tensor) -> Tensor:
    """[N] the configured estimate of KL(policy || reference) per token, nats.

    Args:
        ratios: [N] policy / sampler, of ``divergence.k3_weighted``.
    """
    match estimator:
        case "k1":
            return divergence.k1(logprobs, ref_logprobs)
        case "k2":
            return divergence.k2(logprobs, ref_logprobs)
        case "k3":
            return divergence.k3(logprobs, ref_logprobs)
        case "straight_through":
            return divergence.straight_through(logprobs, ref_logprobs)
        case "k3_weighted":
            return divergence.k3_weighted(logprobs, ref_logprobs, ratios)
    assert_never(estimator)
