"""Reward ``multiple_choice``: the letter of the right choice, A to J."""

from __future__ import annotations

from rlcore.errors import RewardError
from rlcore.rewards.dapo import answer_line
from rlcore.rewards.extract import MAX_CHARS, choice_letter
from rlcore.rewards.format import (
    after_think,
    answer_parts,
    format_parts,
    last_answer,
    last_boxed,
    stated_truth,
    weighted_score,
)
from rlcore.types import FinishReason, Problem, Score


def multiple_choice_reward(
    text: str, problem: Problem, num_tokens: int, finish_reason: FinishReason, *, format_weight: float
) -> Score:
    """(1 - format_weight) * accuracy + format_weight * format, both 0 or 1.

    The letter is read from the last box; if that names none, from the last answer tag; then from the last
    "Answer:" line. What follows the think block goes before what is in it. Well formed is what is well formed for
    ``math`` (think block, then a box) or for ``r1v`` (think block, then answer tags, and nothing else).

    Raises:
        RewardError: the problem's answer is no letter.
    """
    truth = choice_letter(stated_truth(problem.answer))
    if truth is None:
        raise RewardError(
            f"the answer of problem {problem.problem_id} is {problem.answer[:200]!r}. The multiple_choice reward needs "
            "a letter from A to J. Choose another reward.name, or mend the dataset."
        )
    given = _stated_letter(after_think(text)) or _stated_letter(text)
    well_formed = format_parts(text).well_formed or answer_parts(text).well_formed
    return weighted_score(given == truth, well_formed, format_weight)


def _stated_letter(text: str) -> str | None:
    for answer in (last_boxed(text), last_answer(text), answer_line(text, MAX_CHARS)):
        if answer is not None and (letter := choice_letter(answer)):
            return letter
    return None
