"""Reward ``geoqa``, of R1-V's geometry task: a value in the answer tag, or the letter of a choice."""

from __future__ import annotations

from rlcore.errors import RewardError
from rlcore.rewards.extract import choice_letter
from rlcore.rewards.format import answer_parts, stated_truth, weighted_score
from rlcore.rewards.grading import math_equal
from rlcore.types import FinishReason, Problem, Score


def geoqa_reward(
    text: str, problem: Problem, num_tokens: int, finish_reason: FinishReason, *, format_weight: float
) -> Score:
    """(1 - format_weight) * accuracy + format_weight * format, both 0 or 1; format as ``r1v``.

    MathRuler compares the inside of the last answer tag with the truth ("145", or "<answer> 145° </answer>").
    Where the problem has a column ``choices`` (a list of values), a letter stands for its choice on either side:
    "C" and the third value are equal. Two letters are compared as letters.

    Raises:
        RewardError: ``choices`` is there, and is no list of values.
    """
    choices = _choices(problem)
    parts = answer_parts(text)
    right = parts.answer is not None and _equal(parts.answer, stated_truth(problem.answer), choices)
    return weighted_score(right, parts.well_formed, format_weight)


def _equal(answer: str, truth: str, choices: list[str]) -> bool:
    given, wanted = _index(answer, choices), _index(truth, choices)
    if given is not None and wanted is not None:
        return given == wanted
    return math_equal(
        _plain(answer if given is None else choices[given]), _plain(truth if wanted is None else choices[wanted])
    )


def _index(text: str, choices: list[str]) -> int | None:
    """Which choice a text names by its letter."""
    letter = choice_letter(text)
    index = None if letter is None else ord(letter) - ord("A")
    return index if index is not None and index < len(choices) else None


def _plain(value: str) -> str:
    return value.replace("°", "").strip()  # MathRuler knows \circ only


def _choices(problem: Problem) -> list[str]:
    choices = problem.extra.get("choices")
    if choices is None:
        return []
    if not isinstance(choices, list | tuple) or not all(isinstance(choice, str | int | float) for choice in choices):
        raise RewardError(
            f"the choices of problem {problem.problem_id} are {choices!r}. The geoqa reward takes a list of texts or "
            "numbers. Rename or mend the column choices."
        )
    return [str(choice) for choice in choices]
