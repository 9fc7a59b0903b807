"""Rewards that add accuracy and format, both 0 or 1: (1 - format_weight) * accuracy + format_weight * format.

``math``, ``math_verify``, ``multiple_choice`` and ``choice_or_value`` expect a think block and a boxed answer; ``r1v``,
``clevr_count`` and ``geoqa`` a think block and an answer block. These three follow R1-V (github.com/Deep-Agent/R1-V).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import partial
from typing import Literal

from rlcore.errors import RewardError
from rlcore.rewards.dapo import answer_line
from rlcore.rewards.extract import (
    MAX_CHOICE_CHARS,
    after_think,
    answer_parts,
    choice_letter,
    format_parts,
    last_answer,
    last_boxed,
    only_number,
    stated_truth,
    whole_number,
)
from rlcore.rewards.grading import math_equal, math_verify_equal
from rlcore.types import FinishReason, Problem, Score

_Judged = tuple[bool, bool, str | None]
"""Whether the answer is right, whether the completion is well formed, and the answer."""


def _boxed(text: str, problem: Problem, *, equal: Callable[[str, str], bool]) -> _Judged:
    """Compares the last box of the completion with the truth. A box in the question does not count, and math-verify
    does not search for an answer in prose."""
    parts = format_parts(text)
    right = parts.answer is not None and equal(parts.answer, problem.answer)
    return right, parts.well_formed, parts.answer


def _r1v(text: str, problem: Problem) -> _Judged:
    """MathRuler compares the last answer tag with the truth.

    Accuracy is 0 without a closed answer tag. EasyR1 grades the whole completion in that case, which rewards texts that
    happen to parse as the truth.
    """
    parts = answer_parts(text)
    right = parts.answer is not None and math_equal(parts.answer, stated_truth(problem.answer))
    return right, parts.well_formed, parts.answer


def _clevr_count(text: str, problem: Problem) -> _Judged:
    """The only number in the last answer tag must be the right integer. Words around it are ignored ("5 cubes").

    The truth may be "5" or "<answer> 5 </answer>".

    Raises:
        RewardError: the problem's answer does not hold exactly one integer.
    """
    truth = _count(stated_truth(problem.answer))
    if truth is None:
        raise RewardError(
            f"the answer of problem {problem.problem_id} is {problem.answer[:200]!r}. The clevr_count reward needs one "
            "integer. Choose another reward.name, or fix the dataset."
        )
    parts = answer_parts(text)
    given = None if parts.answer is None else _count(parts.answer)
    return given == truth, parts.well_formed, parts.answer if given is None else f"{given:f}"


def _count(text: str) -> Decimal | None:
    number = only_number(text)
    return number if number is not None and number == number.to_integral_value() else None


def _geoqa(text: str, problem: Problem) -> _Judged:
    """MathRuler compares the last answer tag with the truth ("145", or "<answer> 145° </answer>").

    If the problem has a column ``choices`` (a list of values), a letter stands for its choice on either side: "C"
    equals the third value. Two letters are compared as letters.

    Raises:
        RewardError: ``choices`` is not a list of values.
    """
    choices = _choices(problem)
    parts = answer_parts(text)
    right = parts.answer is not None and _equal(parts.answer, stated_truth(problem.answer), choices)
    return right, parts.well_formed, parts.answer


def _choices(problem: Problem) -> list[str]:
    choices = problem.extra.get("choices")
    if choices is None:
        return []
    if not isinstance(choices, list | tuple) or not all(isinstance(choice, str | int | float) for choice in choices):
        raise RewardError(
            f"the choices of problem {problem.problem_id} are {choices!r}. The geoqa and choice_or_value rewards "
            "take a list of texts or numbers. Rename or fix the column choices."
        )
    return [str(choice) for choice in choices]


def _equal(answer: str, truth: str, choices: list[str]) -> bool:
    given, wanted = _choice_index(answer, choices), _choice_index(truth, choices)
    if given is not None and wanted is not None:
        return given == wanted
    values = (answer if given is None else choices[given], truth if wanted is None else choices[wanted])
    left, right = (value.replace("°", "").strip() for value in values)  # MathRuler knows \circ only
    return math_equal(left, right)


def _choice_index(text: str, choices: list[str]) -> int | None:
    """The index of the choice that a text names by its letter."""
    letter = choice_letter(text)
    index = None if letter is None else ord(letter) - ord("A")
    return index if index is not None and index < len(choices) else None


def _multiple_choice(text: str, problem: Problem) -> _Judged:
    """Compares letters, A to J. Well formed is what is well formed for ``math`` or for ``r1v``.

    The letter is taken from the last box; if that names none, from the last answer tag; then from the last "Answer:"
    line. The text after the think block is searched first, then the whole text.

    Raises:
        RewardError: the problem's answer is not a letter.
    """
    truth = choice_letter(stated_truth(problem.answer))
    if truth is None:
        raise RewardError(
            f"the answer of problem {problem.problem_id} is {problem.answer[:200]!r}. The multiple_choice reward needs "
            "a letter from A to J. Choose another reward.name, or fix the dataset."
        )
    given = _stated_letter(after_think(text)) or _stated_letter(text)
    well_formed = format_parts(text).well_formed or answer_parts(text).well_formed
    return given == truth, well_formed, given


def _stated_letter(text: str) -> str | None:
    for answer in (last_boxed(text), last_answer(text), answer_line(text, MAX_CHOICE_CHARS)):
        if answer is not None and (letter := choice_letter(answer)):
            return letter
    return None


def _choice_or_value(text: str, problem: Problem) -> _Judged:
    """Compares the last box, else the last answer tag, else the last "Answer:" line. The text after the think block is
    searched first, then the whole text. Well formed as ``multiple_choice``.

    With a column ``choices``, the truth is a letter, and the answer a letter or the text of exactly one choice. Without
    it two letters are compared as letters, texts without regard to case, and anything else by MathRuler. A column
    ``precision`` gives the decimals to which both numbers are rounded first, a column ``answers`` more right answers.

    Raises:
        RewardError: ``choices`` is not a list of values, or the truth names none of them.
    """
    well_formed = format_parts(text).well_formed or answer_parts(text).well_formed
    given = _stated_answer(after_think(text)) or _stated_answer(text)
    choices = _choices(problem)
    if choices:
        truth = _choice_index(problem.answer, choices)
        if truth is None:
            raise RewardError(
                f"the answer of problem {problem.problem_id} is {problem.answer[:200]!r}, which is no letter of its "
                f"{len(choices)} choices. Set data.layout.choice_given_as to what the answers are, or fix the dataset."
            )
        meant = None if given is None else _meant_choice(given, choices)
        return meant == truth, well_formed, given if meant is None else chr(ord("A") + meant)
    also = problem.extra.get("answers")
    truths = [problem.answer, *(str(answer) for answer in also)] if isinstance(also, list | tuple) else [problem.answer]
    decimals = problem.extra.get("precision")
    right = given is not None and any(_equal_value(given, truth, decimals) for truth in truths)
    return right, well_formed, given


def _stated_answer(text: str) -> str | None:
    answers = (last_boxed(text), last_answer(text), answer_line(text, MAX_CHOICE_CHARS))
    return next((answer for answer in answers if answer), None)


def _meant_choice(given: str, choices: list[str]) -> int | None:
    """The index of the choice that an answer names by its letter, or else by its text if only one choice has it."""
    index = _choice_index(given, choices)
    if index is not None:
        return index
    equal = [number for number, choice in enumerate(choices) if _equal_value(given, choice, None)]
    return equal[0] if len(equal) == 1 else None


def _equal_value(given: str, truth: str, decimals: object) -> bool:
    given, truth = given.strip(), truth.strip()
    if (wanted := choice_letter(truth)) is not None and (letter := choice_letter(given)) is not None:
        return letter == wanted
    if isinstance(decimals, int | float):
        left, right = whole_number(given), whole_number(truth)
        if left is not None and right is not None:
            return round(left, int(decimals)) == round(right, int(decimals))
    return given.casefold() == truth.casefold() or math_equal(given.replace("°", ""), truth.replace("°", ""))


_JUDGES: Mapping[str, Callable[[str, Problem], _Judged]] = {
    "math": partial(_boxed, equal=math_equal),
    "math_verify": partial(_boxed, equal=math_verify_equal),
    "r1v": _r1v,
    "clevr_count": _clevr_count,
    "geoqa": _geoqa,
    "multiple_choice": _multiple_choice,
    "choice_or_value": _choice_or_value,
}
"""By reward.name."""


def is_well_formed(text: str, name: Literal["math", "r1v"]) -> bool:
    """Whether a completion has the format of this reward."""
    return (format_parts(text) if name == "math" else answer_parts(text)).well_formed


def formatted_reward(
    text: str, problem: Problem, num_tokens: int, finish_reason: FinishReason, *, name: str, format_weight: float
) -> Score:
    """
    Raises:
        RewardError: the problem's answer or choices are not what the reward called ``name`` needs.
    """
    right, well_formed, answer = _JUDGES[name](text, problem)
    parts = {"accuracy": float(right), "format": float(well_formed)}
    reward = (1 - format_weight) * parts["accuracy"] + format_weight * parts["format"]
    return Score(reward, parts, graded=True, answer=answer or None)
