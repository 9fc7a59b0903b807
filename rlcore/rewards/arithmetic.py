"""Rewards of arithmetic tasks: ``gsm8k`` and ``countdown``."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any, Literal

from rlcore.errors import RewardError
from rlcore.rewards.extract import last_answer, last_number, leading_number, whole_number
from rlcore.types import FinishReason, Problem, Score

MAX_EXPRESSION_CHARS = 256  # bounds the depth of the tree and the size of its values

_MARK = "####"
OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_ARITHMETIC = re.compile(r"[0-9+\-*/() ]+")


def gsm8k_reward(
    text: str,
    problem: Problem,
    num_tokens: int,
    finish_reason: FinishReason,
    *,
    method: Literal["strict", "flexible"],
) -> Score:
    """``gsm8k`` (arXiv:2110.14168): 1 if the final number equals the truth as an exact decimal (42 is 42.0), else 0.

    strict: the number right after the last "####". flexible: the last number of the text. Thousands separators, a
    dollar sign and a full stop at the end are ignored. The truth may be a number, or a solution that ends in "#### 42".

    Raises:
        RewardError: the problem's answer is not a number.
    """
    truth = _truth(problem)
    given = _after_mark(text) if method == "strict" else last_number(text)
    right = given is not None and given == truth
    answer = None if given is None else f"{given.normalize():f}"  # 42 for 42.0
    return Score(float(right), {"accuracy": float(right)}, graded=True, answer=answer)


def _truth(problem: Problem) -> Decimal:
    truth = _after_mark(problem.answer) if _MARK in problem.answer else whole_number(problem.answer)
    if truth is None:
        raise RewardError(
            f"the answer of problem {problem.problem_id} is {problem.answer[:200]!r}. The gsm8k reward needs a number, "
            "or a solution that ends in '#### 42'. Choose another reward.name, or fix the dataset."
        )
    return truth


def _after_mark(text: str) -> Decimal | None:
    _, mark, rest = text.rpartition(_MARK)
    return leading_number(rest.lstrip(" \t")) if mark else None


def countdown_reward(
    text: str, problem: Problem, num_tokens: int, finish_reason: FinishReason, *, format_score: float
) -> Score:
    """``countdown``, TinyZero's game (github.com/Jiayi-Pan/TinyZero): reach the target with the given numbers.

    1 if the last answer tag is right, ``format_score`` if it is wrong, 0 without a closed answer tag. The answer is an
    expression of whole numbers, + - * / and brackets, with an optional "= target" after it. It is right if it uses each
    of ``problem.extra["nums"]`` exactly once and its exact value is ``problem.extra["target"]`` (without that column
    ``problem.answer``). It is parsed, never run.

    Raises:
        RewardError: the problem has no usable numbers or target.
    """
    numbers, target = _task(problem)
    answer = last_answer(text)
    right = bool(answer) and _solves(answer or "", numbers, target)
    return Score(
        reward=1.0 if right else format_score if answer else 0.0,
        parts={"accuracy": float(right), "format": float(bool(answer))},
        graded=True,
        answer=answer or None,
    )


def _task(problem: Problem) -> tuple[list[Fraction], Fraction]:
    numbers, target = problem.extra.get("nums"), problem.extra.get("target", problem.answer)
    try:
        if not isinstance(numbers, list | tuple) or not numbers:
            raise ValueError("nums is not a list of numbers")
        return [_fraction(number) for number in numbers], _fraction(target)
    except ValueError as error:
        raise RewardError(
            f"problem {problem.problem_id} has nums={numbers!r} and target={target!r} ({error}). The countdown reward "
            "needs a column nums with a list of numbers, and a column target with a number, or the number as answer."
        ) from None


def _fraction(value: object) -> Fraction:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{value!r} is not a number")
    if isinstance(value, str):
        return Fraction(int(value))
    if value != value or value in (float("inf"), float("-inf")):
        raise ValueError(f"{value!r} is not finite")
    return Fraction(value)


def _solves(answer: str, numbers: list[Fraction], target: Fraction) -> bool:
    expression, equals, claim = answer.partition("=")
    tree = _parse(expression)
    if tree is None:
        return False
    if equals and ((claimed := _parse(claim)) is None or _value(claimed) != target):
        return False
    return sorted(_numbers(tree)) == sorted(numbers) and _value(tree) == target


def _parse(expression: str) -> ast.expr | None:
    """The tree of an arithmetic expression; None for anything else, or if it is too long."""
    expression = " ".join(expression.split())
    if len(expression) > MAX_EXPRESSION_CHARS or not _ARITHMETIC.fullmatch(expression):
        return None
    try:
        tree = ast.parse(expression, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):  # all four, for brackets nested too deep
        return None
    return tree if _is_arithmetic(tree) else None


def _is_arithmetic(node: ast.expr) -> bool:
    match node:
        case ast.Constant(value=int()):
            return True
        case ast.BinOp(left, symbol, right) if type(symbol) in OPERATORS:
            return _is_arithmetic(left) and _is_arithmetic(right)
    return False  # powers, signs, calls, floor division


def _numbers(node: ast.expr) -> Iterator[int]:
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, int):
            yield part.value


def _value(node: ast.expr) -> Fraction | None:
    """Exact value; None for a division by zero."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return Fraction(node.value)
    assert isinstance(node, ast.BinOp)
    left, right = _value(node.left), _value(node.right)
    if left is None or right is None or (right == 0 and isinstance(node.op, ast.Div)):
        return None
    value: Fraction = OPERATORS[type(node.op)](left, right)
    return value
