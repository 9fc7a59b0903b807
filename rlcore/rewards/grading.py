"""Is an answer mathematically equal to the reference answer? The only importer of mathruler and math-verify.

Comparing may run sympy, which can take forever or take all memory: call this in a process that can be killed.
"""

from __future__ import annotations

import logging
from functools import lru_cache

from math_verify import LatexExtractionConfig, parse, verify
from mathruler.grader import grade_answer

MAX_ANSWER_CHARS = 2000  # far above any reference answer; mathruler's time grows faster than the length
MAX_VERIFIED_CHARS = 500  # the same for math-verify, whose parser is slower

# of what math-verify searches for, the box alone: it is given nothing else
_BOX_ONLY = (LatexExtractionConfig(try_extract_without_anchor=False, boxed_match_priority=0),)

# math-verify warns, in each process, that its timeouts are off: on purpose, see math_verify_equal. pylatexenc, which
# mathruler uses, warns once for each malformed command, and a policy can write thousands of them.
for _name in ("math_verify.parser", "math_verify.grader", "pylatexenc"):
    logging.getLogger(_name).setLevel(logging.ERROR)


@lru_cache(maxsize=8192)  # the completions of a group mostly give the same few answers
def math_equal(candidate: str, truth: str) -> bool:
    """Compare two answers, written in LaTeX or plain, as mathruler does.

    Units, percent and dollar signs, degrees and thousands commas do not count; fractions must be reduced
    where both are fractions; an integer must be given as an integer; else sympy decides whether the
    difference is 0. Blank, or longer than ``MAX_ANSWER_CHARS``, is never equal. What mathruler cannot parse,
    it calls unequal.

    Args:
        candidate: what was inside the box. A completion without a box has no candidate: do not ask.
        truth: the reference answer of the problem.
    """
    candidate, truth = candidate.strip(), truth.strip()
    if not candidate or len(candidate) > MAX_ANSWER_CHARS:
        return False
    if candidate == truth:
        return True
    return not _normalizes_to_nothing(truth) and bool(grade_answer(candidate, truth))


@lru_cache(maxsize=1024)
def _normalizes_to_nothing(truth: str) -> bool:
    """mathruler drops units, so a truth that is nothing else ("second") would equal any other unit."""
    return bool(grade_answer("", truth))


@lru_cache(maxsize=8192)
def math_verify_equal(candidate: str, truth: str) -> bool:
    """Compare two answers, written in LaTeX or plain, as the math-verify library does.

    It knows more than mathruler (sets, intervals, matrices, relations) and forgives more (fractions that are not
    reduced, 50% for 0.5). Blank, or longer than ``MAX_VERIFIED_CHARS``, is never equal unless it is the truth to
    the letter; what it cannot parse, it compares as text.

    Its own timeouts are off: they use signal.alarm, and a grading process has a deadline that also ends what a
    signal cannot interrupt.
    """
    candidate, truth = candidate.strip(), truth.strip()
    if not candidate or len(candidate) > MAX_VERIFIED_CHARS:
        return False
    if candidate == truth:
        return True
    return bool(verify(_parsed(truth), _parsed(candidate), timeout_seconds=None))


@lru_cache(maxsize=8192)
def _parsed(answer: str) -> list[object]:
    return list(parse(rf"\boxed{{{answer}}}", _BOX_ONLY, parsing_timeout=None))
