"""Completions of models that think: what is graded of them, with ``reward.thoughts`` keep and strip."""

from __future__ import annotations

import pickle
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from pydantic import TypeAdapter
from transformers import AddedToken

from rlcore.config import ModelConfig, build_experiment
from rlcore.config.reward import MathReward, OverlongPenalty, RewardConfig, UserReward
from rlcore.data.processor import load_processor
from rlcore.data.prompts import opens_thought
from rlcore.errors import ConfigError
from rlcore.rewards import make_reward
from rlcore.rewards.extract import ThoughtParts, thought_parts
from rlcore.rewards.pool import GradingPool
from rlcore.training.assemble import make_grader
from rlcore.types import Completion, Problem, Score
from tasks.experiments import configure

# How each reward states the answer: right, and wrong.
STATED = {
    "math": (r"\boxed{5}", r"\boxed{4}"),
    "math_verify": (r"\boxed{5}", r"\boxed{4}"),
    "r1v": ("<answer>5</answer>", "<answer>4</answer>"),
    "clevr_count": ("<answer>5</answer>", "<answer>4</answer>"),
    "geoqa": ("<answer>5</answer>", "<answer>4</answer>"),
    "multiple_choice": (r"\boxed{B}", r"\boxed{A}"),
    "dapo": ("Answer: 5", "Answer: 4"),
    "gsm8k": ("#### 5", "#### 4"),
    "countdown": ("<answer>2 + 3</answer>", "<answer>2 * 3</answer>"),
}
FORMATTED = ("math", "math_verify", "r1v", "clevr_count", "geoqa", "multiple_choice")


def make(name: str, *, opened: bool = False, **settings: object):
    config = TypeAdapter(RewardConfig).validate_python({"name": name, "thoughts": "strip", **settings})
    return make_reward(config, max_completion_tokens=100, prompt_opens_thought=opened)


def completion(text: str) -> Completion:
    return Completion.one_turn(np.zeros(4, np.int32), np.zeros(4, np.float32), text, "stop", 0)


def grade(name: str, text: str, **settings: object) -> Score:
    problem = Problem("p", "?", (), "B" if name == "multiple_choice" else "5", "test", {"nums": [2, 3], "target": 5})
    return make(name, **settings)(text, problem, 50, "stop")


@pytest.mark.parametrize(
    ("text", "opened", "well_formed", "closed", "after"),
    [
        ("<think>a</think>b", False, True, True, "b"),
        (" \n<think>a</think> b", False, True, True, " b"),
        ("< think >a< / think >b", False, True, True, "b"),
        ("<think>a", False, False, False, ""),
        ("a</think>b", True, True, True, "b"),
        ("a", True, False, False, ""),
        ("", True, False, False, ""),
        ("a", False, False, True, "a"),
        ("", False, False, True, ""),
        ("a</think>b", False, False, True, "b"),  # never opened
        ("<think>a</think>b", True, False, True, "b"),  # opened twice
        ("well, <think>a</think>b", False, False, True, "b"),
        ("<think>a</think>b<think>c</think>d", False, False, True, "d"),
        ("<think>a</think>b<think>c", False, False, False, ""),
        ("<think>a<think>b</think>c</think>d", False, False, True, "d"),
        ("<thinking>a</thinking>b", False, False, True, "<thinking>a</thinking>b"),
    ],
)
def test_the_last_think_tag_decides(text, opened, well_formed, closed, after):
    assert thought_parts(text, opened=opened) == ThoughtParts(well_formed, closed, after)


@pytest.mark.parametrize(
    ("prompt", "opens"),
    [
        ("<|Assistant|><think>\n", True),  # DeepSeek-R1-Distill
        ("<|im_start|>assistant\n<think>\n", True),  # Qwen3-Thinking-2507
        ("<|im_start|>assistant\n", False),  # Qwen3, which opens the thought itself
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),  # Qwen3 with thinking off
        ("Think in <think> </think> tags.<|im_end|>\n<|im_start|>assistant\n", False),
        ("Begin with <think>.<|im_end|>\n<|im_start|>assistant\n", False),
    ],
)
def test_a_prompt_opens_a_thought_if_it_ends_with_the_tag(prompt, opens):
    assert opens_thought(prompt) is opens


