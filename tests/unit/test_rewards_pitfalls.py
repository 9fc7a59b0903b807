"""Texts that are known to break graders, for every reward: no crash, no accidental reward, no timeout."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlcore.config.reward import (
    ClevrCountReward,
    CountdownReward,
    DapoReward,
    GeoqaReward,
    Gsm8kReward,
    MathReward,
    MathVerifyReward,
    MultipleChoiceReward,
    R1vReward,
    RewardConfig,
)
from rlcore.rewards import make_reward
from rlcore.rewards.pool import GradingPool
from rlcore.types import Completion, Problem, Score
from tests.unit.cpu_time import timed


@dataclass(frozen=True)
class Case:
    """A reward, how a completion states an answer to it, and the range of its reward."""

    config: RewardConfig
    right: str  # completion that is right about "5" (multiple choice: "B"; countdown: 2 + 3)
    template: str  # "@" is where an answer goes
    answer: str = "5"
    low: float = 0.0

    def problem(self, question: str = "What is it?", answer: str | None = None) -> Problem:
        extra = {"nums": [2, 3], "target": 5}
        return Problem("p", question, (), self.answer if answer is None else answer, "test", extra)

    def score(self, text: str, **problem: str) -> Score:
        return make_reward(self.config, max_completion_tokens=100)(text, self.problem(**problem), 5, "stop")


TAGS = "<think>a</think><answer>@</answer>"
BOX = r"<think>a</think>\boxed{@}"
CASES = {
    "math": Case(MathReward(), BOX.replace("@", "5"), BOX),
    "math_verify": Case(MathVerifyReward(), BOX.replace("@", "5"), BOX),
    "r1v": Case(R1vReward(), TAGS.replace("@", "5"), TAGS),
    "dapo": Case(DapoReward(), "Answer: 5", "Answer: @", low=-1.0),
    "gsm8k strict": Case(Gsm8kReward(), "#### 5", "#### @"),
    "gsm8k flexible": Case(Gsm8kReward(method="flexible"), "5", "@"),
    "countdown": Case(CountdownReward(), TAGS.replace("@", "2+3"), TAGS),
    "clevr_count": Case(ClevrCountReward(), TAGS.replace("@", "5"), TAGS),
    "geoqa": Case(GeoqaReward(), TAGS.replace("@", "5"), TAGS),
    "multiple_choice": Case(MultipleChoiceReward(), BOX.replace("@", "B"), BOX, answer="B"),
}
every_reward = pytest.mark.parametrize("case", CASES.values(), ids=CASES)

# answers that are wrong, whatever they are put in
WRONG = {
    "nothing": "",
    "blanks": " \n\t ",
    "tower of powers": "9**9**9",
    "hidden tower of powers": "9**(9**9*(sqrt(2)+1)*(sqrt(2)-1))",  # the brackets are 1, as sympy finds out
    "latex tower": "9^{9^{9^9}}",
    "deep brackets": "(" * 900 + "1" + ")" * 900,
    "deep braces": "{" * 900 + "1" + "}" * 900,
    "deep fractions": r"\frac{" * 300 + "1" + "}{2}" * 300,
    "deep roots": r"\sqrt{" * 300 + "7" + "}" * 300,
    "huge integer": "7" * 20_000,
    "integer above int()'s limit": "7" * 4_400,
    "long exponent": "1e999999999",
    "infinity": "inf",
    "not a number": "nan",
    "python": "__import__('os').getpid()",
    "null byte": "\x00",
    "surrogate": "\ud800",
    "unclosed brace": r"\frac{1}{",
    "closed twice": "}}{{",
    "backslashes": "\\" * 1001,
    "dollars": "$" * 1000,
    "commas": "1," * 1000,
    "words": "and or " * 300,
    "signs": "-" * 1000,
    "arabic digits": "٦",
    "prose": "A triangle has more than I can say",
}
HANGS = ("hidden tower of powers", "tower of powers", "deep fractions", "deep roots", "latex tower")


@every_reward
def test_the_right_answer_is_right(case):
    result = case.score(case.right)
    assert result.parts["accuracy"] == 1
    assert result.reward == 1


@every_reward
def test_an_answer_in_the_question_does_not_count(case):
    result = case.score("I will.", question=f"For example: {case.right}")
    assert result.reward == case.low
    assert result.parts["accuracy"] == 0


@every_reward
def test_the_last_of_several_answers_counts(case):
    wrong = case.template.replace("@", "7")
    assert case.score(f"{wrong}\n{case.right}").parts["accuracy"] == 1
    assert case.score(f"{case.right}\n{wrong}").parts["accuracy"] == 0


@every_reward
def test_an_answer_that_is_cut_off_is_none(case):
    beginning = case.template.partition("@")[0]
    assert case.score(f"{case.right}\n{beginning}").parts["accuracy"] == (case.right == "5")  # a bare number is whole
    if case.template.endswith(("}", ">")):
        stated = case.right.replace("</answer>", "").removesuffix("}")
        assert case.score(stated).parts["accuracy"] == 0


@every_reward
@pytest.mark.parametrize("answer", [value for name, value in WRONG.items() if name not in HANGS], ids=lambda a: a[:12])
def test_a_wrong_answer_is_wrong_without_a_crash(case, answer):
    result = case.score(case.template.replace("@", answer))
    assert result.parts["accuracy"] == 0
    assert case.low <= result.reward <= 0.5


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def pooled(request):
    reward = make_reward(request.param.config, max_completion_tokens=100)
    with GradingPool(reward, processes=1, deadline_seconds=2.0) as pool:
        yield request.param, pool


def grade(case: Case, pool: GradingPool, texts: list[str], answer: str) -> list[Score]:
    tokens = np.zeros(5, np.int32), np.zeros(5, np.float32)
    completions = [Completion.one_turn(*tokens, text, "stop", 0) for text in texts]
    return pool.submit([case.problem(answer=answer)] * len(texts), completions).result(120)


def test_what_can_hang_sympy_ends_at_the_deadline(pooled):
    case, pool = pooled
    symbolic = isinstance(case.config, MathReward | MathVerifyReward | R1vReward | DapoReward | GeoqaReward)
    texts = [case.template.replace("@", WRONG[name]) for name in HANGS]
    scores = grade(case, pool, texts, r"21 \sqrt { 3 }" if symbolic else case.answer)
    assert all(not score.graded or score.parts["accuracy"] == 0 for score in scores)
    assert (pool.ungraded["error"], pool.ungraded["death"]) == (0, 0)
    assert grade(case, pool, [case.right], case.answer)[0].parts["accuracy"] == 1


def test_odd_characters_travel(pooled):
    case, pool = pooled
    scores = grade(case, pool, ["\x00", "\ud800", case.right + "\x00\udfff", "\U0010ffff"], case.answer)
    assert all(score.graded for score in scores)
    assert [score.parts["accuracy"] for score in (scores[0], scores[1], scores[3])] == [0, 0, 0]


LONG = 250_000  # characters
PATTERNS = (
    *(" ", "<", "< ", "<think>", "</think>", "<answer>", "</answer>", "<answer> ", "{", "}", "\\", r"\boxed{"),
    *("####", "#### ", "Answer:", "answer ", "5,", "1,234", "9", "-", "$", ".", "(", "1+", "C) ", "\n", "\x00"),
)


@every_reward
@pytest.mark.parametrize("around", ["@", "<answer>@</answer>", r"\boxed{@}", "<@answer>"])
def test_long_text_is_graded_in_linear_time(case, around):
    """At this rate a megabyte takes half of the deadline; what grows with the square of the length takes minutes."""
    for pattern in PATTERNS:
        text = around.replace("@", pattern * (LONG // len(pattern)))
        result, seconds = timed(partial(case.score, text))
        assert seconds < case.config.deadline_seconds / 2 * LONG / 1_000_000, pattern
        assert result.parts["accuracy"] == 0 or (case.right == "5" and pattern == "5,")


# what a policy writes: mostly pieces of the right thing in the wrong place
pieces = st.lists(
    st.one_of(
        st.sampled_from(
            [
                *("<think>", "</think>", "<answer>", "</answer>", r"\boxed{", "}", "{", "Answer:", "#### ", "\n", " "),
                *("5", "B", "(B)", "2+3", "=5", r"\frac12", r"\sqrt3", "1,234", "50%", "$", "cm", r"\text{", "(", ")"),
            ]
        ),
        st.text(max_size=8),
    ),
    max_size=20,
).map("".join)


@every_reward
@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(text=pieces)
def test_any_text_gives_a_finite_score_in_range(case, text):
    result = case.score(text)
    assert isinstance(result, Score)
    assert result.graded
    assert math.isfinite(result.reward)
    assert case.low <= result.reward <= 1
    assert result.parts["accuracy"] in (0.0, 1.0)
    assert set(result.parts) == set(case.score("").parts)  # metrics take the names of the first for all
