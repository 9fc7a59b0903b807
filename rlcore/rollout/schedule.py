"""What is sampled when, and trained when: decided by counts of tokens and groups alone, so that neither time nor
placement changes a run. Dynamic sampling, partial rollouts and prefetching are settings of this one schedule.

Staleness counts policy versions: the sampler gets a new version after each rollout batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlcore.config import ExperimentConfig
from rlcore.rollout.groups import Group


@dataclass(frozen=True, slots=True)
class Schedule:
    size: int  # groups of a rollout batch
    prefetch: bool  # sample each batch one version ahead of the one that trains on it
    tokens_per_round: int | None  # None: a round samples every completion to its end
    in_flight: int  # groups that are sampled, or wait, at the same time; one batch without a token budget
    needs_signal: bool  # dynamic sampling: groups without signal are replaced
    max_attempts: int  # how often new groups are added to fill one batch
    fills: bool  # groups without signal fill a batch that is still short; otherwise the run ends
    max_staleness: int  # policy versions between a group's oldest token and its training
    keeps_surplus: bool  # groups that a batch has no room for wait for the next one
    steps_per_version: int  # optimizer steps from one policy version of the sampler to the next

    @classmethod
    def of(cls, config: ExperimentConfig) -> Schedule:
        training, partial, dynamic = config.training, config.rollout.partial, config.algorithm.dynamic_sampling
        size, surplus = training.problems_per_batch, 0 if dynamic is None else dynamic.surplus_staleness
        return cls(
            size=size,
            prefetch=config.prefetch,
            tokens_per_round=None if partial is None else partial.tokens_per_round,
            in_flight=size if partial is None else partial.groups(size),
            needs_signal=dynamic is not None,
            max_attempts=1 if dynamic is None else dynamic.max_rounds,
            fills=dynamic is None or dynamic.if_short == "fill",
            max_staleness=training.max_staleness or surplus,
            keeps_surplus=(dynamic is None or surplus > 0) and (training.max_staleness or surplus) > config.prefetch,
            steps_per_version=training.steps_per_batch,
        )

    @property
    def asynchronous(self) -> bool:
        """Whether every batch may hold tokens of older policies. Their log-probs are then taken when they train, and
        algorithm.correction weighs the difference."""
        return self.prefetch or self.tokens_per_round is not None

    def age(self, group: Group, step: int) -> int:
        """Policy versions from the group's oldest token to the update that follows ``step`` optimizer steps."""
        return -(-(step - group.policy_version) // self.steps_per_version)

    def usable(self, group: Group, step: int) -> bool:
        """Whether the group may be trained after ``step`` optimizer steps.

        A stale group is trained with a correction, or with the log-probs of the policy that sampled it. A group that
        has neither comes from a run with other settings.
        """
        age = self.age(group, step)
        known = self.asynchronous or (group.state == "ready" and group.samples[0].old_logprobs is not None)
        return age <= self.max_staleness and (age == 0 or known)

    def missing(self, groups: int) -> int:
        """How many new groups to begin, in addition to those that are ready for the batch or waiting."""
        return self.size if self.tokens_per_round is None else max(0, self.in_flight - groups)

    def due(self, ready: Sequence[Group], waiting: Sequence[Group], step: int) -> int:
        """How many of the first waiting groups have to be trained, with the ready ones, after ``step`` optimizer
        steps."""
        ages = [self.age(group, step) for group in (*ready, *waiting)]
        return max(0, min(self.size, due(ages, self.size, self.max_staleness)) - len(ready))

    def chosen(self, waiting: Sequence[Group], room: int) -> list[int]:
        """The places of the groups that are admitted to training: the oldest that have ended, due ones among them.

        Without a token budget all groups have ended, and the surplus is admitted too. With one, ``room`` groups are.
        """
        ended = [place for place, group in enumerate(waiting) if not group.unfinished]
        return ended if self.tokens_per_round is None else ended[:room]


def due(ages: Sequence[int], size: int, max_staleness: int) -> int:
    """How many of the first groups the coming batch has to train, so that no group exceeds ``max_staleness`` later.

    A batch trains ``size`` groups. The group at place i, from 1, can wait for ``max_staleness - age`` batches after
    this one. They train ``size`` groups each; as many of the first i as do not fit into them are due now. If this is at
    most ``size`` for one batch, it is for the next: the due groups leave from the front, so a place falls by their
    number while its room falls by ``size``; and new groups are at most at place ``in_flight``, which the config bounds.

    Args:
        ages: of the groups in the order of the stream, never rising.
    """
    return max([0, *(place - size * (max_staleness - age) for place, age in enumerate(ages, 1))])
