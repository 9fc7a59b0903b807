"""Reward ``math``: the boxed answer is right, and the completion is well formed."""

from __future__ import annotations

from rlcore.rewards.format import format_parts
from rlcore.rewards.grading import math_equal
from rlcore.rewards.weighted import weighted_score
from rlcore.types import FinishReason, Problem, Score


def math_reward(
    text: str, problem: Problem, num_tokens: int, finish_reason: FinishReason, *, format_weight: float
) -> Score:
    """(1 - format_weight) * accuracy + format_weight * format, both 0 or 1.

    Only the completion is read: a box in the question does not count. The last box is the answer, wherever
    it is.
    """
    parts = format_parts(text)
    right = parts.answer is not None and math_equal(parts.answer, problem.answer)
    return weighted_score(right, parts.well_formed, format_weight)
