import subprocess
import sys

import pytest

from rlcore.config.reward import MathReward
from rlcore.rewards import make_reward
from rlcore.rewards.extract import format_parts, last_boxed
from rlcore.rewards.grading import MAX_ANSWER_CHARS, math_equal
from rlcore.types import Problem, Score
from tests.unit.cpu_time import timed


def problem(answer: str, question: str = "What is it?") -> Problem:
    return Problem(problem_id="p", question=question, images=(), answer=answer, source="test")


def score(text: str, answer: str, format_weight: float = 0.1) -> Score:
    reward = make_reward(MathReward(format_weight=format_weight), max_completion_tokens=8)
    return reward(text, problem(answer), 5, "stop")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{5}", "5"),
        (r"first \boxed{1}, then \boxed{ 2 }.", "2"),
        (r"\boxed{\frac{1}{\sqrt{2}}} done}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed {5}", "5"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),  # an escaped brace opens nothing
        (r"\boxed{1 \\}", r"1 \\"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\boxed{}", ""),
        (r"\boxed{5", None),
        (r"\boxed{1} and \boxed{2", None),  # cut off: the earlier box is not the answer
        (r"\boxed 5", None),
        (r"\boxed{3} as \boxed says", "3"),
        ("the answer is 5", None),
        ("", None),
    ],
)
def test_the_last_box_is_taken_with_its_braces_matched(text, answer):
    assert last_boxed(text) == answer
    assert format_parts(text).answer == answer


@pytest.mark.parametrize(
    "text",
    [
        r"<think>2 + 3</think>\boxed{5}",
        "\n <think>a\nb</think>\n\nThe answer is \\boxed{5}.\n",
        r"< think >a</ think > \boxed{5}",
        r"<think>perhaps \boxed{4}</think> \boxed{5}",
    ],
)
def test_a_think_block_and_then_a_box_is_well_formed(text):
    assert format_parts(text).well_formed


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{5}",
        "<think>a</think> 5",
        r"<think>a \boxed{5}</think>",
        r"<think>a</think> \boxed{5",
        r"<think>a</think> \boxed{ }",
        r"<think>a \boxed{5}",
        r"a</think> \boxed{5}",
        r"Well, <think>a</think> \boxed{5}",
        r"</think><think> \boxed{5}",
        r"<think>a</think><think>b</think> \boxed{5}",
        r"\boxed{5} <think>a</think>",
        "",
    ],
)
def test_anything_else_is_not_well_formed(text):
    assert not format_parts(text).well_formed


@pytest.mark.parametrize(
    ("candidate", "truth"),
    [
        (r"21\sqrt{3}", r"21 \sqrt { 3 }"),  # Geometry3K writes its answers spaced
        (r"21\sqrt3", r"21 \sqrt { 3 }"),
        (r"\frac{21\sqrt{3}}{2}", r"\frac { 21 \sqrt { 3 } } { 2 }"),
        (r"10.5\sqrt{3}", r"\frac { 21 \sqrt { 3 } } { 2 }"),
        (r"\frac12", r"\frac{1}{2}"),
        (r"\dfrac{1}{2}", r"\frac12"),
        ("1/2", r"\frac { 1 } { 2 }"),
        ("0.5", "1/2"),
        (r"\sqrt{12}", r"2\sqrt{3}"),
        (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}"),
        (r"16 \pi", r"16\pi"),
        ("1,234", "1234"),
        ("1{,}234", "1234"),
        ("50%", "50"),
        (r"50\%", "50"),
        (r"\$5", "5"),
        ("5 cm", "5"),
        (r"5\text{ cm}", "5"),
        (r"5 \mathrm{cm}", "5"),
        ("30 degrees", "30"),
        (r"30^\circ", "30"),
        (r"30^{\circ}", "30"),
        ("x=5", "5"),
        ("12.0", "12"),
        ("12.30", "12.3"),
        ("(1,2)", "(1, 2)"),
        ("Evelyn", "evelyn"),
        (r"\text{Evelyn}", "Evelyn"),
        ("None", "None"),  # said in so many words
    ],
)
def test_answers_that_are_equal(candidate, truth):
    assert math_equal(candidate, truth)


@pytest.mark.parametrize(
    ("candidate", "truth"),
    [
        ("6", "5"),
        ("", "5"),
        ("", ""),
        ("cm", "hour"),  # mathruler drops both
        ("", "second"),
        ("0.5", "50%"),
        ("2/4", "1/2"),  # not reduced
        ("4.5", "4"),
        ("3.14159", r"\pi"),
        ("[1,2]", "(1,2)"),
        ("(1,2,3)", "(1,2)"),
        ("x", "y"),
        (r"\frac{1}{", r"\frac{1}{2}"),
        ("}{", "5"),
        ("5" * (MAX_ANSWER_CHARS + 1), "5" * (MAX_ANSWER_CHARS + 1)),
    ],
)
def test_answers_that_are_not_equal(candidate, truth):
    assert not math_equal(candidate, truth)


def test_a_known_limit_of_mathruler_fractions_of_sums_lose_their_brackets():
    # both read as x+1/2. Kept, so that scores compare with other work that grades with mathruler
    assert math_equal(r"\frac{x+1}{2}", r"x+\frac{1}{2}")


@pytest.mark.parametrize(
    ("text", "reward", "accuracy", "well_formed"),
    [
        (r"<think>a</think> \boxed{5}", 1.0, 1.0, 1.0),
        (r"\boxed{5}", 0.9, 1.0, 0.0),
        (r"<think>a</think> \boxed{6}", 0.1, 0.0, 1.0),
        ("5", 0.0, 0.0, 0.0),
        (r"<think>a</think> \boxed{5} or \boxed{6}", 0.1, 0.0, 1.0),  # the last one counts
    ],
)
def test_the_math_reward_weighs_accuracy_and_format(text, reward, accuracy, well_formed):
    result = score(text, "5")
    assert result.reward == pytest.approx(reward)
    assert result.parts == {"accuracy": accuracy, "format": well_formed}
    assert result.graded


def test_the_format_weight_may_be_0_or_1():
    assert score(r"\boxed{5}", "5", format_weight=0).reward == 1
    assert score(r"\boxed{5}", "5", format_weight=1).reward == 0


def test_a_missing_answer_is_not_the_truth_none():
    assert score("I cannot say.", "None").parts["accuracy"] == 0
    assert score(r"\boxed{5", "None").parts["accuracy"] == 0


def test_an_answer_in_the_question_does_not_count():
    reward = make_reward(MathReward(), max_completion_tokens=8)
    asked = problem("5", question=r"Put the answer in a box, like \boxed{5}.")
    assert reward("I will.", asked, 2, "stop").reward == 0


def megabyte(pattern: str) -> str:
    return pattern * (1_000_000 // len(pattern))


@pytest.mark.parametrize(
    "pattern", [" ", "<", "< ", "<think>", "{", "}", "\\", r"\boxed", r"\boxed ", r"\boxed{", "5,"]
)
@pytest.mark.parametrize(
    "around", ["{}", "<think>{}</think> \\boxed{{7}}", "\\boxed{{{}}}", "<{}think>", "\\boxed{}{{7}}"]
)
def test_a_megabyte_is_scored_in_linear_time(pattern, around):
    text = around.format(megabyte(pattern))
    _, seconds = timed(lambda: score(text, "5"))
    assert seconds < 5  # about 0.1 s on one core; quadratic would be minutes


def test_grading_loads_no_torch():
    code = "import sys, rlcore.rewards.worker, rlcore.rewards.pool; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
