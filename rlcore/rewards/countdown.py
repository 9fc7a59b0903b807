"""Reward ``countdown`` (TinyZero's game, github.com/Jiayi-Pan/TinyZero): reach the target with the given numbers."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fractions import Fraction

from rlcore.errors import RewardError
from rlcore.rewards.format import last_answer
from rlcore.types import FinishReason, Problem, Score

MAX_CHARS = 256  # of an expression; bounds the depth of its tree and the size of its values

_ARITHMETIC = re.compile(r"[0-9+\-*/() ]+")


def countdown_reward(
    text: str, problem: Problem, num_tokens: int, finish_reason: FinishReason, *, format_score: float
) -> Score:
    """1 if right; ``format_score`` if the answer tag holds something else; 0 without a closed answer tag.

    The last answer tag holds an expression of whole numbers, + - * / and brackets, and perhaps "= target" behind
    it. It is right if it uses each of ``problem.extra["nums"]`` exactly once and its value, in exact fractions, is
    ``problem.extra["target"]`` (without that column: ``problem.answer``). It is parsed, never run.

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
    )


def _task(problem: Problem) -> tuple[list[Fraction], Fraction]:
    numbers, target = problem.extra.get("nums"), problem.extra.get("target", problem.answer)
    try:
        if not isinstance(numbers, list | tuple) or not numbers:
            raise ValueError("nums is no list of numbers")
        return [_fraction(number) for number in numbers], _fraction(target)
    except ValueError as error:
        raise RewardError(
            f"problem {problem.problem_id} has nums={numbers!r} and target={target!r} ({error}). The countdown reward "
            "needs a column nums with a list of numbers, and a column target with a number, or the number as answer."
        ) from None


def _fraction(value: object) -> Fraction:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{value!r} is no number")
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
    """The tree of an arithmetic expression; None where it is anything else, or long."""
    expression = " ".join(expression.split())
    if len(expression) > MAX_CHARS or not _ARITHMETIC.fullmatch(expression):
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
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div(), right=right):
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
    if left is None or right is None:
        return None
    match node.op:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
    return left / right if right else None
