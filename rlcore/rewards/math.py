"""Rewards ``math``, ``math_verify`` and ``r1v``: the answer is right, and the completion is well formed."""

from __future__ import annotations

from rlcore.rewards.format import answer_parts, format_parts, stated_truth, weighted_score
from rlcore.rewards.grading import math_equal, math_verify_equal
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


def r1v_reward(
    text: str, problem: Problem, num_tokens: int, finish_reason: FinishReason, *, format_weight: float
) -> Score:
    """Of R1-V (github.com/Deep-Agent/R1-V): a think block, then the answer between tags.

    (1 - format_weight) * accuracy + format_weight * format, both 0 or 1.

    Accuracy is MathRuler's verdict on the inside of the last answer tag. Without a closed answer tag it is 0:
    EasyR1 grades the whole completion then, which pays for a text that happens to be read as the truth.
    """
    parts = answer_parts(text)
    right = parts.answer is not None and math_equal(parts.answer, stated_truth(problem.answer))
    return weighted_score(right, parts.well_formed, format_weight)
