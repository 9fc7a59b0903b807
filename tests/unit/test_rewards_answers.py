"""The rewards for numbers, games and choices, worked out by hand."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import pytest

from rlcore.config.reward import (
    ClevrCountReward,
    CountdownReward,
    DapoReward,
    GeoqaReward,
    Gsm8kReward,
    MathReward,
    MultipleChoiceReward,
    RewardConfig,
)
from rlcore.errors import RewardError
from rlcore.rewards.arithmetic import MAX_EXPRESSION_CHARS, _parse, _value
from rlcore.rewards.extract import choice_letter, last_number, leading_number, only_number, whole_number
from rlcore.types import Score
from tests.unit.scoring import accuracy, score

# the answer that was graded


@pytest.mark.parametrize(
    ("config", "text", "truth", "answer"),
    [
        (MathReward(), "<think>x</think> \\boxed{ 1/2 }", "7", "1/2"),
        (MathReward(), "no box, \\boxed{", "7", None),
        (MathReward(thoughts="strip"), "<think>\\boxed{3}</think> \\boxed{4}", "7", "4"),
        (MathReward(), "<think>x</think> \\boxed{}", "7", None),
        (DapoReward(), "Answer: $1,000$", "7", "1000"),
        (Gsm8kReward(), "#### 42.0", "7", "42"),
        (Gsm8kReward(), "42", "7", None),
        (ClevrCountReward(), "<answer>5 cubes</answer>", "7", "5"),
        (ClevrCountReward(), "<answer>some</answer>", "7", "some"),
        (MultipleChoiceReward(), "\\boxed{(B) text}", "C", "B"),
    ],
)
def test_a_score_tells_the_answer_that_was_graded(
    config: RewardConfig, text: str, truth: str, answer: str | None
) -> None:
    found = score(config, text, truth)
    assert (found.answer, found.parts["accuracy"]) == (answer, 0.0)


# gsm8k


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("42", "42"),
        ("42.", "42"),
        ("42.0 apples", "42"),
        ("-$1,234.50", "-1234.5"),
        ("$-7", "-7"),
        (r"\$5", "5"),
        (".5", "0.5"),
        ("42%", "42"),
        ("42/7", None),
        ("1,2", None),
        ("4e2", None),
        ("apples 42", None),
        ("٤٢", None),
        ("9" * 5000, None),  # int() itself refuses this
        ("", None),
    ],
)
def test_a_leading_number(text, number):
    found = leading_number(text)
    assert (found is None) if number is None else (Fraction(found) == Fraction(number))


def test_numbers_in_a_text():
    texts = ("10-5", "not (-5)", "1 or 1,234.5.", "7 " + "x" * 5000, "-" * 5000 + "3", "4" * 5000, "none")
    numbers = [last_number(text) for text in texts]
    assert numbers == [5, -5, Decimal("1234.5"), 7, -3, None, None]
    assert [only_number(text) for text in ("5 cubes", "5 or 6", "none")] == [5, None, None]
    assert whole_number(" $1,000. ") == 1000
    assert whole_number("1 or 2") is None


@pytest.mark.parametrize("truth", ["42", "42.0", "It is 40 + 2 = <<40+2=42>>42.\n#### 42"])
@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("so\n#### 42", 1, 1),
        ("#### 41\n#### $42.00", 1, 1),
        ("#### 42 apples", 1, 1),
        ("The answer is 42.", 0, 1),
        ("#### 42\nI used 3 steps.", 1, 0),
        ("#### Step 1\n42", 0, 1),
        ("#### 42\n####", 0, 1),
        ("#### 43", 0, 0),
        ("####", 0, 0),
        ("", 0, 0),
    ],
)
def test_gsm8k(text, strict, flexible, truth):
    assert score(Gsm8kReward(), text, truth) == Score(strict, {"accuracy": strict}, True)
    assert score(Gsm8kReward(method="flexible"), text, truth).reward == flexible


def test_gsm8k_without_a_number_as_truth_is_no_verdict():
    with pytest.raises(RewardError, match=r"answer of problem p is 'x\+1'.*needs a number"):
        score(Gsm8kReward(), "#### 1", "x+1")


# countdown


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<think>a</think><answer>(44 - 19) + 35 * 2</answer>", 1.0),
        ("<answer>44-19+35*2 = 95</answer>", 1.0),
        ("<answer>44-19+35*2 = 96</answer>", 0.1),  # claims something else
        ("<answer>44-19+35*2=95=95</answer>", 0.1),
        ("<answer>95</answer>", 0.1),
        ("<answer>44-19+35+35</answer>", 0.1),  # 35 twice, 2 never
        ("<answer>44-19+35*2*1</answer>", 0.1),
        ("<answer>44--19+35*2</answer>", 0.1),
        ("<answer>no idea</answer>", 0.1),
        ("<answer></answer>", 0.0),
        ("<answer>44-19+35*2", 0.0),
        ("44-19+35*2", 0.0),
        ("<answer>1</answer><answer>44-19+35*2</answer>", 1.0),
    ],
)
def test_countdown(text, reward):
    result = score(CountdownReward(), text, "", nums=[44, 19, 35, 2], target=95)
    assert result.reward == reward
    assert result.parts == {"accuracy": float(reward == 1), "format": float(reward > 0)}


def test_countdown_counts_in_exact_fractions_and_takes_the_answer_for_a_target():
    assert score(CountdownReward(), "<answer>8/(3-8/3)</answer>", "24", nums=[8, 3, 8, 3]).reward == 1
    assert score(CountdownReward(), "<answer>1/(2-2)</answer>", "1", nums=[1, 2, 2]).reward == 0.1


@pytest.mark.parametrize(
    "expression",
    [
        "2**3",
        "9**9**9",
        "7//2",
        "+5",
        "-5",
        "007+1",
        "1_0",
        "0x1",
        "1e3",
        "1.5",
        "abs(1)",
        "(1)(2)",
        "()",
        "1,2",
        "1 2",
        "__import__('os')",
        "(" * 120 + "1" + ")" * 120,
        "1" * (MAX_EXPRESSION_CHARS + 1),
        "1+\x00",
        "",
    ],
)
def test_countdown_parses_only_arithmetic(expression):
    tree = _parse(expression)
    assert tree is None or _value(tree) == 1  # 120 brackets around 1 are fine, where the parser takes them


def test_countdown_without_numbers_is_no_verdict():
    for extra in ({}, {"nums": "1 2"}, {"nums": [1, "x"]}, {"nums": [1], "target": None}):
        with pytest.raises(RewardError, match="needs a column nums"):
            score(CountdownReward(), "<answer>1</answer>", "1", **extra)


# clevr_count


@pytest.mark.parametrize("truth", ["5", "<answer> 5 </answer>", "5.0"])
@pytest.mark.parametrize(
    ("inside", "right"),
    [("5", 1), (" 5 cubes", 1), ("5.0", 1), ("5 or 6", 0), ("five", 0), ("5.5", 0), ("-5", 0), ("15", 0), ("", 0)],
)
def test_clevr_count(inside, right, truth):
    assert accuracy(ClevrCountReward(), f"<answer>{inside}</answer>", truth) == right


def test_clevr_count_weighs_format_and_needs_a_count():
    assert score(ClevrCountReward(), "<think>a</think><answer>5</answer>", "5").reward == 1
    assert score(ClevrCountReward(), "<think>a</think><answer>4</answer>", "5").reward == 0.5
    assert score(ClevrCountReward(), "5", "5").reward == 0
    with pytest.raises(RewardError, match="needs one integer"):
        score(ClevrCountReward(), "5", "many")


# geoqa


@pytest.mark.parametrize(
    ("inside", "truth", "right"),
    [
        ("145", "<answer> 145° </answer>", 1),
        (r"145^\circ", "145°", 1),
        (r"2\sqrt3", r"2 \sqrt { 3 }", 1),
        ("144", "145°", 0),
        ("C", "145", 0),  # no choices
    ],
)
def test_geoqa_values(inside, truth, right):
    assert accuracy(GeoqaReward(), f"<answer>{inside}</answer>", truth) == right


@pytest.mark.parametrize(
    ("inside", "truth", "right"),
    [
        ("C", "C", 1),
        ("C", "145", 1),
        ("145", "C", 1),
        ("(C) 145°", "C", 1),
        ("B", "C", 0),
        ("35", "C", 0),
        ("B", "145", 0),
        ("E", "145", 0),  # no such choice
    ],
)
def test_geoqa_letters_stand_for_their_choice(inside, truth, right):
    choices = ["35°", "70°", "145°", 180]
    assert accuracy(GeoqaReward(), f"<answer>{inside}</answer>", truth, choices=choices) == right


def test_geoqa_refuses_choices_that_are_no_list():
    with pytest.raises(RewardError, match="take a list"):
        score(GeoqaReward(), "", "5", choices="A 5")


# multiple_choice


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("B", "B"),
        ("(B)", "B"),
        ("B.", "B"),
        ("B)", "B"),
        (r"\text{B}", "B"),
        (r"\textbf{(B)}", "B"),
        ("**B**", "B"),
        ("B) text", "B"),
        ("(J): text", "J"),
        ("B. the second", "B"),
        ("A triangle", None),
        ("I think so", None),
        ("AB", None),
        ("b", None),
        ("K", None),
        ("A, B", None),
        ("5", None),
        ("", None),
    ],
)
def test_the_letter_of_a_choice(answer, letter):
    assert choice_letter(answer) == letter


@pytest.mark.parametrize(
    ("text", "right"),
    [
        (r"\boxed{B}", 1),
        (r"\boxed{A} no, \boxed{\text{B}}", 1),
        ("<answer>(B)</answer>", 1),
        ("Answer: B", 1),
        ("Answer: A\nAnswer: B", 1),
        (r"<answer>A</answer> \boxed{B}", 1),
        (r"Answer: A <answer>B</answer>", 1),
        (r"\boxed{5} Answer: B", 1),
        (r"<think>\boxed{A}?</think> Answer: B", 1),  # what follows the thinking
        (r"<think>\boxed{B}</think> done", 1),
        ("B", 0),
        ("A triangle. B is right.", 0),
        ("Answer: B is what I say", 0),
        (r"\boxed{C}", 0),
        (r"\boxed{B", 0),
    ],
)
def test_multiple_choice(text, right):
    assert accuracy(MultipleChoiceReward(), text, "B") == right
    assert accuracy(MultipleChoiceReward(), text, "(B)") == right


def test_multiple_choice_takes_either_format_and_needs_a_letter():
    for text in (r"<think>a</think> so \boxed{B}", "<think>a</think><answer>B</answer>"):
        assert score(MultipleChoiceReward(), text, "B").reward == 1
    assert score(MultipleChoiceReward(), "<think>a</think> Answer: B", "B").reward == pytest.approx(0.9)
    with pytest.raises(RewardError, match="needs a letter from A to J"):
        score(MultipleChoiceReward(), "", "145")
