"""The tiny text policies: they answer in the format of their reward, and load as any language model does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM

from rlcore.config import DataConfig, ModelConfig, TinyModelConfig
from rlcore.data.processor import TextProcessor, load_processor
from rlcore.data.prompts import PromptBuilder
from rlcore.jobs.bootstrap import bootstrap
from rlcore.models.tiny import (
    build_text_model,
    completion_text,
    create_tiny_policy,
)
from rlcore.specs import BootstrapSpec
from tests.unit.tiny_tasks import MAX_COMPLETION_TOKENS, TASKS, drawn, reward, tokenizer

torch.set_num_threads(1)


@pytest.mark.parametrize("task", TASKS)
def test_worked_answers_are_short_and_earn_the_whole_reward(task: str) -> None:
    for index in range(100):
        problem = drawn(task, index)
        text = completion_text(problem)
        assert reward(task, problem, text) == 1
        assert len(tokenizer()(text)["input_ids"]) + 1 <= MAX_COMPLETION_TOKENS[task]


def test_marks_are_single_tokens_that_stay_when_decoded() -> None:
    ids = tokenizer()("<think>1</think><answer>2</answer>")["input_ids"]
    assert len(ids) == 6
    assert tokenizer().decode(ids, skip_special_tokens=True) == "<think>1</think><answer>2</answer>"


@pytest.mark.parametrize("task", TASKS)
def test_the_folder_loads_as_a_language_model(tmp_path: Path, task: str) -> None:
    parameters = create_tiny_policy(tmp_path, TinyModelConfig(task=task, warm_start_steps=2))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert isinstance(loaded, Qwen2ForCausalLM)
    assert sum(p.numel() for p in loaded.parameters()) == parameters < 1e6
    assert loaded.config.hidden_size // loaded.config.num_attention_heads >= 32  # for vLLM's CPU attention
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == tokenizer().chat_template
    found = load_processor(ModelConfig(path=str(tmp_path)))
    assert isinstance(found, TextProcessor)
    fresh = load_processor(ModelConfig(tiny=TinyModelConfig(task=task)))
    question = drawn(task, 0).question
    tokens = [
        PromptBuilder(p, DataConfig(template="tiny")).unexpanded_tokens(question, 0).tolist() for p in (found, fresh)
    ]
    assert tokens[0] == tokens[1]


def test_weights_depend_on_the_seed_and_the_generator_is_unchanged() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    same, again, other = (build_text_model(tokenizer(), seed).lm_head.weight for seed in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(same, again)
    assert not torch.equal(same, other)


@pytest.mark.parametrize("task", TASKS)
def test_warm_start_is_reproducible_and_learns(tmp_path: Path, task: str) -> None:
    for name, steps in (("a", 2), ("b", 2), ("cold", 0)):
        (tmp_path / name).mkdir()
        create_tiny_policy(tmp_path / name, TinyModelConfig(task=task, warm_start_steps=steps))
    first, again, cold = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b", "cold"))
    assert first == again != cold


def test_bootstrap_makes_a_text_policy(tmp_path: Path) -> None:
    model = ModelConfig(tiny=TinyModelConfig(task="sums", warm_start_steps=0))
    threads = torch.get_num_threads()
    try:
        found = bootstrap(BootstrapSpec(result=tmp_path / "result.json", model=model, models_dir=tmp_path / "models"))
    finally:
        torch.set_num_threads(threads)
    assert found.num_parameters == sum(p.numel() for p in build_text_model(tokenizer(), 0).parameters())
