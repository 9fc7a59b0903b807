"""What one microbatch adds to the loss and to the sums of its optimizer step, and advantages for a batch of groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from rlcore.algorithms.advantage import group_advantages
from rlcore.algorithms.aggregation import StepTotals, token_weights
from rlcore.algorithms.kl import k3
from rlcore.algorithms.logprobs import trained_sequences
from rlcore.algorithms.loss import LossSums, clipped_policy_loss
from rlcore.algorithms.mismatch import MismatchSums, mismatch
from rlcore.batch import Microbatch
from rlcore.config import AlgorithmConfig
from rlcore.types import RolloutGroup, TrainingSample


@dataclass(frozen=True, slots=True, eq=False)
class StepSums:
    """[] tensors over the trained tokens of a step; sums unless said otherwise. Merge microbatches, then ranks."""

    tokens: Tensor  # trained
    policy_loss: Tensor  # weighted: already the step's mean once everything is merged
    kl_loss: Tensor  # weighted, before the coefficient
    kl_ref: Tensor  # k3 of KL(policy || reference), nats
    entropy: Tensor  # nats
    loss: LossSums
    mismatch: MismatchSums

    @classmethod
    def zero(cls, device: torch.device) -> Self:
        def none() -> Tensor:
            return torch.zeros((), dtype=torch.float64, device=device)

        return cls(
            tokens=none(),
            policy_loss=none(),
            kl_loss=none(),
            kl_ref=none(),
            entropy=none(),
            loss=LossSums(*(none() for _ in range(6))),
            mismatch=MismatchSums(*(none() for _ in range(5))),
        )

    def merge(self, other: StepSums) -> StepSums:
        return StepSums(
            tokens=self.tokens + other.tokens,
            policy_loss=self.policy_loss + other.policy_loss,
            kl_loss=self.kl_loss + other.kl_loss,
            kl_ref=self.kl_ref + other.kl_ref,
            entropy=self.entropy + other.entropy,
            loss=self.loss.merge(other.loss),
            mismatch=self.mismatch.merge(other.mismatch),
        )

    def all_reduce(self) -> StepSums:
        """The merge over all ranks, on CPU: one collective for everything."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return self
        mine = [self.tokens, self.policy_loss, self.kl_loss, self.kl_ref, self.entropy]
        mine += [getattr(self.loss, name) for name in LossSums.__slots__]
        mine += [getattr(self.mismatch, name) for name in MismatchSums.__slots__]
        row = torch.stack([value.double() for value in mine])
        rows = row.new_empty(dist.get_world_size(), len(mine))
        dist.all_gather_into_tensor(rows.flatten(), row)
        parts = [_from_row(values) for values in rows.cpu()]
        total = parts[0]
        for part in parts[1:]:
            total = total.merge(part)
        return total


def _from_row(values: Tensor) -> StepSums:
    scalars = list(values.unbind())
    return StepSums(*scalars[:5], loss=LossSums(*scalars[5:11]), mismatch=MismatchSums(*scalars[11:]))


def microbatch_loss(
    batch: Microbatch,
    logprobs: Tensor,
    entropy: Tensor,
    algorithm: AlgorithmConfig,
    totals: StepTotals,
    max_completion_tokens: int,
) -> tuple[Tensor, StepSums]:
    """The microbatch's share of the step's loss; the shares of all microbatches and ranks add up to the loss.

    Args:
        logprobs: [N] of the trained tokens in packing order, differentiable; entropy [N].
        totals: of the whole optimizer step.
    """
    mask = batch.loss_mask
    sequence_index, lengths = trained_sequences(mask, batch.cu_seqlens)
    weights = token_weights(
        sequence_index,
        lengths,
        mode=algorithm.aggregation,
        totals=totals,
        max_completion_tokens=max_completion_tokens,
    )
    old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs[mask]
    policy = clipped_policy_loss(
        logprobs,
        old,
        batch.advantages[sequence_index],
        weights,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
    )
    loss = policy.loss
    kl_loss = kl_ref = torch.zeros((), device=logprobs.device)
    if batch.ref_logprobs is not None:
        per_token = k3(logprobs, batch.ref_logprobs[mask])
        weighted = (weights.to(per_token.dtype) * per_token).sum()
        loss = loss + algorithm.kl.coefficient * weighted
        kl_loss, kl_ref = weighted.detach(), per_token.detach().sum()
    sums = StepSums(
        tokens=mask.sum(),
        policy_loss=policy.loss.detach(),
        kl_loss=kl_loss,
        kl_ref=kl_ref,
        entropy=entropy.sum(),
        loss=policy.sums,
        mismatch=mismatch(old, batch.sampler_logprobs[mask]),
    )
    return loss, sums


def attach_advantages(
    samples: Sequence[TrainingSample], groups: Sequence[RolloutGroup], *, normalize_by_std: bool
) -> list[TrainingSample]:
    """Give each sample the advantage of its rollout; samples stand in the order of the groups' rollouts."""
    advantages: list[float] = []
    for group in groups:
        rewards = torch.tensor([r.score.reward for r in group.rollouts], dtype=torch.float64)
        graded = torch.tensor([r.score.graded for r in group.rollouts])
        advantages += group_advantages(rewards, graded, normalize_by_std=normalize_by_std).values.tolist()
    return [replace(s, advantage=a) for s, a in zip(samples, advantages, strict=True)]
