"""Reward ``gsm8k`` (arXiv:2110.14168): the final number is the truth's, as exact decimals: 42 is 42.0."""

from __future__ import annotations

from decimal import Decimal
from typing import Literal

from rlcore.errors import RewardError
from rlcore.rewards.extract import last_number, leading_number, whole_number
from rlcore.types import FinishReason, Problem, Score

_MARK = "####"


def gsm8k_reward(
    text: str,
    problem: Problem,
    num_tokens: int,
    finish_reason: FinishReason,
    *,
    method: Literal["strict", "flexible"],
) -> Score:
    """1 if the number is right, else 0.

    strict: the number right behind the last "####". flexible: the last number of the text. Thousands commas, a
    dollar sign and a full stop at the end do not count. The truth may be the number, or a solution that ends in
    "#### 42".

    Raises:
        RewardError: the problem's answer is no number.
    """
    truth = _truth(problem)
    given = _after_mark(text) if method == "strict" else last_number(text)
    right = given is not None and given == truth
    return Score(float(right), {"accuracy": float(right)}, graded=True)


def _truth(problem: Problem) -> Decimal:
    truth = _after_mark(problem.answer) if _MARK in problem.answer else whole_number(problem.answer)
    if truth is None:
        raise RewardError(
            f"the answer of problem {problem.problem_id} is {problem.answer[:200]!r}. The gsm8k reward needs a number, "
            "or a solution that ends in '#### 42'. Choose another reward.name, or mend the dataset."
        )
    return truth


def _after_mark(text: str) -> Decimal | None:
    _, mark, rest = text.rpartition(_MARK)
    return leading_number(rest.lstrip(" \t")) if mark else None
