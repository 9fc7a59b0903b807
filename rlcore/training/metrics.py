"""Names and denominators of what is logged each step.

``reward/ rollout/`` describe the batch that was sampled, ``loss/ optim/`` the optimizer step, ``time/`` seconds per
phase, ``perf/`` what the updates computed and how near to the chip's limit, ``system/`` the machine. Token means divide
by the trained tokens of the step, sequence means by its sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rlcore.algorithms.advantage import MIN_SPREAD
from rlcore.algorithms.filtering import OutcomeCounts, count_outcomes, group_outcome
from rlcore.algorithms.flops import Work, utilisation
from rlcore.training.advantages import StepAdvantages
from rlcore.training.collection import Collected
from rlcore.training.state import TrainState
from rlcore.training.step import UpdateResult
from rlcore.types import RolloutGroup

MISMATCH_ALARM = 0.01  # nats per token: beyond it the sampler's numbers are not the trainer's, and ratios lie


def update_metrics(result: UpdateResult, kl_coefficient: float, *, stale: bool = False) -> dict[str, float]:
    """loss/ and optim/ of one optimizer step, and how far sampler and trainer are apart.

    Args:
        stale: an older policy has sampled, so that this distance is no fault.
    """
    sums = result.sums
    tokens = max(1.0, float(sums.tokens))  # none where every completion was masked

    def per_token(value: object) -> float:
        return float(value) / tokens  # type: ignore[arg-type]

    return {
        "loss/total": float(sums.policy_loss) + kl_coefficient * float(sums.kl_loss),
        "loss/policy": float(sums.policy_loss),
        "loss/kl_coefficient": kl_coefficient,
        "loss/kl_ref": per_token(sums.kl_ref),
        "loss/kl_old": per_token(sums.loss.kl_k3),
        "loss/entropy": per_token(sums.entropy),
        "loss/clip_fraction": per_token(sums.loss.clipped_low + sums.loss.clipped_high),
        "loss/clip_fraction_low": per_token(sums.loss.clipped_low),
        "loss/clip_fraction_high": per_token(sums.loss.clipped_high),
        "loss/ratio_mean": per_token(sums.loss.ratio),
        "loss/ratio_max": float(sums.loss.ratio_max),
        "optim/grad_norm": result.grad_norm,
        "optim/skipped": float(result.skipped),
        "rollout/abs_delta_logprob_mean": per_token(sums.mismatch.abs_delta),
        "rollout/mismatch_alarm": float(not stale and per_token(sums.mismatch.abs_delta) > MISMATCH_ALARM),
        "rollout/abs_delta_logprob_max": float(sums.mismatch.abs_delta_max),
        "rollout/effective_sample_size": per_token(sums.mismatch.effective_sample_size()),
        "rollout/kl_sampler_trainer": per_token(sums.mismatch.k3),
        "rollout/importance_weight_mean": per_token(sums.importance),
        "rollout/importance_masked": per_token(sums.importance_zero),
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


def collection_metrics(collected: Collected, advantages: StepAdvantages, state: TrainState) -> dict[str, float]:
    """What was kept of what was generated, and what the trained groups were worth."""
    kept = [group.group for group in collected.groups]
    rewards = [rollout.score.reward for group in kept for rollout in group.rollouts]
    found = {
        "reward/trained_mean": float(np.mean(rewards)),
        "rollout/trained_zero_signal": 1 - sum(advantages.signal) / len(advantages.signal),
        "rollout/groups_generated": float(len(collected.generated)),
        "rollout/groups_trained": float(len(kept)),
        "rollout/groups_filled": float(collected.filled),
        "rollout/groups_from_buffer": float(collected.from_buffer),
        "rollout/groups_buffered": float(len(state.buffer)),
        "rollout/groups_in_flight": float(len(state.in_flight)),
        "rollout/groups_dropped_stale": float(collected.drawn.dropped_stale),
        "rollout/rounds": float(collected.drawn.rounds),
        "rollout/completions_continued": float(collected.drawn.continued),
        "rollout/policy_age_max": float(collected.age_max),
        "rollout/problems_seen": float(state.problems_seen),
    }
    if advantages.kl_penalty is not None:
        found["reward/kl_penalty"] = advantages.kl_penalty
    return found


def rollout_metrics(
    groups: Sequence[RolloutGroup],
    drawn: int,
    seconds: Mapping[str, float],
    peak_memory_bytes: int,
) -> dict[str, float]:
    """reward/, rollout/, time/ and system/ of one rollout batch.

    Args:
        groups: that were generated for this step.
        drawn: completion tokens, in the seconds of this step, of which ``generate_beside`` overlap with others.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = np.array([r.score.reward for r in rollouts])
    lengths = np.array([len(r.completion.token_ids) for r in rollouts])
    prompts = sum(len(g.prompt_token_ids) * len(g.rollouts) for g in groups)
    outcomes = _outcomes(groups)
    graded = [r.score for r in rollouts if r.score.graded]
    parts = sorted({name for score in graded for name in score.parts})
    tokens = int(lengths.sum())
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        **{f"reward/{name}": float(np.mean([s.parts[name] for s in graded if name in s.parts])) for name in parts},
        "reward/ungraded": 1 - len(graded) / len(rollouts),
        "rollout/all_right": outcomes.all_right / outcomes.groups,
        "rollout/all_wrong": outcomes.all_wrong / outcomes.groups,
        "rollout/zero_signal": outcomes.zero_signal / outcomes.groups,
        "rollout/truncated": float(np.mean([r.completion.finish_reason == "length" for r in rollouts])),
        "rollout/completion_tokens_mean": float(lengths.mean()),
        "rollout/completion_tokens_max": float(lengths.max()),
        "rollout/prompt_tokens_mean": prompts / len(rollouts),
        **{f"time/{phase}": value for phase, value in seconds.items()},
        "system/tokens_per_second": (prompts + tokens) / seconds["step"],
        "system/generated_tokens_per_second": drawn
        / (seconds.get("generate", 0.0) + seconds.get("generate_beside", 0.0)),
        "system/peak_memory_gib": peak_memory_bytes / 2**30,
    }


def _outcomes(groups: Sequence[RolloutGroup]) -> OutcomeCounts:
    pairs = []
    for group in groups:
        scores = [rollout.score for rollout in group.rollouts]
        graded = [score.graded for score in scores]
        rewards = [score.reward for score in scores if score.graded]
        outcome = group_outcome([score.parts.get("accuracy", score.reward) for score in scores], graded)
        pairs.append((outcome, len(rewards) >= 2 and max(rewards) - min(rewards) > MIN_SPREAD))
    return count_outcomes(pairs)
