"""Is an answer mathematically equal to the reference answer? The only importer of mathruler.

Comparing may run sympy, which can take forever or take all memory: call this in a process that can be killed.
"""

from __future__ import annotations

from functools import lru_cache

from mathruler.grader import grade_answer

MAX_ANSWER_CHARS = 2000  # far above any reference answer; mathruler's time grows faster than the length


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
