"""Tests whether an answer equals the reference answer mathematically. The only importer of mathruler and math-verify.

A model or a dataset wrote both answers, so they must never be evaluated as Python. MathRuler calls sympy's parser,
which does evaluate; it gets ``parse_expression`` instead. math-verify has its own grammar, but lets sympy make numbers
from text. Therefore sympy's evaluator is also replaced while either of them compares.

A comparison may take forever, or all memory: call this in a process that can be killed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache

import mathruler.grader
import sympy.physics.units  # noqa: F401 - sympy's simplify imports it on first use, and it makes its units from text
from math_verify import LatexExtractionConfig, parse, verify
from mathruler.grader import grade_answer
from sympy.parsing import sympy_parser

from rlcore.rewards.expressions import parse_expression, read_code

MAX_ANSWER_CHARS = 2000  # far above any reference answer; mathruler's time grows faster than the length
MAX_VERIFIED_CHARS = 500  # the same for math-verify, whose parser is slower

# math-verify searches for a box only: it is given nothing else
_BOX_ONLY = (LatexExtractionConfig(try_extract_without_anchor=False, boxed_match_priority=0),)

# math-verify warns in each process that its timeouts are off, which is on purpose (see math_verify_equal). pylatexenc,
# which mathruler uses, warns about each malformed command, and a policy can write thousands.
for _name in ("math_verify.parser", "math_verify.grader", "pylatexenc"):
    logging.getLogger(_name).setLevel(logging.ERROR)

mathruler.grader._sympy_parse = parse_expression

_comparing: ContextVar[bool] = ContextVar("_comparing", default=False)
_evaluate = sympy_parser.eval_expr  # the only place where sympy evaluates text, sympify(str) included


def _evaluate_outside(code: object, local_dict: dict[str, object], global_dict: dict[str, object]) -> object:
    return read_code(code) if _comparing.get() else _evaluate(code, local_dict, global_dict)


sympy_parser.eval_expr = _evaluate_outside  # a user's own reward may still use sympy's parser


@contextmanager
def _nothing_is_evaluated() -> Iterator[None]:
    token = _comparing.set(True)
    try:
        yield
    finally:
        _comparing.reset(token)


@lru_cache(maxsize=8192)  # the completions of a group give few different answers
def math_equal(candidate: str, truth: str) -> bool:
    """Compare two answers in LaTeX or plain text as mathruler does.

    Units, percent and dollar signs, degrees and thousands separators are ignored. Two fractions must both be reduced,
    an integer must be written as an integer; otherwise sympy decides whether the difference is 0. A blank candidate is
    never equal, one longer than ``MAX_ANSWER_CHARS`` only to the same text. Text that ``parse_expression`` refuses is
    unequal.
    """
    candidate, truth = candidate.strip(), truth.strip()
    if not candidate or len(candidate) > MAX_ANSWER_CHARS:
        return False
    if candidate == truth:
        return True
    if len(truth) > MAX_ANSWER_CHARS or _normalizes_to_nothing(truth):
        return False
    with _nothing_is_evaluated():
        return bool(grade_answer(candidate, truth))


@lru_cache(maxsize=1024)
def _normalizes_to_nothing(truth: str) -> bool:
    """mathruler drops units, so a truth that is only a unit ("second") would equal any other unit."""
    return bool(grade_answer("", truth))


@lru_cache(maxsize=8192)
def math_verify_equal(candidate: str, truth: str) -> bool:
    """Compare two answers in LaTeX or plain text as the math-verify library does.

    It knows more than mathruler (sets, intervals, matrices, relations) and accepts more (unreduced fractions, 50% for
    0.5). Text that it cannot parse is compared as text. A blank candidate is never equal, one longer than
    ``MAX_VERIFIED_CHARS`` only to the same text.

    Its timeouts are off: they use signal.alarm, while the deadline of a grading process also ends code that no signal
    can interrupt.
    """
    candidate, truth = candidate.strip(), truth.strip()
    if not candidate or len(candidate) > MAX_VERIFIED_CHARS:
        return False
    if candidate == truth:
        return True
    if len(truth) > MAX_VERIFIED_CHARS:
        return False
    with _nothing_is_evaluated():
        return bool(verify(_parsed(truth), _parsed(candidate), timeout_seconds=None))


@lru_cache(maxsize=8192)
def _parsed(answer: str) -> list[object]:
    return list(parse(rf"\boxed{{{answer}}}", _BOX_ONLY, parsing_timeout=None))
