"""Each tiny policy is left with something to learn: its warm start stops early, with some answers right."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import get_args

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Qwen2ForCausalLM

from rlcore.config import DataConfig, TinyModelConfig
from rlcore.config.policy import TinyFamily
from rlcore.data.processor import TextProcessor
from rlcore.data.prompts import PromptBuilder
from rlcore.data.synthetic.arithmetic import ArithmeticProblem
from rlcore.data.synthetic.geometry import draw_problem
from rlcore.data.tiny import build_processor
from rlcore.models import tiny
from rlcore.models.tiny import completion_text
from tests import warm_start
from tests.unit.tiny_tasks import MAX_COMPLETION_TOKENS, TASKS, drawn, reward, tokenizer
from tests.warm_start import warm_started

torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def each_picture_is_drawn_once() -> Iterator[None]:
    """All families learn from the same problems."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "draw_problem", cache(draw_problem))
        yield


@pytest.mark.parametrize("family", get_args(TinyFamily))
def test_the_policies_that_see(family: TinyFamily) -> None:
    """The loss is past mere guessing and far from nothing."""
    made = warm_started(TinyModelConfig(family=family))
    assert 20 < made.steps < 600
    model = AutoModelForImageTextToText.from_pretrained(made.folder, dtype=torch.float32)
    processor = build_processor(family)
    batch = [draw_problem("validation", index, 0) for index in range(32)]
    right = 0.0
    for problem in batch:
        content = [{"type": "image"}, {"type": "text", "text": problem.question}]
        prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        text = prompt + completion_text(problem)
        inputs = processor(text=[text], images=[problem.picture], return_tensors="pt")
        answer = len(processor.tokenizer(completion_text(problem))["input_ids"])
        with torch.no_grad():
            logps = model(**inputs).logits[0, :-1].log_softmax(-1)
        taken = logps.gather(1, inputs["input_ids"][0, 1:, None])[-answer:, 0]
        right += math.exp(taken.sum().item()) / len(batch)
    assert 0.1 < right < 0.7  # the mean probability of the whole right completion


def sampled(model: Qwen2ForCausalLM, problems: list[ArithmeticProblem], max_tokens: int) -> list[str]:
    """One completion of each, at temperature 1."""
    prompts = PromptBuilder(TextProcessor(tokenizer()), DataConfig(template="tiny"))
    ids = [prompts.unexpanded_tokens(problem.question, 0).tolist() for problem in problems]
    length = max(map(len, ids))
    pad = tokenizer().pad_token_id
    padded = torch.tensor([[pad] * (length - len(row)) + row for row in ids])
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in ids])
    torch.manual_seed(0)
    out = model.generate(input_ids=padded, attention_mask=mask, max_new_tokens=max_tokens)
    return tokenizer().batch_decode(out[:, length:], skip_special_tokens=True)


@pytest.mark.parametrize("task", TASKS)
def test_the_policies_of_text(task: str) -> None:
    """The format is certain, and an answer is right now and then."""
    made = warm_started(TinyModelConfig(task=task))
    assert 20 < made.steps < 600
    model = AutoModelForCausalLM.from_pretrained(made.folder, dtype=torch.float32)
    problems = [drawn(task, index) for index in range(256)]
    texts = sampled(model, problems, MAX_COMPLETION_TOKENS[task])
    rewards = [reward(task, problem, text) for problem, text in zip(problems, texts, strict=True)]
    mark = "####" if task == "sums" else "</answer>"
    assert sum(mark in text for text in texts) > 0.85 * len(texts)
    assert 0.15 < sum(value == 1 for value in rewards) / len(rewards) < 0.65


def test_a_policy_is_made_once_and_another_one_for_another_configuration_or_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    def counted(folder: Path, config: TinyModelConfig, make: Callable[[Path, TinyModelConfig], int]) -> int:
        made.append(folder)
        return make(folder, config)

    monkeypatch.setenv("RLFLOW_TEST_CACHE", str(tmp_path))
    monkeypatch.setattr(warm_start, "_make", partial(counted, make=warm_start._make))
    config = TinyModelConfig(task="sums", warm_start_steps=2)
    with ThreadPool(2) as callers:
        first, again = callers.map(warm_started, [config, config])
    assert first == again
    assert (first.steps, len(made)) == (2, 1)
    other = warm_started(TinyModelConfig(task="sums", warm_start_steps=1))
    assert (other.steps, len(made)) == (1, 2)
    monkeypatch.setattr("infra.provenance.code_digest", lambda *_: "changed")
    assert warm_started(config).folder not in (first.folder, other.folder)
