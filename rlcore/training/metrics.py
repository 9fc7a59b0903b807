"""Names and denominators of the metrics of each step.

``reward/`` and ``rollout/`` describe the sampled batch, ``loss/`` and ``optim/`` the optimizer step, ``time/`` the
seconds per phase, ``perf/`` the work of the updates and their utilisation, ``system/`` the machine. The grader adds
``judge/``, the calls of a judge (``JudgeGrader.take_metrics``). A run with a teacher has ``teacher/``.

Each metric has one denominator, which no other setting changes:

- ``loss/total`` and ``loss/policy``: that of ``algorithm.aggregation``, over all tokens or sequences of the step.
- ``loss/kl_ref``: all trained tokens of the step.
- ``teacher/kl``, the mean of log p_policy - log p_teacher in nats, with a token's value clamped to +-20: all trained
  tokens of the batch. It estimates KL(policy || teacher) per token. log p_policy is of the policy before the updates.
- Every other token mean, share or maximum of ``update_metrics``: the trained tokens of the step whose advantage is not
  0. Without a KL term and with one update per batch, sequences with advantage 0 are not computed, because they cannot
  change the policy. If means included them, ``algorithm.kl.coefficient`` would change the denominator.
- ``rollout/routes_differ``: the same tokens, times the layers with experts. Only with ``rollout.replay_routes``.
- ``reward/``: the graded completions of the batch; ``reward/ungraded`` and other shares of completions: all of them.
- Shares of groups: all groups of the batch.
- ``source/NAME/``, for each source of a mixture: as the metric of the same name without it, over the source's own
  groups. ``source/NAME/share``: of all groups trained on. ``source/NAME/epochs``: problems taken from the source / its
  size.

A mean over nothing is left out, never reported as 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rlcore.algorithms.advantage import GroupOutcome, group_outcome
from rlcore.algorithms.divergence import QUANTISED_LIMIT, Dtype, effective_sample_size, normal_limit
from rlcore.algorithms.objective import UpdateResult
from rlcore.config import AlgorithmConfig, ExperimentConfig
from rlcore.flops import Work, utilisation
from rlcore.rollout.advantages import StepAdvantages, has_signal
from rlcore.rollout.collect import RolloutBatch
from rlcore.rollout.groups import Group
from rlcore.types import Score


def mismatch_alarm(config: ExperimentConfig, device: str) -> float:
    """``rollout.mismatch_alarm``, or the normal limit for the dtypes on this device ("cpu", "cuda"); nats per token."""
    if config.rollout.mismatch_alarm is not None:
        return config.rollout.mismatch_alarm
    if config.rollout.quantization is not None:
        return QUANTISED_LIMIT
    auto: Dtype = "float32" if device == "cpu" else "bfloat16"
    trainer, sampler = (auto if d == "auto" else d for d in (config.model.compute_dtype, config.rollout.dtype))
    return normal_limit(device, trainer, sampler)


def update_metrics(
    result: UpdateResult, kl_coefficient: float, *, alarm_above: float, stale: bool = False
) -> dict[str, float]:
    """loss/ and optim/ of one optimizer step, and the distance between sampler and trainer. If all advantages are 0,
    means over tokens with an advantage are left out.

    Args:
        alarm_above: mean distance, nats per token, that raises the alarm.
        stale: an older policy sampled, so that a distance is expected.
    """
    sums = result.sums
    total = {name: float(value) for name, value in sums.totals.items()}
    tokens = total["tokens"]
    distance = float(sums.means["rollout/abs_delta_logprob_mean"])
    metrics = {
        "loss/total": total["policy_loss"] + kl_coefficient * total["kl_loss"],
        "loss/policy": total["policy_loss"],
        "loss/kl_coefficient": kl_coefficient,
        "loss/kl_ref": total["kl_ref"] / max(1.0, total["computed"]),  # 0 if every completion was masked
        "optim/grad_norm": result.grad_norm,
        "optim/skipped": float(result.skipped),
        "rollout/mismatch_alarm": float(not stale and distance > alarm_above * tokens),
    }
    if not tokens:
        return metrics
    effective = effective_sample_size(sums.totals["importance_ratio"], sums.totals["importance_ratio_squared"])
    return {
        **metrics,
        **{name: float(value) / tokens for name, value in sums.means.items()},
        **{name: float(value) for name, value in sums.maxima.items()},
        "rollout/effective_sample_size": float(effective) / tokens,
    }


def performance_metrics(work: Work, seconds: float, devices: int, device_name: str) -> dict[str, float]:
    """perf/ of the updates of one rollout batch, over all devices.

    ``update_mfu`` needs a device of known peak: FLOPs (``rlcore.flops``) per second, divided by the peak.
    ``update_tokens_per_second`` counts computed tokens; ``update_prompt_tokens_shared`` counts the prompt tokens that
    groups share and that were therefore not computed again.
    """
    flops = work.forward_flops + work.backward_flops
    metrics = {
        "perf/update_tokens": float(work.tokens),
        "perf/update_prompt_tokens": float(work.prompt_tokens),
        "perf/update_prompt_tokens_shared": float(work.shared_tokens),
        "perf/update_tokens_per_second": work.tokens / seconds,
        "perf/update_tflops_per_second": flops / seconds / 1e12,
    }
    mfu = utilisation(flops, seconds, devices, device_name)
    return metrics if mfu is None else {**metrics, "perf/update_mfu": mfu}


def collection_metrics(batch: RolloutBatch, advantages: StepAdvantages) -> dict[str, float]:
    """How many generated groups were trained on, and the rewards of those."""
    waiting = batch.rollouts.groups
    scores = [rollout.score for group in batch.groups for rollout in group.rollouts]
    rewards = [score.reward for score in scores if score.graded]
    metrics = {
        **({"reward/trained_mean": float(np.mean(rewards))} if rewards else {}),
        "rollout/trained_zero_signal": 1 - sum(advantages.signal) / len(advantages.signal),
        "rollout/groups_generated": float(len(batch.generated)),
        "rollout/groups_trained": float(len(batch.groups)),
        "rollout/groups_filled": float(batch.filled),
        "rollout/groups_from_buffer": float(batch.from_buffer),
        "rollout/groups_buffered": float(sum(group.surplus for group in waiting)),
        "rollout/groups_in_flight": float(sum(group.state != "ready" for group in waiting)),
        "rollout/groups_dropped_stale": float(batch.counts.dropped_stale),
        "rollout/rounds": float(batch.counts.rounds),
        "rollout/completions_continued": float(batch.counts.continued),
        "rollout/policy_age_max": float(batch.age_max),
        "rollout/problems_seen": float(batch.rollouts.problems_seen),
    }
    if advantages.kl_penalty is not None:
        metrics["reward/kl_penalty"] = advantages.kl_penalty
    if batch.rollouts.mixture is not None:
        for name, at in batch.rollouts.mixture.sources.items():
            trained = sum(group.problem.source_name == name for group in batch.groups)
            metrics[f"source/{name}/share"] = trained / len(batch.groups)
            metrics[f"source/{name}/epochs"] = at.taken / at.size
    if advantages.teacher_kl is not None:
        metrics["teacher/kl"] = advantages.teacher_kl
    return metrics


def rollout_metrics(
    groups: Sequence[Group],
    algorithm: AlgorithmConfig,
    sampled: int,
    seconds: Mapping[str, float],
    peak_memory_bytes: int,
) -> dict[str, float]:
    """reward/, rollout/, time/ and system/ of one rollout batch.

    reward/ covers the graded completions, except ``ungraded``, which is a share of all completions. ``all_right``,
    ``all_wrong`` and ``zero_signal`` are shares of the groups. If nothing was generated, only time/ and the peak memory
    are known.

    Args:
        groups: generated for this batch.
        sampled: completion tokens sampled in the seconds of this step, including those of ``generate_beside``, which
            overlap with the training.
    """
    known = {f"time/{phase}": value for phase, value in seconds.items()}
    known["system/peak_memory_gib"] = peak_memory_bytes / 2**30
    if not groups:
        return known
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = np.array([len(r.completion.token_ids) for r in rollouts])
    prompts = sum(len(group.prompt_token_ids) * len(group.rollouts) for group in groups)
    outcomes = [_outcome(group) for group in groups]
    tokens = int(lengths.sum())
    return {
        **known,
        **_source_metrics(groups, algorithm),
        **_reward_metrics([rollout.score for rollout in rollouts]),
        "rollout/all_right": outcomes.count("all_right") / len(groups),
        "rollout/all_wrong": outcomes.count("all_wrong") / len(groups),
        "rollout/zero_signal": sum(not has_signal(group, algorithm) for group in groups) / len(groups),
        "rollout/truncated": float(np.mean([r.completion.finish_reason == "length" for r in rollouts])),
        "rollout/completion_tokens_mean": float(lengths.mean()),
        "rollout/completion_tokens_max": float(lengths.max()),
        "rollout/prompt_tokens_mean": prompts / len(rollouts),
        "system/tokens_per_second": (prompts + tokens) / seconds["step"],
        "system/generated_tokens_per_second": sampled
        / (seconds.get("generate", 0.0) + seconds.get("generate_beside", 0.0)),
    }


def _source_metrics(groups: Sequence[Group], algorithm: AlgorithmConfig) -> dict[str, float]:
    """source/ of the sources that ``groups`` have problems of; empty without a mixture."""
    metrics: dict[str, float] = {}
    for name in sorted({group.problem.source_name for group in groups} - {""}):
        own = [group for group in groups if group.problem.source_name == name]
        rewards = _reward_metrics([rollout.score for group in own for rollout in group.rollouts])
        rewards["reward/zero_signal"] = sum(not has_signal(group, algorithm) for group in own) / len(own)
        metrics |= {f"source/{name}/{ours}": rewards[key] for key, ours in _OF_A_SOURCE.items() if key in rewards}
    return metrics


_OF_A_SOURCE = {
    "reward/mean": "reward_mean",
    "reward/accuracy": "accuracy",
    "reward/ungraded": "ungraded",
    "reward/zero_signal": "zero_signal",
}


def _reward_metrics(scores: Sequence[Score]) -> dict[str, float]:
    graded = [score for score in scores if score.graded]
    metrics = {"reward/ungraded": 1 - len(graded) / len(scores)}
    if not graded:
        return metrics
    rewards = [score.reward for score in graded]
    metrics |= {"reward/mean": float(np.mean(rewards)), "reward/std": float(np.std(rewards))}
    for name in sorted({name for score in graded for name in score.parts}):
        metrics[f"reward/{name}"] = float(np.mean([s.parts[name] for s in graded if name in s.parts]))
    return metrics


def _outcome(group: Group) -> GroupOutcome:
    scores = [rollout.score for rollout in group.rollouts]
    accuracy = [score.parts.get("accuracy", score.reward) for score in scores]
    return group_outcome(accuracy, [score.graded for score in scores])
