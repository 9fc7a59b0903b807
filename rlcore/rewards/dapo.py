"""DAPO (arXiv:2503.14476): reward ``dapo``, and the soft punishment of long completions, around any reward.

``dapo`` normalises answers as Minerva does (arXiv:2206.14858, appendix D.1) and as DAPO's own grader does
(github.com/BytedTsinghua-SIA/DAPO, verl's math_dapo.py), with two differences: answers that MathRuler calls equal count
as well, and a last "Answer:" with nothing after it is no answer, where DAPO's grader takes an earlier one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlcore.rewards.extract import last_match, stated_truth
from rlcore.rewards.grading import MAX_ANSWER_CHARS, math_equal
from rlcore.rewards.protocol import BatchRewardFn, Job, RewardFn
from rlcore.types import FinishReason, Problem, Score

WINDOW = 300  # last characters of the completion, the only ones that DAPO's grader reads

_ANSWER = re.compile(r"answer\s*:\s*", re.IGNORECASE)
_SUBSTITUTIONS = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), (r"\ ", ""), (" ", ""), ("mbox", "text"),
    (",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
)  # fmt: skip
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
    """+1 if the last "Answer:" line is right, else -1; the part ``accuracy`` is 1 or 0."""
    answer = answer_line(text)
    right = answer is not None and _equal(answer, stated_truth(problem.answer))
    given = None if answer is None else normalize_final_answer(answer) or answer
    return Score(1.0 if right else -1.0, {"accuracy": float(right)}, graded=True, answer=given)


def answer_line(text: str, window: int = WINDOW) -> str | None:
    """The answer after the last "Answer:" (in any case) in the last ``window`` characters, to the end of its line.

    It may begin on a later line. Bold marks around it are dropped. None: no "Answer:", or nothing after it.
    """
    tail = text[-window:]
    last = last_match(_ANSWER, tail)
    if last is None:
        return None
    line = tail[last.end() :].partition("\n")[0]
    return line.strip().strip("*").strip() or None


def normalize_final_answer(answer: str) -> str:
    """Minerva's normal form of an answer: the part after the last "=", without units, text commands and blanks."""
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


@dataclass(frozen=True, slots=True)
class LengthRule:
    """Equation 13, in tokens."""

    max_tokens: int  # L_max: the budget of a completion
    buffer_tokens: int  # L_cache: the last tokens of the budget, over which the penalty grows
    penalty: float  # weight of the part

    def part(self, num_tokens: int) -> float:
        """0 up to max_tokens - buffer_tokens, -1 from max_tokens on, linear between."""
        over = num_tokens - (self.max_tokens - self.buffer_tokens)
        return -min(1.0, max(0, over) / self.buffer_tokens) if over > 0 else 0.0

    def apply(self, score: Score, num_tokens: int) -> Score:
        """Add penalty * part to the reward, and the unweighted part as ``overlong``. Ungraded scores stay."""
        if not score.graded:
            return score
        part = self.part(num_tokens)
        return replace(score, reward=score.reward + self.penalty * part, parts={**score.parts, "overlong": part})


@dataclass(frozen=True, slots=True)
class OverlongReward:
    """A reward with the length penalty."""

    inner: RewardFn
    rule: LengthRule

    def __call__(self, text: str, problem: Problem, num_tokens: int, finish_reason: FinishReason) -> Score:
        return self.rule.apply(self.inner(text, problem, num_tokens, finish_reason), num_tokens)


@dataclass(frozen=True, slots=True)
class OverlongBatchReward:
    """A batch reward with the length penalty."""

    inner: BatchRewardFn
    rule: LengthRule

    def score_batch(self, jobs: Sequence[Job]) -> Sequence[Score]:
        scores = self.inner.score_batch(jobs)
        return [self.rule.apply(score, num_tokens) for score, (_, _, num_tokens, _) in zip(scores, jobs, strict=True)]
