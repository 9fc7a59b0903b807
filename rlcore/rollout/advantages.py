"""Turns the scores of a rollout batch into the advantage of every trained token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import assert_never

import numpy as np
import torch
from torch import Tensor

from rlcore.algorithms import advantage as estimators
from rlcore.algorithms.divergence import teacher_signal
from rlcore.algorithms.objective import kl_estimate
from rlcore.config import AlgorithmConfig
from rlcore.config.algorithm import (
    BatchStdAdvantage,
    BnpoAdvantage,
    DrGrpoAdvantage,
    GrpoAdvantage,
    PassAtKAdvantage,
    ReinforcePlusPlusAdvantage,
    ReinforcePlusPlusBaselineAdvantage,
    RemaxAdvantage,
    RlooAdvantage,
)
from rlcore.rollout.groups import Group
from rlcore.types import Floats, Score, TrainingSample


@dataclass(frozen=True, slots=True, eq=False)
class StepAdvantages:
    samples: list[TrainingSample]  # in the order of the groups, advantages attached
    signal: list[bool]  # of each group, compared with the others: ``Advantages.signal``
    kl_penalty: float | None  # mean KL in the reward per trained token, nats, before the coefficient
    teacher_kl: float | None = None  # mean KL(policy || teacher) per trained token, nats; None: no teacher


def has_signal(group: Group, algorithm: AlgorithmConfig) -> bool:
    """Whether this group alone gives any completion an advantage other than 0. Comparisons with other groups and a KL
    in the reward are ignored."""
    penalties = [np.zeros(sample.num_tokens, np.float32) for sample in group.samples]
    return bool(_combined([group], penalties, algorithm, kl_coefficient=0.0).signal)


def attach_advantages(groups: Sequence[Group], algorithm: AlgorithmConfig, *, kl_coefficient: float) -> StepAdvantages:
    """Attach the advantages of the configured estimator, of the teacher, or their sum to the samples of the groups.

    A KL in the reward is subtracted here, for each token from that token on. The reference log-probs are then dropped,
    so that the loss has no KL term.
    The teacher's log-probs are dropped as well: the loss sees advantages only.
    """
    samples = [sample for group in groups for sample in group.samples]
    in_reward = algorithm.kl.place == "reward" and samples[0].ref_logprobs is not None
    penalties = [
        _penalties(sample, algorithm) if in_reward else np.zeros(sample.num_tokens, np.float32) for sample in samples
    ]
    estimates = _combined(groups, penalties, algorithm, kl_coefficient)
    rows, trained = estimates.values.flatten(0, 1), max(1, sum(s.num_trained for s in samples))
    with_advantages = [
        replace(s, advantages=_of_tokens(s, row), teacher_logprobs=None) for s, row in zip(samples, rows, strict=True)
    ]
    mean_penalty = teacher_kl = None
    if in_reward:
        with_advantages = [replace(s, ref_logprobs=None) for s in with_advantages]
        mean_penalty = sum(_total(p) for p in penalties) / trained
    if algorithm.teacher is not None:
        teacher_kl = -sum(float(_teacher_signal(s).sum()) for s in samples) / trained
    return StepAdvantages(with_advantages, estimates.signal.tolist(), mean_penalty, teacher_kl)


def _combined(
    groups: Sequence[Group], penalties: Sequence[Floats], algorithm: AlgorithmConfig, kl_coefficient: float
) -> estimators.Advantages:
    """The advantages of the task's reward, of the teacher, or their sum.

    Args:
        penalties: KL per token of each sample, in the order of the groups.
    """
    shape = (len(groups), len(groups[0].samples))
    of_task = estimators.Advantages(torch.zeros(shape, dtype=torch.float64))
    if algorithm.trains_on_reward:
        of_task = _estimate(groups, penalties, algorithm, kl_coefficient)
    if algorithm.teacher is None:
        return of_task
    signals = [_teacher_signal(sample) for group in groups for sample in group.samples]
    signal = torch.nn.utils.rnn.pad_sequence([*signals, torch.zeros(1, dtype=torch.float64)], batch_first=True)[:-1]
    per_token = of_task.values if of_task.values.ndim == 3 else of_task.values[..., None]
    return estimators.Advantages(per_token + algorithm.teacher.coefficient * signal.view(*shape, -1))


def _teacher_signal(sample: TrainingSample) -> Tensor:
    """[C] float64, ``divergence.teacher_signal`` of the trained tokens."""
    if sample.old_logprobs is None or sample.teacher_logprobs is None:
        raise ValueError("a sample has no log-probs of the policy or the teacher, and algorithm.teacher needs both")
    own, teacher = (torch.from_numpy(row[sample.loss_mask]) for row in (sample.old_logprobs, sample.teacher_logprobs))
    return teacher_signal(own, teacher).double()


def _estimate(
    groups: Sequence[Group], penalties: Sequence[Floats], algorithm: AlgorithmConfig, kl_coefficient: float
) -> estimators.Advantages:
    """The advantages of the task's reward. Arguments as ``_combined``."""
    samples = [sample for group in groups for sample in group.samples]
    scores = [[r.score for r in g.rollouts] for g in groups]
    graded = torch.tensor([[score.graded for score in row] for row in scores])
    rewards = torch.tensor([[score.reward for score in row] for row in scores], dtype=torch.float64)
    rewards = rewards - kl_coefficient * torch.tensor([_total(p) for p in penalties], dtype=torch.float64).view(
        rewards.shape
    )
    choice = algorithm.advantage
    match choice:
        case GrpoAdvantage():
            return estimators.grpo(rewards, graded, std=choice.std)
        case DrGrpoAdvantage():
            return estimators.dr_grpo(rewards, graded)
        case BatchStdAdvantage():
            return estimators.batch_std(rewards, graded)
        case RlooAdvantage():
            return estimators.rloo(rewards, graded)
        case BnpoAdvantage():
            return estimators.bnpo(rewards, graded)
        case PassAtKAdvantage():
            return estimators.pass_at_k(rewards, graded, k=choice.k)
        case RemaxAdvantage():
            baselines = [g.baseline or Score(0.0, {}, graded=False) for g in groups]
            return estimators.remax(
                rewards,
                graded,
                torch.tensor([score.reward for score in baselines], dtype=torch.float64),
                torch.tensor([score.graded for score in baselines]),
            )
        case ReinforcePlusPlusBaselineAdvantage():
            lengths = torch.tensor([s.num_trained for s in samples]).view(rewards.shape)
            return estimators.reinforce_plus_plus_baseline(rewards, graded, lengths)
        case ReinforcePlusPlusAdvantage():
            returns, tokens = _returns(groups, samples, penalties, kl_coefficient)
            shape = (*rewards.shape, returns.shape[-1])
            return estimators.reinforce_plus_plus(returns.view(shape), tokens.view(shape), graded)
    assert_never(choice)


