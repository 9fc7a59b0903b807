"""Reward ``math_verify``: as ``math``, with the math-verify library deciding whether the answers are equal."""

from __future__ import annotations

from rlcore.rewards.format import format_parts
from rlcore.rewards.grading import math_verify_equal
from rlcore.rewards.weighted import weighted_score
from rlcore.types import FinishReason, Problem, Score


def math_verify_reward(
    text: str, problem: Problem, num_tokens: int, finish_reason: FinishReason, *, format_weight: float
) -> Score:
    """(1 - format_weight) * accuracy + format_weight * format, both 0 or 1.

    The answer is the inside of the last box, as for ``math``: math-verify's own search, which takes an answer out
    of prose, is not used.
    """
    parts = format_parts(text)
    right = parts.answer is not None and math_verify_equal(parts.answer, problem.answer)
    return weighted_score(right, parts.well_formed, format_weight)
