"""Each reward of the config, numbers worked out by hand."""

from __future__ import annotations

import pickle

import pytest
from pydantic import TypeAdapter

from rlcore.config.reward import (
    DapoReward,
    MathReward,
    MathVerifyReward,
    OverlongPenalty,
    R1vReward,
    RewardConfig,
)
from rlcore.errors import RewardError
from rlcore.rewards import make_reward
from rlcore.rewards.dapo import WINDOW, answer_line, normalize_final_answer
from rlcore.rewards.extract import after_think, answer_parts, last_answer, stated_truth
from rlcore.rewards.grading import MAX_VERIFIED_CHARS, math_verify_equal
from rlcore.types import Problem, Score
from tests.unit.scoring import score

# answer tags


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>5</answer>", "5"),
        ("<answer>\n 5\nmore </answer>", "5\nmore"),
        ("<answer>1</answer> no, < answer >2< / answer >", "2"),
        ("<answer>1<answer>2</answer></answer>", "2"),
        ("<answer></answer>", ""),
        ("<answer>5", None),
        ("<answer>5</answer> or <answer>6", None),
        ("5</answer>", None),
        ("</answer>5<answer>", None),
        ("", None),
    ],
)
def test_the_last_answer_tag_counts_if_it_is_closed(text, answer):
    assert last_answer(text) == answer
    assert answer_parts(text).answer == answer


@pytest.mark.parametrize(
    ("text", "well_formed"),
    [
        ("<think>a</think><answer>5</answer>", True),
        (" <think>a\nb</think>\n\n<answer>\n5\n</answer>\n", True),
        ("<think>put it in <answer> tags</think><answer>5</answer>", True),
        ("<think>a</think> so <answer>5</answer>", False),
        ("<think>a</think><answer>5</answer> done", False),
        ("well <think>a</think><answer>5</answer>", False),
        ("<think>a</think><answer> </answer>", False),
        ("<think>a</think><answer>5</answer><answer>5</answer>", False),
        ("<think>a</think><answer>5<answer>5</answer>", False),
        ("<think>a</think><think>b</think><answer>5</answer>", False),
        ("<answer>5</answer><think>a</think>", False),
        ("<think>a<answer>5</answer></think>", False),
        ("<answer>5</answer>", False),
    ],
)
def test_well_formed_is_only_a_think_block_and_an_answer_block(text, well_formed):
    assert answer_parts(text).well_formed == well_formed


def test_truths_and_what_follows_the_think_block():
    assert [stated_truth(text) for text in (" 5 ", "<answer> 5 </answer>")] == ["5", "5"]
    assert after_think("<think>a</think>b</think>c") == "c"
    assert after_think("abc") == "abc"


# math_verify


@pytest.mark.parametrize(
    ("candidate", "truth"),
    [
        (r"\frac12", r"\frac{1}{2}"),
        ("0.5", "1/2"),
        ("2/4", "1/2"),  # it forgives what mathruler does not
        (r"\{2, 1\}", r"\{1, 2\}"),
        ("(1,2)", r"\left(1, 2\right)"),
        (r"x \in [1,\infty)", r"[1,\infty)"),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}"),
        ("1,234", "1234"),
        (r"50\%", "50"),
        (r"5\text{ cm}", "5"),
        (r"30^\circ", "30"),
        ("x=5", "5"),
        ("1+x", "x+1"),
        (r"\text{Evelyn}", "Evelyn"),
        (r"\left\{ x \right.", r"\left\{ x \right."),  # not parsed: the same text
    ],
)
def test_what_math_verify_calls_equal(candidate, truth):
    assert math_verify_equal(candidate, truth)


@pytest.mark.parametrize(
    ("candidate", "truth"),
    [
        ("6", "5"),
        ("", ""),
        ("", "5"),
        ("}{", "5"),
        ("[1,2]", "(1,2)"),
        ("x", "y"),
        ("5" * (MAX_VERIFIED_CHARS + 1),) * 2,
    ],
)
def test_what_math_verify_calls_unequal(candidate, truth):
    assert not math_verify_equal(candidate, truth)


def test_math_verify_is_weighted_as_math():
    config = MathVerifyReward()
    assert score(config, r"<think>a</think> \boxed{2/4}", r"\frac12") == Score(1.0, {"accuracy": 1, "format": 1}, True)
    assert score(config, r"\boxed{2/4}", r"\frac12").reward == pytest.approx(0.9)
    assert score(config, r"<think>a</think> \boxed{3}", "2").reward == pytest.approx(0.1)
    assert score(config, "The answer is 5", "5").reward == 0  # the library would take it out of the prose


