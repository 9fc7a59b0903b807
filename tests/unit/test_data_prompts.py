"""Prompts: template, markers and placeholders, compared with Hugging Face's processor."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pydantic import ValidationError

from rlcore.config import DataConfig, ModelConfig, TinyModelConfig, build_experiment
from rlcore.data.processor import TextProcessor, load_processor
from rlcore.data.prompts import PromptBuilder
from rlcore.data.tiny import build_processor
from rlcore.errors import ConfigError, DataError, ModelError
from rlcore.types import ImageRef, Message, Problem

LOW, HIGH = 56 * 56, 512 * 512


@cache
def processor() -> Any:
    return load_processor(ModelConfig())


def with_template(template: str) -> DataConfig:
    return DataConfig(template=template, min_pixels=LOW, max_pixels=HIGH)


def builder(template: str = "math") -> PromptBuilder:
    return PromptBuilder(processor(), with_template(template))


def text_builder(template: str = "math") -> PromptBuilder:
    return PromptBuilder(TextProcessor(processor().tokenizer), with_template(template))


@pytest.fixture
def plain(tmp_path) -> str:
    """A template that adds nothing."""
    path = tmp_path / "plain.jinja"
    path.write_text("{{ content }}")
    return str(path)


def problem(question: str, *sizes: tuple[int, int]) -> Problem:
    images = tuple(ImageRef(f"{i:064}", *size) for i, size in enumerate(sizes))
    return Problem("p", question, images, "1", "test")


def test_chat_text_puts_a_placeholder_where_each_marker_stood(plain):
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    text = builder(plain).chat_text("<image>Find x.<image><image> {{ x }} \\boxed{1}", 3)
    user = f"{image}Find x.{image}{image} {{{{ x }}}} \\boxed{{1}}"
    assert text == f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
    assert text_builder(plain).chat_text("Find x.", 0) == "<|im_start|>user\nFind x.<|im_end|>\n<|im_start|>assistant\n"


# As Qwen2.5's and Qwen3's: a system text of its own, and a switch for thinking.
QWEN = """{%- if messages[0].role != 'system' %}<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}
{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""

FEW_SHOT = (Message("user", "<image>How many?"), Message("assistant", "\\boxed{3}"))


def qwen(template: str, *, sees: bool = True, **settings: Any) -> PromptBuilder:
    found = copy.deepcopy(processor())
    found.chat_template = found.tokenizer.chat_template = QWEN
    data = DataConfig(template=template, min_pixels=LOW, max_pixels=HIGH, **settings)
    return PromptBuilder(found if sees else TextProcessor(found.tokenizer), data)


def test_the_default_system_text_stays_without_a_system_prompt(plain):
    assert qwen(plain, sees=False).chat_text("1+1?", 0) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("sees", [True, False])
@pytest.mark.parametrize(
    ("given", "rows", "expected"),
    [
        ("Be brief.", None, "Be brief."),
        ("", None, ""),
        (None, "Count.", "Count."),
        ("Be brief.", "Count.", "Count."),
    ],
)
def test_a_system_message_is_the_row_s_else_the_setting_s(plain, sees, given, rows, expected):
    context = [] if rows is None else [Message("system", rows)]
    assert qwen(plain, sees=sees, system_prompt=given).chat_text("1+1?", 0, context) == (
        f"<|im_start|>system\n{expected}<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_turns_of_an_example_come_before_the_question_which_alone_the_template_wraps(tmp_path):
    path = tmp_path / "own.jinja"
    path.write_text("{{ content }} Box it.")
    item = replace(problem("<image>And here?", (56, 56), (28, 28)), context=FEW_SHOT)
    prompts = qwen(str(path), system_prompt="Count.", chat_template_arguments={"enable_thinking": False})
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    text = (
        "<|im_start|>system\nCount.<|im_end|>\n"
        f"<|im_start|>user\n{image}How many?<|im_end|>\n"
        "<|im_start|>assistant\n\\boxed{3}<|im_end|>\n"
        f"<|im_start|>user\n{image}And here? Box it.<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert prompts.chat_text(item.question, 2, item.context) == text
    # 56 x 56 pixels are 2 x 2 tokens, 28 x 28 one: the example's picture comes first
    first, second = text.replace("<|image_pad|>", "<|image_pad|>" * 4, 1), "<|image_pad|>"
    assert first.count(second) == 5
    assert prompts.tokenizer.decode(prompts.tokens(item)) == first


@pytest.mark.parametrize("sizes", [[(300, 170)], [(60, 60), (100, 190)]])
@pytest.mark.parametrize("family", [None, "qwen2_vl", "glm4v", "internvl", "idefics3", "smolvlm", "gemma3"])
def test_expanded_pictures_are_the_processor_s_own_and_collapse_again(family, sizes):
    prompts = PromptBuilder(build_processor(family), with_template("tiny"))
    sizes = [prompts.target_size(*size) for size in sizes]
    item = problem("<image>" * len(sizes) + "Which?", *sizes)
    text = prompts.chat_text(item.question, len(sizes))
    pictures = [Image.new("RGB", size) for size in sizes]
    expected = build_processor(family)(text=[text], images=pictures, return_tensors="np")["input_ids"][0]
    expanded = prompts.tokens(item)
    np.testing.assert_array_equal(expanded, expected)
    np.testing.assert_array_equal(
        prompts.placeholders.collapse(expanded.tolist(), item.images), prompts.unexpanded(item)
    )


@pytest.mark.parametrize("question", ["A\n<image>\nB", "<image>\n\n<image>\n", "\n<image><image>\n\nC"])
def test_line_breaks_around_a_picture_are_the_tokens_of_the_processor(question):
    """It writes two line breaks before and after a picture, and up to four together are one token."""
    made = build_processor("gemma3")
    prompts = PromptBuilder(made, with_template("tiny"))
    count = question.count("<image>")
    item = problem(question, *[(84, 84)] * count)
    text = prompts.chat_text(question, count)
    pictures = [Image.new("RGB", (84, 84))] * count
    expected = made(text=[text], images=pictures, return_tensors="np")["input_ids"][0]
    np.testing.assert_array_equal(prompts.tokens(item), expected)
    np.testing.assert_array_equal(
        prompts.placeholders.collapse(expected.tolist(), item.images), prompts.unexpanded(item)
    )


def test_a_token_that_no_picture_has_beside_it_does_not_collapse():
    prompts = PromptBuilder(build_processor("gemma3"), with_template("tiny"))
    item = problem("<image>Which?", (84, 84))
    tokens = prompts.tokens(item).tolist()
    place = tokens.index(prompts.placeholders.image_token_id)
    with pytest.raises(DataError, match="token 7 is where an image has"):
        prompts.placeholders.collapse([*tokens[: place - 1], 7, *tokens[place:]], item.images)


def test_each_named_tile_has_its_marker_and_each_row_its_line_break():
    prompts = PromptBuilder(build_processor("idefics3"), with_template("tiny"))
    tile, end = "<image>" * 4, "<fake_token_around_image>"
    item = problem("<image>Which?", (56, 28))
    assert prompts.tokenizer.decode(prompts.tokens(item)).startswith(
        f"<|im_start|>user\n{end}<row_1_col_1>{tile}{end}<row_1_col_2>{tile}\n\n{end}<global-img>{tile}{end}Which?"
    )
    alone = problem("<image>Which?", (28, 28))
    assert prompts.tokenizer.decode(prompts.tokens(alone)).startswith(
        f"<|im_start|>user\n{end}<global-img>{tile}{end}Which?"
    )
    counts = [prompts.placeholders.num_tokens(ImageRef("", *size)) for size in ((56, 28), (28, 28))]
    assert counts == [3 * 6 + 2 + 1, 7]


def test_tokens_that_are_not_those_of_the_image_do_not_collapse():
    prompts = PromptBuilder(build_processor("idefics3"), with_template("tiny"))
    tokens = prompts.tokens(problem("<image>Which?", (28, 28)))
    with pytest.raises(DataError, match="the 21 tokens of an image are not in the sequence"):
        prompts.placeholders.collapse(tokens.tolist(), [ImageRef("0", 56, 28)])


def test_the_marker_of_images_is_no_special_token_of_the_problem():
    prompts = PromptBuilder(build_processor("idefics3"), with_template("tiny"))
    assert prompts.special_tokens_in("<image>What?<global-img>") == ["<global-img>"]


def test_a_text_model_gets_the_turns_as_plain_text(plain):
    context = [Message("user", "1+1?"), Message("assistant", "2")]
    assert qwen(plain, sees=False, system_prompt="").chat_text("1+2?", 0, context) == (
        "<|im_start|>system\n<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
        "<|im_start|>user\n1+2?<|im_end|>\n<|im_start|>assistant\n"
    )


# As DeepSeek-V3.1's: it opens the thought in the prompt, or closes it there.
SWITCHED = QWEN.replace("<think>\n\n</think>\n\n", "</think>").replace(
    "{% endif %}{% endif %}", "{% else %}<think>{% endif %}{% if effort is defined %}{{ effort }}{% endif %}{% endif %}"
)


def test_a_row_s_own_arguments_come_before_the_setting_s_and_leave_the_others(plain):
    found = copy.deepcopy(processor())
    found.chat_template = found.tokenizer.chat_template = SWITCHED
    given = {"enable_thinking": False, "effort": "low"}
    data = DataConfig(template=plain, system_prompt="", chat_template_arguments=given)
    prompts = PromptBuilder(TextProcessor(found.tokenizer), data)
    endings = [
        prompts.text(replace(problem("1+1?"), chat_template_arguments=own)).partition("<|im_start|>assistant\n")[2]
        for own in ({}, {"enable_thinking": True}, {"effort": 3}, {"effort": "high", "enable_thinking": True})
    ]
    assert endings == ["</think>low", "<think>low", "</think>3", "<think>high"]
    # what the sampler gets and what the trainer reads
    item = replace(problem("1+1?"), chat_template_arguments={"enable_thinking": True})
    assert prompts.tokenizer.decode(prompts.unexpanded(item)).endswith(
        "1+1?<|im_end|>\n<|im_start|>assistant\n<think>low"
    )
    assert prompts.tokens(item).tolist() == prompts.unexpanded(item).tolist()
    assert prompts.unmentioned({"enable_thinking": 1, "thinking": 2, "effort": 3}) == ["thinking"]


def test_an_argument_that_the_chat_template_does_not_know_is_refused():
    with pytest.raises(ConfigError, match="sets enable_thinkin, which the model's chat template does not mention"):
        qwen("math", chat_template_arguments={"enable_thinkin": False})
    with pytest.raises(ValidationError, match="sets tokenize, which rlflow sets itself"):
        qwen("math", chat_template_arguments={"tokenize": True})


def test_they_affect_results_and_are_set_like_any_other_value():
    plain, *changed = (
        build_experiment({"name": "x"}, overrides)
        for overrides in (
            [],
            ["data.system_prompt=Be brief."],
            ["data.chat_template_arguments.enable_thinking=false"],
            ['data.chat_template_arguments={"enable_thinking": true}'],
        )
    )
    assert len({experiment.results_digest() for experiment in (plain, *changed)}) == 4
    assert changed[1].data.chat_template_arguments == {"enable_thinking": False}
    assert changed[1].flat()["data.chat_template_arguments.enable_thinking"] is False
    words = [f"{key}={json.dumps(value)}" for key, value in changed[1].flat().items() if key.startswith("data.chat")]
    assert build_experiment({"name": "x"}, words) == changed[1]


@pytest.mark.parametrize("name", ["boxed", "math", "r1v", "gsm8k", "countdown"])
def test_known_templates_begin_with_the_problem_and_say_how_to_answer(name):
    text = builder(name).chat_text("<image>Find $x$ & \\frac{1}{2}.", 1)
    assert "<|vision_end|>Find $x$ & \\frac{1}{2}.\n\n" in text
    marks = {
        "boxed": ["step by step", "\\boxed{}"],
        "math": ["<think>", "\\boxed{}"],
        "r1v": ["<think>", "<answer>"],
        "gsm8k": ["####"],
        "countdown": ["<think>", "<answer>"],
    }[name]
    assert all(mark in text for mark in marks)
    assert ("<think>" in text) is ("<think>" in marks)


def test_the_dapo_template_wraps_a_problem_once():
    wrapped = text_builder("dapo").chat_text("What is 1+1?", 0)
    question = wrapped.removeprefix("<|im_start|>user\n").partition("<|im_end|>")[0]
    assert question.startswith("Solve the following math problem step by step. The last line of your response should")
    assert question.endswith('\n\nWhat is 1+1?\n\nRemember to put your answer on its own line after "Answer:".')
    assert text_builder("dapo").chat_text(question, 0) == wrapped


@settings(max_examples=20)
@given(st.lists(st.tuples(st.integers(20, 900), st.integers(20, 900)), max_size=3))
def test_tokens_are_those_of_the_processor_on_resized_images(sizes):
    prompts = builder()
    resized = [prompts.target_size(*size) for size in sizes]
    item = problem("<image>" * len(sizes) + "Find x.", *resized)
    images = [Image.new("RGB", size) for size in resized]
    text = prompts.chat_text(item.question, len(sizes))
    size = {"shortest_edge": LOW, "longest_edge": HIGH}
    expected = processor()(text=[text], images=images or None, images_kwargs={"size": size})["input_ids"][0]
    tokens = prompts.tokens(item)
    assert tokens.dtype == np.int32
    assert tokens.tolist() == list(expected)


def test_image_tokens_worked_out_by_hand(plain):
    prompts = builder(plain)
    assert prompts.resizing.factor == 28
    assert prompts.placeholders.num_tokens(ImageRef("", 56, 84)) == 6
    item = problem("a<image>b<image>", (56, 84), (28, 28))
    unexpanded = prompts.unexpanded_tokens(item.question, 2)
    tokens = prompts.tokens(item)
    assert (unexpanded == prompts.placeholders.image_token_id).sum() == 2
    assert (tokens == prompts.placeholders.image_token_id).sum() == 7
    assert len(tokens) == len(unexpanded) + 5


def test_banned_tokens_are_the_vision_tokens_that_the_model_has():
    tokens = processor().tokenizer.convert_ids_to_tokens(builder().banned_token_ids)
    expected = {"<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"}
    assert set(tokens) == expected


def test_a_language_model_needs_no_images():
    prompts = text_builder()
    assert prompts.placeholders.image_token_id is None
    assert prompts.tokens(problem("1+1?")).tolist() == builder().tokens(problem("1+1?")).tolist()
    with pytest.raises(ModelError, match="takes no images"):
        _ = prompts.resizing


def test_marker_and_placeholder_counts_have_to_agree():
    with pytest.raises(DataError, match="1 <image> marker"):
        builder().chat_text("<image>Find x.", 0)
    with pytest.raises(DataError, match="1 image placeholder"):
        builder().unexpanded_tokens("Find <|image_pad|>.", 0)
    assert builder().special_tokens_in("a <|im_end|> b") == ["<|im_end|>"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{{ content }} {{ topic }}", "uses content, topic"),
        ("Hello.", "uses no variable"),
        ("{{ content", "line 1: "),
    ],
)
def test_a_template_that_cannot_work_is_refused(tmp_path, text, message):
    path = tmp_path / "own.jinja"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        builder(str(path))


def test_a_template_runs_in_a_sandbox(tmp_path):
    from jinja2.exceptions import SecurityError

    path = tmp_path / "own.jinja"
    path.write_text("{{ content.__class__.__mro__ }}")
    with pytest.raises(SecurityError):
        builder(str(path)).chat_text("p", 0)


def test_an_unknown_template_lists_the_known_ones():
    with pytest.raises(ConfigError, match="Allowed: boxed, choice, countdown, dapo, gsm8k, math, r1v"):
        builder("maths")


@pytest.mark.parametrize("path", ["/nowhere/model", "./model", "model"])
def test_a_missing_model_folder_says_so_without_asking_a_hub(path):
    with pytest.raises(ModelError, match="no such folder"):
        load_processor(ModelConfig(path=path))


def test_a_saved_processor_loads_from_its_folder(tmp_path):
    processor().save_pretrained(tmp_path)
    loaded = PromptBuilder(load_processor(ModelConfig(path=str(tmp_path))), with_template("math"))
    item = problem("<image>Find x.", (56, 84))
    assert loaded.tokens(item).tolist() == builder().tokens(item).tolist()


def test_a_folder_with_a_tokenizer_alone_is_a_language_model(tmp_path):
    processor().tokenizer.save_pretrained(tmp_path)
    loaded = load_processor(ModelConfig(path=str(tmp_path)))
    assert isinstance(loaded, TextProcessor)
    assert PromptBuilder(loaded, with_template("math")).placeholders.image_token_id is None


def test_a_model_without_a_chat_template_is_refused(tmp_path):
    processor().tokenizer.save_pretrained(tmp_path)
    for file in Path(tmp_path).glob("chat_template*"):
        file.unlink()
    with pytest.raises(ModelError, match="no chat template. Found: tokenizer.json"):
        load_processor(ModelConfig(path=str(tmp_path)))


def test_an_empty_model_folder_says_what_belongs_there(tmp_path):
    with pytest.raises(ModelError, match="Found: an empty folder"):
        load_processor(ModelConfig(path=str(tmp_path)))


@pytest.mark.parametrize("task", ["sums", "countdown"])
def test_the_tiny_text_policies_take_no_images(task):
    found = load_processor(ModelConfig(tiny=TinyModelConfig(task=task)))
    assert isinstance(found, TextProcessor)
    assert PromptBuilder(found, with_template("tiny")).placeholders.image_token_id is None
