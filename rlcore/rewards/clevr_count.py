"""Reward ``clevr_count``, of R1-V's counting task: the number in the answer tag is the count."""

from __future__ import annotations

from decimal import Decimal

from rlcore.errors import RewardError
from rlcore.rewards.extract import only_number
from rlcore.rewards.format import answer_parts, stated_truth, weighted_score
from rlcore.types import FinishReason, Problem, Score


def clevr_count_reward(
    text: str, problem: Problem, num_tokens: int, finish_reason: FinishReason, *, format_weight: float
) -> Score:
    """(1 - format_weight) * accuracy + format_weight * format, both 0 or 1; format as ``r1v``.

    The last answer tag has to hold one number, an integer; words around it do not count ("5 cubes"), and a second
    number makes it no answer. The truth may be "5" or "<answer> 5 </answer>".

    Raises:
        RewardError: the problem's answer holds no integer, or several.
    """
    truth = _count(stated_truth(problem.answer))
    if truth is None:
        raise RewardError(
            f"the answer of problem {problem.problem_id} is {problem.answer[:200]!r}. The clevr_count reward needs one "
            "integer. Choose another reward.name, or mend the dataset."
        )
    parts = answer_parts(text)
    given = None if parts.answer is None else _count(parts.answer)
    return weighted_score(given == truth, parts.well_formed, format_weight)


def _count(text: str) -> Decimal | None:
    number = only_number(text)
    return number if number is not None and number == number.to_integral_value() else None
