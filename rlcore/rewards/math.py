"""Reward ``math``: the boxed answer is right, and the completion is well formed."""

from __future__ import annotations

from functools import partial

from rlcore.config import RewardConfig
from rlcore.ports import RewardFn
from rlcore.rewards.format import format_parts
from rlcore.rewards.grading import math_equal
from rlcore.types import FinishReason, Problem, Score


def make_math_reward(config: RewardConfig) -> RewardFn:
    """The reward with its weight bound; picklable, so that a grading process can be sent it."""
    return partial(math_reward, format_weight=config.format_weight)


def math_reward(
    text: str, problem: Problem, num_tokens: int, finish_reason: FinishReason, *, format_weight: float
) -> Score:
    """(1 - format_weight) * accuracy + format_weight * format, both 0 or 1.

    Only the completion is read: a box in the question does not count. The last box is the answer, wherever
    it is.
    """
    parts = format_parts(text)
    accuracy = float(parts.answer is not None and math_equal(parts.answer, problem.answer))
    well_formed = float(parts.well_formed)
    return Score(
        reward=(1 - format_weight) * accuracy + format_weight * well_formed,
        parts={"accuracy": accuracy, "format": well_formed},
        graded=True,
    )