@pytest.mark.parametrize("name", STATED)
def test_every_built_in_reward_grades_only_what_follows_the_thought(name):
    right, wrong = STATED[name]
    low = grade(name, "").reward
    assert low == (-1 if name == "dapo" else 0)

    closed = grade(name, f"<think>Perhaps {wrong}?</think>\nSo {right}")
    assert closed.parts["accuracy"] == 1
    assert closed.parts["unclosed_thought"] == 0
    assert grade(name, f"<think>Perhaps {right}?</think>\nSo {wrong}").parts["accuracy"] == 0
    assert grade(name, f"<think>It is {right}.</think>\nDone.").reward == low

    unclosed = grade(name, f"<think>It is {right}")
    assert unclosed == Score(low, {**grade(name, "").parts, "unclosed_thought": 1.0}, graded=True)
    assert unclosed.parts["accuracy"] == 0

    assert grade(name, right).parts["accuracy"] == 1  # no thought at all
    assert grade(name, right).parts["unclosed_thought"] == 0


@pytest.mark.parametrize("name", STATED)
def test_a_thought_that_the_prompt_opened_is_open_until_it_is_closed(name):
    right, wrong = STATED[name]
    assert grade(name, f"Perhaps {wrong}?</think>\n{right}", opened=True).parts["accuracy"] == 1
    assert grade(name, f"Perhaps {right}?</think>\n{wrong}", opened=True).parts["accuracy"] == 0
    cut = grade(name, f"It is {right}", opened=True)
    assert (cut.graded, cut.parts["accuracy"], cut.parts["unclosed_thought"]) == (True, 0, 1)


@pytest.mark.parametrize("name", FORMATTED)
def test_the_format_part_sees_a_thought_that_was_stripped(name):
    right, _ = STATED[name]
    assert grade(name, f"<think>a</think>{right}").reward == 1
    assert grade(name, f"a</think>{right}", opened=True).reward == 1
    for text, opened in (
        (right, False),  # no thought
        (f"a</think>{right}", False),
        (f"well, <think>a</think>{right}", False),
        (f"<think>a</think><think>b</think>{right}", False),
        (f"<think>a{right}", False),
        (right, True),
    ):
        assert grade(name, text, opened=opened).parts["format"] == 0, text


@pytest.mark.parametrize("name", STATED)
@pytest.mark.parametrize("text", ["@", "<think>a</think>@", "<think>@", "<think>@</think>", "a</think>@", ""])
def test_keep_is_the_default_and_knows_nothing_of_thoughts(name, text):
    """A recipe that does not set ``thoughts`` keeps its scores, whatever the prompt ends with."""
    text = text.replace("@", STATED[name][0])
    default = make(name, thoughts="keep", opened=True)
    assert TypeAdapter(RewardConfig).validate_python({"name": name}).thoughts == "keep"
    assert grade(name, text, thoughts="keep", opened=True) == grade(name, text, thoughts="keep")
    assert "unclosed_thought" not in grade(name, text, thoughts="keep").parts
    assert "thoughts" not in type(default).__module__  # no wrapper


def test_keep_grades_an_answer_inside_an_unclosed_thought():
    assert grade("math", r"<think>It is \boxed{5}", thoughts="keep").parts["accuracy"] == 1


@pytest.mark.parametrize("name", STATED)
def test_a_completion_without_thought_scores_as_before(name):
    """As of Qwen3 with thinking off."""
    for text in (*STATED[name], "", "no answer"):
        kept, stripped = grade(name, text, thoughts="keep"), grade(name, text)
        assert stripped == Score(kept.reward, {**kept.parts, "unclosed_thought": 0.0}, graded=True)


def test_the_length_penalty_counts_the_thought():
    settings = {"overlong": OverlongPenalty(buffer_tokens=100)}  # 50 of 100 tokens
    score = grade("math", r"<think>a</think>\boxed{5}", **settings)
    assert score == Score(0.5, {"accuracy": 1, "format": 1, "unclosed_thought": 0, "overlong": -0.5}, graded=True)