def _returns(
    groups: Sequence[Group], samples: Sequence[TrainingSample], penalties: Sequence[Floats], coefficient: float
) -> tuple[Tensor, Tensor]:
    """Reward to go [S, C] over the trained tokens of S sequences, and a mask [S, C] of the tokens that exist."""
    scores = [r.score.reward for g in groups for r in g.rollouts]
    longest = max(1, *(s.num_trained for s in samples))
    returns = torch.zeros(len(samples), longest, dtype=torch.float64)
    tokens = torch.zeros(len(samples), longest, dtype=torch.bool)
    for row, (sample, penalty, score) in enumerate(zip(samples, penalties, scores, strict=True)):
        own = penalty[sample.loss_mask].astype(np.float64)
        to_go = own[::-1].cumsum()[::-1]
        returns[row, : len(own)] = torch.from_numpy(score - coefficient * to_go)
        tokens[row, : len(own)] = True
    return returns, tokens


def _total(penalties: Floats) -> float:
    return float(penalties.sum(dtype=np.float64))


def _penalties(sample: TrainingSample, algorithm: AlgorithmConfig) -> Floats:
    """[L] KL(policy || reference) of each trained token, for the policy that sampled it; 0 without log-probs."""
    if sample.old_logprobs is None or sample.ref_logprobs is None:
        return np.zeros(sample.num_tokens, np.float32)
    old, ref = torch.tensor(sample.old_logprobs), torch.tensor(sample.ref_logprobs)
    values = kl_estimate(algorithm.kl.estimator, old, ref, torch.ones_like(old))
    return np.where(sample.loss_mask, values.numpy(), np.float32(0))


def _of_tokens(sample: TrainingSample, values: Tensor) -> Floats:
    """Spread one value of the sequence, or the values [C] of its trained tokens, over its tokens [L]."""
    out = np.zeros(sample.num_tokens, np.float32)
    trained = values.numpy().astype(np.float32)
    out[sample.loss_mask] = trained if trained.ndim == 0 else trained[: sample.num_trained]
    return out
