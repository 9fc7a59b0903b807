"""The right answer of every row, in the right format, gets the full reward; a fixed wrong answer gets none."""

from __future__ import annotations

import re

import pyarrow.parquet as pq
import pytest

from rlcore.config.reward import DapoReward, GeoqaReward, Gsm8kReward, MathReward, MathVerifyReward, R1vReward
from rlcore.rewards import make_reward
from rlcore.types import Problem
from tests.data_sets import NAMES, DataSets

WRONG = "123456789.25"  # no row has it

BOX = r"<think>a</think> It is \boxed{@}."
TAGS = "<think>a</think>\n<answer>@</answer>"


def marks(data_sets: DataSets, config, template: str, name: str, every: int = 1) -> tuple[list[str], list[str]]:
    """Truths that fall short of full marks, and for which the wrong answer is right, in each ``every``-th row."""
    reward = make_reward(config, max_completion_tokens=100)
    rows = pq.read_table(data_sets.file(name), columns=["problem", "answer"]).to_pylist()
    assert len(rows) == data_sets.counts[name].rows
    wrong = template.replace("@", WRONG)
    short, gifts = [], []
    for row in rows[::every]:
        problem = Problem("p", row["problem"], (), row["answer"], name)
        if reward(template.replace("@", row["answer"]), problem, 5, "stop").reward < 1:
            short.append(row["answer"])
        if reward(wrong, problem, 5, "stop").parts["accuracy"] > 0:
            gifts.append(row["answer"])
    return short, gifts


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("config", "every"), [(MathReward(), 1), (MathVerifyReward(), 5)], ids=["math", "math_verify"])
def test_the_truth_of_every_row_earns_full_marks(data_sets, config, every, name):
    """Of every fifth real one with math_verify, which is slow and not ours."""
    every = every if data_sets.kind == "real" else 1
    assert marks(data_sets, config, BOX, name, every) == ([], [])


# they share the equality of math, so the largest set is left out
@pytest.mark.parametrize("name", ["geometry3k/train", "geometry3k/validation", "gsm8k/test", "math500/test"])
@pytest.mark.parametrize(
    ("config", "template"),
    [
        (R1vReward(), TAGS),
        (GeoqaReward(), TAGS),
        (DapoReward(), "So.\nAnswer: @"),
    ],
    ids=["r1v", "geoqa", "dapo"],
)
def test_the_truth_earns_full_marks_in_other_formats(data_sets, config, template, name):
    assert marks(data_sets, config, template, name) == ([], [])


@pytest.mark.parametrize("name", ["gsm8k/train", "gsm8k/test"])
@pytest.mark.parametrize(("method", "template"), [("strict", "a\n#### @"), ("flexible", "So it is $@.")])
def test_gsm8k_truths(data_sets, name, method, template):
    assert marks(data_sets, Gsm8kReward(method=method), template, name) == ([], [])


@pytest.mark.parametrize("name", ["geometry3k/validation", "math500/test"])
@pytest.mark.parametrize("config", [MathReward(), MathVerifyReward()], ids=["math", "math_verify"])
def test_the_truth_written_another_way_earns_full_marks(data_sets, config, name):
    """Not the same text, so the graders have to recognise it: \\dfrac for \\frac, and no blanks around symbols."""
    reward = make_reward(config, max_completion_tokens=100)
    answers = pq.read_table(data_sets.file(name), columns=["answer"])["answer"].to_pylist()
    rewritten = [(answer, rewrite(answer)) for answer in answers if rewrite(answer) != answer]
    assert len(rewritten) >= data_sets.counts[name].rewritable
    short = [
        answer
        for answer, other in rewritten
        if reward(BOX.replace("@", other), Problem("p", "?", (), answer, name), 5, "stop").reward < 1
    ]
    assert short == []


def rewrite(answer: str) -> str:
    answer = answer.replace(r"\frac", r"\dfrac")
    return answer if r"\text" in answer else re.sub(r"(?<![a-zA-Z])\s+|\s+(?![a-zA-Z])", "", answer)