@pytest.mark.parametrize("overlong", [None, OverlongPenalty(buffer_tokens=4)])
def test_built_in_rewards_travel_to_a_grading_process(overlong):
    config = MathReward(thoughts="strip", overlong=overlong)
    reward = pickle.loads(pickle.dumps(make_reward(config, max_completion_tokens=100, prompt_opens_thought=True)))
    scores = reward(r"a \boxed{4}</think> \boxed{5}", Problem("p", "?", (), "5", "test"), 5, "stop")
    assert scores.parts["accuracy"] == scores.parts["format"] == 1


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("overlong", [None, OverlongPenalty(buffer_tokens=4)])
@pytest.mark.parametrize(("thoughts", "lengths"), [("strip", [2, 0, 0]), ("keep", [13, 3, 3])])
def test_a_user_s_reward_gets_the_text_after_the_thought(tmp_path, batch, overlong, thoughts, lengths):
    """In a grading process, where a user's reward may read its files and a built-in one may not."""
    (tmp_path / "seen.txt").write_text("0")
    file: Path = tmp_path / "mine.py"
    read = f"float(open({str(tmp_path / 'seen.txt')!r}).read())"
    one = f"{{'reward': len(%s) + {read}, 'accuracy': 0}}"
    body = f"[{one % 'text'} for text in text]" if batch else one % "text"
    file.write_text(f"def reward(text, problem, num_tokens, finish_reason):\n    return {body}\n")
    config = UserReward(file=file, batch=batch, thoughts=thoughts, overlong=overlong)
    texts = ["ab </think>cd", "abc", "abc"]
    completions = [completion(text) for text in texts]
    reward = make_reward(config, max_completion_tokens=100, prompt_opens_thought=True)
    with GradingPool(reward, 1, 10.0) as pool:
        scores = pool.submit([Problem("p", "?", (), "5", "test")] * 3, completions).result(60)
        assert pool.last_failures() == []
    assert [score.reward for score in scores] == lengths
    unclosed = [score.parts.get("unclosed_thought") for score in scores]
    assert unclosed == ([0, 1, 1] if thoughts == "strip" else [None] * 3)


@pytest.mark.parametrize(
    ("ending", "arguments", "opened"),
    [
        ("", {}, False),
        ("<think>\n", {}, True),
        ("{{ '' if enable_thinking else '<think>\n\n</think>\n\n' }}", {"enable_thinking": False}, False),
    ],
)
def test_a_run_finds_out_whether_its_chat_template_opens_a_thought(tmp_path, ending, arguments, opened):
    load_processor(ModelConfig()).save_pretrained(tmp_path)
    template = tmp_path / "chat_template.jinja"
    template.write_text(template.read_text() + ending)
    data = {"chat_template_arguments": arguments}
    config = build_experiment({"name": "x", "reward": {"thoughts": "strip"}, "data": data})
    with closing(make_grader(config, tmp_path, tmp_path / "verdicts")) as pool:
        (score,) = pool.submit([Problem("p", "?", (), "5", "test")], [completion(r"\boxed{5}")]).result(60)
    assert score.parts == {"accuracy": not opened, "format": 0, "unclosed_thought": opened}


def test_a_row_may_begin_outside_the_thought_that_other_prompts_open():
    """Its own arguments of the chat template decide. The problems travel to a grading process."""
    opened_by_row = [None, True, False]
    problems = [Problem("p", "?", (), "5", "test", opens_thought=opened) for opened in opened_by_row]
    with GradingPool(make("math", opened=True), 1, 10.0) as pool:
        opened = pool.submit(problems, [completion(r"\boxed{5}")] * 3).result(60)
    with GradingPool(make("math", opened=False), 1, 10.0) as pool:
        closed = pool.submit(problems, [completion(r"\boxed{5}")] * 3).result(60)
    assert [score.parts["unclosed_thought"] for score in opened] == [1, 1, 0]
    assert [score.parts["accuracy"] for score in opened] == [0, 0, 1]
    assert [score.parts["unclosed_thought"] for score in closed] == [0, 1, 0]


@pytest.mark.parametrize(
    ("text", "tokens", "expected"),
    [
        (r"<think>\boxed{4}</think>It is \boxed{5}.", 12288, 1.0),
        (r"<think>\boxed{4}</think>It is \boxed{5}.", 14336, 1 - 0.5 / 2),  # half way into the last 4,096 tokens
        (r"<think>\boxed{4}</think>It is \boxed{5}.", 16384, 1 - 0.5),
        (r"<think>\boxed{5}</think>It is \boxed{4}.", 12288, 0.0),
        (r"<think>It is \boxed{5}.", 16384, -0.5),
        (r"It is \boxed{5}.", 100, 1.0),
    ],
)
def test_the_recipe_for_a_model_that_thinks_grades_the_answer_and_has_a_budget(text, tokens, expected):
    config = configure("grpo-math12k-qwen3-8b-thinking")
    reward = make_reward(config.reward, max_completion_tokens=config.rollout.max_completion_tokens)
    problem = Problem("p", "?", (), "5", "test")
    assert reward(text, problem, tokens, "stop").reward == expected


def test_think_tags_that_completions_lose_are_refused(tmp_path):
    processor = load_processor(ModelConfig())
    processor.tokenizer.add_tokens([AddedToken("</think>", special=True)], special_tokens=True)
    processor.save_pretrained(tmp_path)
    config = build_experiment({"name": "x", "reward": {"thoughts": "strip"}})
    with pytest.raises(ConfigError, match=r"tokenizer has </think> as special tokens.*Set reward\.thoughts=keep"):
        make_grader(config, tmp_path, tmp_path / "verdicts")