# r1v


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<think>a</think><answer>5</answer>", 1.0),
        ("<answer>\n5\n</answer>", 0.5),
        ("<think>a</think><answer>6</answer>", 0.5),
        ("<think>a</think><answer>5", 0.0),
        ("5", 0.0),  # EasyR1 grades the whole text where there is no tag
        (r"<think>a</think>\boxed{5}", 0.0),
    ],
)
def test_r1v(text, reward):
    assert score(R1vReward(), text, "5").reward == reward
    assert score(R1vReward(), text, "<answer> 5 </answer>").reward == reward


def test_r1v_uses_the_configured_format_weight():
    assert score(R1vReward(format_weight=0.2), "<answer>5</answer>", "5").reward == pytest.approx(0.8)


# dapo


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so\nAnswer: 5", "5"),
        ("ANSWER : 5 \nend", "5"),
        ("Answer:\n\n5", "5"),
        ("**Answer:** 5", "5"),
        ("Answer: 4\nAnswer: 5", "5"),
        ("Answer: 4\nAnswer:", None),
        ("Answer 5", None),
        ("Answer: 5" + " " * WINDOW, None),
        ("x" * 10_000 + "Answer: 5", "5"),
    ],
)
def test_the_last_answer_line(text, answer):
    assert answer_line(text) == answer


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("x = 5", "5"),
        ("$5$", "5"),
        (r"the value is $\frac12$.", r"\frac{1}{2}"),
        ("1,234", "1234"),
        ("5 dollars", "5"),
        (r"\text{east}", "east"),
        (r"\sqrt3", r"\sqrt{3}"),
        ("square", ""),
    ],
)
def test_minerva_normal_form(text, normal):
    assert normalize_final_answer(text) == normal


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        ("Answer: 5", "5", True),
        ("Answer: $x = 5$", "5", True),
        ("Answer: 0.5", r"\frac{1}{2}", True),  # as text they differ
        ("Answer: 6", "5", False),
        ("Answer: 4\nAnswer: 5 or 6", "5", False),
        ("5", "5", False),
        ("", "5", False),
        ("Answer: units", "square", False),  # neither has a normal form
        ("Answer: 5", "5" * 10_000, False),
    ],
)
def test_dapo_is_plus_or_minus_one(text, answer, right):
    assert score(DapoReward(), text, answer) == Score(1.0 if right else -1.0, {"accuracy": float(right)}, True)


# overlong


@pytest.mark.parametrize(("tokens", "part"), [(0, 0), (80, 0), (85, -0.25), (90, -0.5), (100, -1), (150, -1)])
@pytest.mark.parametrize("penalty", [1.0, 0.5])
def test_the_overlong_penalty_falls_in_a_straight_line(tokens, part, penalty):
    config = DapoReward(overlong=OverlongPenalty(buffer_tokens=20, penalty=penalty))  # of 100 tokens
    result = score(config, "Answer: 5", "5", num_tokens=tokens)
    assert result.reward == pytest.approx(1 + penalty * part)
    assert result.parts == {"accuracy": 1.0, "overlong": part}


def test_the_overlong_penalty_fits_any_reward_and_not_any_length():
    config = MathReward(overlong=OverlongPenalty(buffer_tokens=100))
    assert score(config, r"\boxed{5}", "5", num_tokens=50).reward == pytest.approx(0.9 - 0.5)
    with pytest.raises(RewardError, match=r"buffer_tokens is 100, and a completion has at most 99"):
        make_reward(config, max_completion_tokens=99)


def test_every_built_in_reward_travels_to_another_process():
    adapter = TypeAdapter(RewardConfig)
    names = ("math", "math_verify", "r1v", "dapo", "gsm8k", "countdown", "clevr_count", "geoqa", "multiple_choice")
    for name in names:
        config = adapter.validate_python({"name": name, "overlong": {"buffer_tokens": 4}})
        reward = pickle.loads(pickle.dumps(make_reward(config, max_completion_tokens=8)))
        problem = Problem("p", "?", (), "B" if name == "multiple_choice" else "5", "test", {"nums": [5]})
        assert reward("", problem, 8, "abort").parts["overlong"] == -1
