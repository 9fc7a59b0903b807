"""Adds the log-probs of the old policy, the reference and the teacher to groups before they train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlcore.config import ExperimentConfig
from rlcore.distributed.group import WorkerGroup
from rlcore.process import Clock
from rlcore.rollout.groups import Group
from rlcore.rollout.schedule import Schedule, mini_batches
from rlcore.types import TrainingSample


def with_policy_logprobs(
    config: ExperimentConfig, workers: WorkerGroup, groups: Sequence[Group], clock: Clock, parts: int
) -> list[Group]:
    """Add the old, reference and teacher log-probs that the config needs. Samples that already have some keep them,
    because they come from the policy that sampled.

    Args:
        parts: optimizer steps that the groups are split into.
    """
    samples: Sequence[TrainingSample] = [sample for group in groups for sample in group.samples]
    with clock("old_logprobs"):
        first = first_update_with_old_logprobs(config)
        updates = enumerate(mini_batches(samples, parts))
        samples = [s for index, update in updates for s in _with_old_logprobs(workers, update, needed=index >= first)]
    with clock("ref_logprobs"):
        missing = [sample for sample in samples if sample.ref_logprobs is None]
        if config.algorithm.kl.coefficient > 0 and missing:
            reference = iter(workers.reference_logprobs(missing))
            samples = [
                s if s.ref_logprobs is not None else replace(s, ref_logprobs=next(reference).logprobs) for s in samples
            ]
    if config.algorithm.teacher is not None:
        with clock("teacher_logprobs"):
            samples = [s for update in mini_batches(samples, parts) for s in _with_teacher_logprobs(workers, update)]
    rest = iter(samples)
    return [replace(group, samples=tuple(next(rest) for _ in group.samples)) for group in groups]


def _with_old_logprobs(
    workers: WorkerGroup, update: Sequence[TrainingSample], *, needed: bool
) -> Sequence[TrainingSample]:
    """The samples of one update with old log-probs, where they are needed or some samples have them already. Samples
    that have some pass through the model too, so that the microbatches are those of the update and its ratio starts at
    exactly 1."""
    have = [sample.old_logprobs is not None for sample in update]
    if all(have) or not (needed or any(have)):
        return update
    return [
        s
        if s.old_logprobs is not None
        else replace(
            s,
            old_logprobs=scored.logprobs,
            truncation_logprobs=scored.truncation_logprobs,
            entropies=scored.entropies,
        )
        for s, scored in zip(update, workers.logprobs(update), strict=True)
    ]


def _with_teacher_logprobs(workers: WorkerGroup, update: Sequence[TrainingSample]) -> list[TrainingSample]:
    """The samples of one update with the teacher's log-probs. The microbatches are those of the old log-probs, so a
    teacher with the policy's weights has exactly its log-probs."""
    scored = workers.teacher_logprobs(update)
    return [replace(sample, teacher_logprobs=s.logprobs) for sample, s in zip(update, scored, strict=True)]


def first_update_with_old_logprobs(config: ExperimentConfig) -> int:
    """The first of a batch's updates, from 0, whose old log-probs are computed before the updates begin.

    Update 0 starts from the old policy, so the log-probs of its own forward pass are the old ones. It needs them in
    advance only if something reads them earlier, or again in a later epoch.
    """
    schedule, algorithm = Schedule.of(config), config.algorithm
    surplus = schedule.needs_signal and schedule.keeps_surplus and not schedule.asynchronous
    kl_in_reward = algorithm.kl.place == "reward" and algorithm.kl.coefficient > 0
    earlier = surplus or kl_in_reward or algorithm.teacher is not None or algorithm.entropy_mask is not None
    return int(not (earlier or config.training.ppo_epochs > 1 or algorithm.recompute_old_logprobs))
