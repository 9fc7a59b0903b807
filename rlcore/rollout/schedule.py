"""Decides when groups are sampled and trained, only from counts of tokens and groups, so that neither timing nor
placement changes a run. Dynamic sampling, partial rollouts and prefetching are settings of this one schedule.

Staleness is counted in policy versions. The sampler gets a new version after each rollout batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlcore.config import ExperimentConfig
from rlcore.rollout.groups import Group
from rlcore.types import TrainingSample


@dataclass(frozen=True, slots=True)
class Schedule:
    size: int  # groups of a rollout batch
    prefetch: bool  # each batch is sampled one policy version before it is trained on
    tokens_per_round: int | None  # None: a round samples every completion to its end
    in_flight: int  # groups that are unfinished or waiting at the same time; one batch without a token budget
    needs_signal: bool  # dynamic sampling: groups without signal are replaced
    max_attempts: int  # how often new groups are added to fill one batch
    fills: bool  # groups without signal fill up a batch that is short; otherwise the run ends
    max_staleness: int  # policy versions between a group's oldest token and its training
    keeps_surplus: bool  # groups that do not fit into a batch wait for the next one
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
        """Whether any batch may have tokens of older policies. Log-probs are then computed when a batch trains, and
        algorithm.correction weights the difference."""
        return self.prefetch or self.tokens_per_round is not None

    def age(self, group: Group, step: int) -> int:
        """Policy versions from the group's oldest token to the update that follows ``step`` optimizer steps."""
        return -(-(step - group.policy_version) // self.steps_per_version)

    def usable(self, group: Group, step: int) -> bool:
        """Whether the group may be trained after ``step`` optimizer steps.

        A stale group trains with a correction, or with the log-probs of the policy that sampled it. A group without
        either comes from a run with other settings.
        """
        age = self.age(group, step)
        known = self.asynchronous or (group.state == "ready" and group.samples[0].old_logprobs is not None)
        return age <= self.max_staleness and (age == 0 or known)

    def missing(self, groups: int) -> int:
        """Number of new groups to begin, in addition to the ready and the waiting ones."""
        return self.size if self.tokens_per_round is None else max(0, self.in_flight - groups)

    def due(self, ready: Sequence[Group], waiting: Sequence[Group], step: int) -> int:
        """Number of waiting groups, from the front, that must train together with the ready ones after ``step``
        optimizer steps."""
        ages = [self.age(group, step) for group in (*ready, *waiting)]
        return max(0, min(self.size, due(ages, self.size, self.max_staleness)) - len(ready))

    def chosen(self, waiting: Sequence[Group], room: int) -> list[int]:
        """Indices of the groups to admit to training: the oldest that have ended, which includes all due ones.

        Without a token budget all groups have ended and are admitted, surplus included; with one, ``room`` groups are.
        """
        ended = [place for place, group in enumerate(waiting) if not group.unfinished]
        return ended if self.tokens_per_round is None else ended[:room]


def due(ages: Sequence[int], size: int, max_staleness: int) -> int:
    """Number of groups, from the front, that the next batch must train so that none exceeds ``max_staleness`` later.

    Each batch trains ``size`` groups. Group i (from 1) can wait for ``max_staleness - age`` batches after the next one,
    which train ``size`` groups each. Of the first i groups, those that do not fit into these batches are due now. If
    the result is at most ``size`` once, it stays so: the due groups leave from the front, so that i falls by their
    number while the room falls by ``size``, and new groups come at most at place ``in_flight``, which the config
    bounds.

    Args:
        ages: of the groups in stream order, never increasing.
    """
    return max([0, *(place - size * (max_staleness - age) for place, age in enumerate(ages, 1))])


def mini_batches(samples: Sequence[TrainingSample], parts: int) -> list[Sequence[TrainingSample]]:
    """The samples of each optimizer step, in order. Groups stay whole, because ``parts`` divides the problems of a
    batch."""
    size = len(samples) // parts
    return [samples[start : start + size] for start in range(0, len(samples), size)]
