"""Tiny policies without eyes: a Qwen2 of under a million parameters that begins to add, or to play countdown.

As ``tiny.py`` for pictures: a short supervised run on drawn problems makes the format certain and the answers right
now and then; the rest is left to reinforcement learning.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from rlcore.config import CountdownConfig, TinyModelConfig
from rlcore.data.synthetic.arithmetic import ArithmeticProblem, draw_countdown, draw_sum
from rlcore.data.tiny import END_OF_TURN, PAD, build_text_tokenizer
from rlcore.models.tiny_parts import IGNORED, draw_weights, learn_until, sampling_defaults

GAME = CountdownConfig(numbers=(3, 4), max_number=12, max_target=40, operations=("+", "-"))
"""The countdown that its policy is warm-started on; grpo-countdown-tiny draws the same kind."""

_HIDDEN = 128
_HEADS = 4  # head size 32, the smallest that vLLM's CPU attention takes
_LAYERS = 3
_ROPE_THETA = 100.0  # sequences are a few dozen bytes long, and which byte comes when is all that counts
_WEIGHT_STD = 0.09  # about 1 / sqrt(_HIDDEN), as for the policy that sees
_EMBEDDING_STD = 1.0
_BATCH = {"sums": 16, "countdown": 32}
_LEARNING_RATE = 2e-3
_ENOUGH_LOSS = {"sums": 0.10, "countdown": 0.44}  # nats per token, running mean


def create_text_policy(folder: Path, config: TinyModelConfig) -> int:
    """Build, warm-start and save the policy to ``folder``; returns its number of parameters.

    The same config gives the same weights on the same machine and library versions.
    """
    tokenizer = build_text_tokenizer()
    model = build_text_model(tokenizer, config.seed)
    warm_start_text(model, tokenizer, config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def build_text_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2ForCausalLM:
    """Random weights in float32; torch's default generator is left as it was."""
    token = tokenizer.convert_tokens_to_ids
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=_HIDDEN,
        intermediate_size=3 * _HIDDEN,
        num_hidden_layers=_LAYERS,
        num_attention_heads=_HEADS,
        num_key_value_heads=_HEADS // 2,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": _ROPE_THETA},
        bos_token_id=token(PAD),
        eos_token_id=token(END_OF_TURN),
        pad_token_id=token(PAD),
        tie_word_embeddings=False,
        dtype="float32",
    )
    model: Qwen2ForCausalLM = draw_weights(lambda: Qwen2ForCausalLM(config), seed, _WEIGHT_STD, _EMBEDDING_STD)
    model.generation_config = sampling_defaults(tokenizer)
    return model


def warm_start_text(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, config: TinyModelConfig) -> int:
    """Train in place on worked answers to ``warmup`` problems, each drawn once; returns the steps taken.

    The loss is the mean negative log-likelihood per completion token; the run ends when its running mean falls to the
    task's ``_ENOUGH_LOSS``, after ``config.warm_start_steps`` steps at the latest.
    """

    size = _BATCH[config.task]

    def loss_of(step: int) -> Tensor:
        indices = range((step - 1) * size, step * size)
        return _supervised_loss(model, [_worked_example(tokenizer, draw(config, index)) for index in indices])

    return learn_until(
        model,
        loss_of,
        learning_rate=_LEARNING_RATE,
        enough_loss=_ENOUGH_LOSS[config.task],
        max_steps=config.warm_start_steps,
    )


def draw(config: TinyModelConfig, index: int) -> ArithmeticProblem:
    """Warm-up problem ``index`` of the policy's task."""
    if config.task == "sums":
        return draw_sum("warmup", index, config.seed)
    return draw_countdown("warmup", index, config.seed, GAME)


def completion_text(problem: ArithmeticProblem) -> str:
    """The worked answer in the format of the ``gsm8k`` or the ``countdown`` reward, without the end-of-turn token.

    A game is answered at once: thinking aloud takes this policy minutes to learn, and guessing well a few seconds.
    """
    if problem.question.endswith("="):
        return f"{problem.reasoning}\n#### {problem.answer}"
    return f"<answer>{problem.solution}</answer>"


@dataclass(frozen=True, slots=True)
class _Example:
    token_ids: Tensor  # [L]
    labels: Tensor  # [L], IGNORED on the prompt


def _worked_example(tokenizer: PreTrainedTokenizerFast, problem: ArithmeticProblem) -> _Example:
    message = {"role": "user", "content": problem.question}
    prompt = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    prompt_ids = torch.tensor(tokenizer.encode(prompt, add_special_tokens=False))
    completion = torch.tensor(tokenizer.encode(completion_text(problem) + END_OF_TURN, add_special_tokens=False))
    return _Example(
        token_ids=torch.cat([prompt_ids, completion]),
        labels=torch.cat([torch.full_like(prompt_ids, IGNORED), completion]),
    )


def _supervised_loss(model: Qwen2ForCausalLM, batch: list[_Example]) -> Tensor:
    padded = torch.nn.utils.rnn.pad_sequence
    pad = model.config.pad_token_id
    token_ids = padded([example.token_ids for example in batch], batch_first=True, padding_value=pad)
    labels = padded([example.labels for example in batch], batch_first=True, padding_value=IGNORED)
    mask = padded([torch.ones_like(example.token_ids) for example in batch], batch_first=True)
    loss: Tensor = model(input_ids=token_ids, attention_mask=mask, labels=labels).loss
    return loss
