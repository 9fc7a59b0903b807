"""Partial rollouts, and how stale a trained sample may be with and without them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pydantic import Field

from rlcore.config.algorithm import RemaxAdvantage
from rlcore.config.base import Frozen

if TYPE_CHECKING:
    from rlcore.config.experiment import ExperimentConfig


class PartialRolloutConfig(Frozen):
    """No rollout batch waits for a long completion: a round draws at most so many tokens of each, and what has not
    ended is continued by the policy of the next batch, within training.max_staleness. Partial rollouts, Kimi k1.5,
    arXiv:2501.12599."""

    tokens_per_round: int = Field(ge=1)
    """Tokens of each completion that one round draws, at most rollout.max_completion_tokens."""
    in_flight: float = Field(1.5, ge=1)
    """Groups that are under way, or whole and waiting, per group of a rollout batch. Where rollout/rounds is above 1,
    too few of them end within a round: more in flight need fewer rounds. At most the rollout batches that a group has
    time for: training.max_staleness + 1, or training.max_staleness with one_ahead."""
    one_ahead: bool = False
    """Also sample each batch by the policy that the batch before it starts from, beside the training on that one where
    resources.rollout_workers are set. Takes 1 of training.max_staleness."""

    def groups(self, problems_per_step: int) -> int:
        """Groups in flight while a batch is sampled."""
        return math.ceil(round(self.in_flight * problems_per_step, 6))  # 1.1 * 10 is a little above 11


def check_staleness(config: ExperimentConfig) -> None:
    """
    Raises:
        ValueError: a bound on staleness that cannot be kept, or what does not go with stale samples.
    """
    stale, algorithm = config.training.max_staleness, config.algorithm
    if config.rollout.partial is not None:
        _check_partial(config, config.rollout.partial)
    elif stale > 1:
        raise ValueError(
            f"training.max_staleness is {stale} and rollout.partial null: only one batch is sampled ahead. Set "
            "max_staleness to 0 or 1, or rollout.partial.tokens_per_round."
        )
    if stale and algorithm.correction is None:
        raise ValueError(
            f"training.max_staleness is {stale} and algorithm.correction null: the policy that trains would take "
            "another policy's completions for its own. Set algorithm.correction.name to truncate or mask, or "
            "max_staleness to 0."
        )
    if stale and algorithm.dynamic_sampling is not None:
        raise ValueError(
            f"training.max_staleness is {stale} and algorithm.dynamic_sampling is set, which has a staleness of its "
            "own: the two do not go together. Set one of them to 0 or null."
        )


def _check_partial(config: ExperimentConfig, partial: PartialRolloutConfig) -> None:
    stale, budget = config.training.max_staleness, config.rollout.max_completion_tokens
    least, why = (2, ", one of them for sampling one batch ahead") if partial.one_ahead else (1, "")
    if stale < least:
        raise ValueError(
            f"rollout.partial is set and training.max_staleness {stale}: what is carried over is of an older policy. "
            f"Set max_staleness to {least} or more{why}, or rollout.partial to null."
        )
    batches = stale + 1 - partial.one_ahead
    if partial.in_flight > batches:
        raise ValueError(
            f"rollout.partial.in_flight is {partial.in_flight:g}: a group has {batches} rollout batches to be trained "
            f"in, with training.max_staleness {stale} and rollout.partial.one_ahead {str(partial.one_ahead).lower()}, "
            f"so more groups than fit into these would be too old. Set in_flight to {batches} or less, or raise "
            "max_staleness."
        )
    if partial.tokens_per_round > budget:
        raise ValueError(
            f"rollout.partial.tokens_per_round ({partial.tokens_per_round}) is above rollout.max_completion_tokens "
            f"({budget}), where a completion ends. Set it to at most {budget}."
        )
    if isinstance(config.algorithm.advantage, RemaxAdvantage):
        raise ValueError(
            "rollout.partial is set and algorithm.advantage.name is remax: its greedy baseline is of one policy, the "
            "completions of several. Set rollout.partial to null or take another estimator."
        )
