"""Names and denominators of what is logged each step.

``reward/ rollout/`` describe the batch that was sampled, ``loss/ optim/`` the optimizer step, ``time/`` seconds per
phase, ``perf/`` what the updates computed and how near to the chip's limit, ``system/`` the machine.

Each metric has one denominator, which no other setting changes:

- ``loss/total`` and ``loss/policy``: that of ``algorithm.aggregation``, over all tokens or sequences of the step.
- ``loss/kl_ref``: all trained tokens of the step.
- Every other token mean, share or maximum of ``update_metrics``: the trained tokens of the step whose advantage is not
  0. Without a KL term and with one update per batch, other sequences are not computed at all, because they cannot move
  the policy; with them in the mean, it would be over other problems as soon as ``algorithm.kl.coefficient`` is not 0.
- ``reward/``: the graded completions of the batch; ``reward/ungraded`` and other shares of completions: all of them.
- Shares of groups: all groups of the batch.

A mean over nothing is left out, never 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rlcore.algorithms.advantage import GroupOutcome, group_outcome
from rlcore.algorithms.divergence import Dtype, effective_sample_size, normal_limit
from rlcore.algorithms.objective import UpdateResult
from rlcore.config import AlgorithmConfig, ExperimentConfig
from rlcore.flops import Work, utilisation
from rlcore.rollout.advantages import StepAdvantages, has_signal
from rlcore.rollout.collect import RolloutBatch
from rlcore.rollout.groups import Group
from rlcore.types import Score


def mismatch_alarm(config: ExperimentConfig, device: str) -> float:
    """Nats per token, ``rollout.mismatch_alarm`` or what the dtypes on this device ("cpu", "cuda") allow."""
    if config.rollout.mismatch_alarm is not None:
        return config.rollout.mismatch_alarm
    auto: Dtype = "float32" if device == "cpu" else "bfloat16"
    trainer, sampler = (auto if d == "auto" else d for d in (config.model.compute_dtype, config.rollout.dtype))
    return normal_limit(device, trainer, sampler)


def update_metrics(
    result: UpdateResult, kl_coefficient: float, *, alarm_above: float, stale: bool = False
) -> dict[str, float]:
    """loss/ and optim/ of one optimizer step, and how far sampler and trainer are apart. Where no token has an
    advantage other than 0, the means over such tokens are left out.

    Args:
        alarm_above: mean distance, nats per token, that raises the alarm.
        stale: an older policy has sampled, so that this distance is no fault.
    """
    sums = result.sums
    total = {name: float(value) for name, value in sums.totals.items()}
    tokens = total["tokens"]
    distance = float(sums.means["rollout/abs_delta_logprob_mean"])
    found = {
        "loss/total": total["policy_loss"] + kl_coefficient * total["kl_loss"],
        "loss/policy": total["policy_loss"],
        "loss/kl_coefficient": kl_coefficient,
        "loss/kl_ref": total["kl_ref"] / max(1.0, total["computed"]),  # 0 where every completion was masked
        "optim/grad_norm": result.grad_norm,
        "optim/skipped": float(result.skipped),
        "rollout/mismatch_alarm": float(not stale and distance > alarm_above * tokens),
    }
    if not tokens:
        return found
    effective = effective_sample_size(sums.totals["importance_ratio"], sums.totals["importance_ratio_squared"])
    return {
        **found,
        **{name: float(value) / tokens for name, value in sums.means.items()},
        **{name: float(value) for name, value in sums.maxima.items()},
        "rollout/effective_sample_size": float(effective) / tokens,
    }


def performance_metrics(work: Work, seconds: float, devices: int, device_name: str) -> dict[str, float]:
    """perf/ of the updates of one rollout batch, over all devices.

    ``update_mfu`` is there where the device's peak is known: forward and backward FLOPs as ``algorithms.flops`` counts
    them, per second, over the peak. ``update_tokens_per_second`` counts the tokens that are computed; what a group
    shares of its prompt comes on top of these, in ``update_prompt_tokens_shared``.
    """
    flops = work.forward_flops + work.backward_flops
    found = {
        "perf/update_tokens": float(work.tokens),
        "perf/update_prompt_tokens": float(work.prompt_tokens),
        "perf/update_prompt_tokens_shared": float(work.shared_tokens),
        "perf/update_tokens_per_second": work.tokens / seconds,
        "perf/update_tflops_per_second": flops / seconds / 1e12,
    }
    mfu = utilisation(flops, seconds, devices, device_name)
    return found if mfu is None else {**found, "perf/update_mfu": mfu}


def collection_metrics(batch: RolloutBatch, advantages: StepAdvantages) -> dict[str, float]:
    """What was kept of what was generated, and what the trained groups were worth."""
    waiting = batch.rollouts.groups
    scores = [rollout.score for group in batch.groups for rollout in group.rollouts]
    rewards = [score.reward for score in scores if score.graded]
    found = {
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
        found["reward/kl_penalty"] = advantages.kl_penalty
    return found


def rollout_metrics(
    groups: Sequence[Group],
    algorithm: AlgorithmConfig,
    sampled: int,
    seconds: Mapping[str, float],
    peak_memory_bytes: int,
) -> dict[str, float]:
    """reward/, rollout/, time/ and system/ of one rollout batch.

    reward/ covers the graded completions, but for ``ungraded``, which is a share of all; without a graded completion it
    holds nothing else. ``all_right``, ``all_wrong`` and ``zero_signal`` are shares of the groups. Where nothing was
    generated, only time/ and the peak memory are known.

    Args:
        groups: that were generated for this step.
        sampled: completion tokens, in the seconds of this step, of which ``generate_beside`` overlap with others.
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


def _reward_metrics(scores: Sequence[Score]) -> dict[str, float]:
    graded = [score for score in scores if score.graded]
    found = {"reward/ungraded": 1 - len(graded) / len(scores)}
    if not graded:
        return found
    rewards = [score.reward for score in graded]
    found |= {"reward/mean": float(np.mean(rewards)), "reward/std": float(np.std(rewards))}
    for name in sorted({name for score in graded for name in score.parts}):
        found[f"reward/{name}"] = float(np.mean([s.parts[name] for s in graded if name in s.parts]))
    return found


def _outcome(group: Group) -> GroupOutcome:
    scores = [rollout.score for rollout in group.rollouts]
    accuracy = [score.parts.get("accuracy", score.reward) for score in scores]
    return group_outcome(accuracy, [score.graded for score in scores])
