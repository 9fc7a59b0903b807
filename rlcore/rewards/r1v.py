"""Reward ``r1v``, of R1-V (github.com/Deep-Agent/R1-V): a think block, then the answer between tags."""

from __future__ import annotations

from rlcore.rewards.format import answer_parts, stated_truth
from rlcore.rewards.grading import math_equal
from rlcore.rewards.weighted import weighted_score
from rlcore.types import FinishReason, Problem, Score


def r1v_reward(
    text: str, problem: Problem, num_tokens: int, finish_reason: FinishReason, *, format_weight: float
) -> Score:
    """(1 - format_weight) * accuracy + format_weight * format, both 0 or 1.

    Accuracy is MathRuler's verdict on the inside of the last answer tag. Without a closed answer tag it is 0:
    EasyR1 grades the whole completion then, which pays for a text that happens to be read as the truth.
    """
    parts = answer_parts(text)
    right = parts.answer is not None and math_equal(parts.answer, stated_truth(problem.answer))
    return weighted_score(right, parts.well_formed, format_weight)
