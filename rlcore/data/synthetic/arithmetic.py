"""Synthetic problems of text: sums, which a tiny policy can learn in place of gsm8k, and the countdown game.

A hash of its content decides the split of a problem, so that none appears in two splits, whatever the seeds are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from rlcore.config import CountdownConfig
from rlcore.data.synthetic import Split, split_of
from rlcore.errors import DataError

_TERMS = (3, 4)  # fewest and most terms of a sum; a policy would memorise the few sums of two terms
_LARGEST_TERM = 12
_MAX_TRIES = 10_000  # one in four belongs to the split; many more where few expressions reach a target

_APPLY: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,
}


@dataclass(frozen=True, slots=True)
class ArithmeticProblem:
    problem_id: str
    question: str
    answer: str
    numbers: tuple[int, ...]
    target: int  # of countdown; the sum of a sum
    solution: str  # an expression over all numbers that equals ``target``
    reasoning: str  # the calculations in order, for the supervised warm start


def generate_sum(split: Split, index: int, seed: int) -> ArithmeticProblem:
    """Sum ``index`` of a split, ``7+12+4=``; the same arguments always give the same one."""
    random = Random(f"sums/{seed}/{split}/{index}")
    while True:
        numbers = tuple(random.randint(1, _LARGEST_TERM) for _ in range(random.randint(*_TERMS)))
        terms = "+".join(map(str, numbers))
        if split_of(terms.encode()) == split:
            break
    steps, total = [], numbers[0]
    for number in numbers[1:]:
        steps.append(f"{total}+{number}={total + number}")
        total += number
    return ArithmeticProblem(
        problem_id=f"sums-{split}-{seed}-{index}",
        question=f"{terms}=",
        answer=str(total),
        numbers=numbers,
        target=total,
        solution=terms,
        reasoning=",".join(steps),
    )


def generate_countdown(split: Split, index: int, seed: int, config: CountdownConfig) -> ArithmeticProblem:
    """Game ``index`` of a split; the same arguments always give the same one.

    Every game can be solved: the target is the value of a random expression over all numbers, whose intermediate
    results are all whole numbers above 0. Numbers in another order are the same game and belong to the same split.

    Raises:
        DataError: ``config`` allows no game, or almost none.
    """
    _check(config)
    random = Random(f"countdown/{seed}/{split}/{index}")
    for _ in range(_MAX_TRIES):
        numbers = [random.randint(1, config.max_number) for _ in range(random.randint(*config.numbers))]
        value = _combine(random, numbers, config.operations)
        content = f"{sorted(numbers)} {value.total}".encode()
        if value.total <= config.max_target and split_of(content) == split:
            break
    else:
        raise DataError(
            f"no countdown game of the split {split} in {_MAX_TRIES} tries with {config!r}: almost no game exists. "
            "Raise data.countdown.max_target or data.countdown.max_number."
        )
    random.shuffle(numbers)
    return ArithmeticProblem(
        problem_id=f"countdown-{split}-{seed}-{index}",
        question=f"Make {value.total} from {', '.join(map(str, numbers))}.",
        answer=str(value.total),
        numbers=tuple(numbers),
        target=value.total,
        solution=value.text,
        reasoning=",".join(value.steps),
    )


@dataclass(frozen=True, slots=True)
class _Value:
    """An expression and its calculation. ``precedence``: 0 a sum, 1 a product, 2 a number."""

    total: int
    text: str
    precedence: int
    steps: tuple[str, ...]

    def within(self, precedence: int) -> str:
        return self.text if self.precedence >= precedence else f"({self.text})"


def _combine(random: Random, numbers: Sequence[int], operations: Sequence[str]) -> _Value:
    """Join two values at random until one is left."""
    values = [_Value(number, str(number), 2, ()) for number in numbers]
    while len(values) > 1:
        left, right = (values.pop(random.randrange(len(values))) for _ in range(2))
        values.append(_join(random, left, right, operations))
    return values[0]


def _join(random: Random, left: _Value, right: _Value, operations: Sequence[str]) -> _Value:
    left, right = sorted((left, right), key=lambda value: -value.total)  # one order, one way to write it
    whole = {"+": True, "*": True, "-": left.total > right.total, "/": left.total % right.total == 0}
    symbol = random.choice([symbol for symbol in operations if whole[symbol]])
    total = _APPLY[symbol](left.total, right.total)
    precedence = 0 if symbol in "+-" else 1
    # a - (b + c) and a / (b * c) need brackets; a + (b - c) and a * (b / c) get them too
    text = f"{left.within(precedence)}{symbol}{right.within(precedence + 1)}"
    step = f"{left.total}{symbol}{right.total}={total}"
    return _Value(total, text, precedence, (*left.steps, *right.steps, step))


def _check(config: CountdownConfig) -> None:
    fewest, most = config.numbers
    if not 2 <= fewest <= most:
        raise DataError(
            f"data.countdown.numbers is [{fewest}, {most}]. Give the fewest and the most numbers of a game, in this "
            "order and at least 2, such as [3, 4]."
        )
