"""Reward ``dapo`` (arXiv:2503.14476): the last "Answer:" line is right, +1 or -1.

The normalisation is Minerva's (arXiv:2206.14858, appendix D.1), as DAPO's own grader has it
(github.com/BytedTsinghua-SIA/DAPO, verl's math_dapo.py). Two differences: an answer that MathRuler calls equal
counts too, and a last "Answer:" with nothing behind it is no answer, where DAPO's goes back to an earlier one.
"""

from __future__ import annotations

import re

from rlcore.rewards.format import stated_truth
from rlcore.rewards.grading import MAX_ANSWER_CHARS, math_equal
from rlcore.types import FinishReason, Problem, Score

WINDOW = 300  # characters at the end of the completion that are read, as in DAPO's grader

_ANSWER = re.compile(r"answer\s*:\s*", re.IGNORECASE)
_SUBSTITUTIONS = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    (r"\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)
_REMOVED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points"),
    *("feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *("childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3"),
    *("\\text{\n}", "\\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', "\\dots"),
)
_REWRITES = (
    (re.compile(r"(.*?)(\$)(.*?)(\$)(.*)"), "$\\3$"),  # what stands between the first dollar signs
    (re.compile(r"(\\text\{)(.*?)(\})"), "\\2"),
    (re.compile(r"(\\textbf\{)(.*?)(\})"), "\\2"),
    (re.compile(r"(\\overline\{)(.*?)(\})"), "\\2"),
    (re.compile(r"(\\boxed\{)(.*)(\})"), "\\2"),
    (re.compile(r"(frac)([^{])(.)"), "frac{\\2}{\\3}"),  # \frac12 is \frac{1}{2}
    (re.compile(r"(sqrt)([^{])"), "sqrt{\\2}"),
)


def dapo_reward(text: str, problem: Problem, num_tokens: int, finish_reason: FinishReason) -> Score:
    """+1 if the answer is right, else -1; the part ``accuracy`` is 1 or 0."""
    answer = answer_line(text)
    right = answer is not None and _equal(answer, stated_truth(problem.answer))
    return Score(1.0 if right else -1.0, {"accuracy": float(right)}, graded=True)


def answer_line(text: str, window: int = WINDOW) -> str | None:
    """What follows the last "Answer:" (in any case) in the last ``window`` characters, up to the end of its line.

    It may begin on a later line. Bold marks around it are dropped. None: there is none, or nothing follows it.
    """
    tail = text[-window:]
    last = None
    for last in _ANSWER.finditer(tail):  # noqa: B007 - the last one is wanted
        pass
    if last is None:
        return None
    line = tail[last.end() :].partition("\n")[0]
    return line.strip().strip("*").strip() or None


def normalize_final_answer(answer: str) -> str:
    """Minerva's normal form of an answer: what follows the last "=", without units, text commands and blanks."""
    answer = answer.split("=")[-1]
    for before, after in _SUBSTITUTIONS:
        answer = answer.replace(before, after)
    for expression in _REMOVED:
        answer = answer.replace(expression, "")
    for pattern, replacement in _REWRITES:
        answer = pattern.sub(replacement, answer)
    answer = answer.replace("$", "")
    if answer.replace(",", "").isdigit():
        answer = answer.replace(",", "")
    return answer.strip()


def _equal(answer: str, truth: str) -> bool:
    if len(truth) > MAX_ANSWER_CHARS:  # the answer has WINDOW characters at most
        return False
    given, wanted = normalize_final_answer(answer), normalize_final_answer(truth)
    if wanted and given == wanted:  # a truth that is all units has no normal form
        return True
    return math_equal(answer, truth) or (bool(wanted) and math_equal(given, wanted))
