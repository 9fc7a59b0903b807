"""The embedded default policy ``tiny``: a real Qwen2.5-VL of about a million parameters, made on the spot.

It reads bytes, sees pictures through Qwen2.5-VL's own vision tower and image processor, and saves as an
ordinary Hugging Face folder. Random weights are never right and so never rewarded; a short supervised run on
synthetic problems teaches the format and a first blurred reading, and stops there: the rest is left to
reinforcement learning. Its siblings without eyes are in ``tiny_text.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
)

from rlcore.config import TinyModelConfig
from rlcore.data.synthetic.geometry import SyntheticProblem, draw_problem
from rlcore.data.tiny import END_OF_TURN, PAD, build_processor
from rlcore.models.tiny_parts import IGNORED, draw_weights, learn_until, sampling_defaults

_HIDDEN = 128
_HEADS = 4  # head size 32, the smallest that vLLM's CPU attention takes
_WEIGHT_STD = 0.09  # about 1 / sqrt(_HIDDEN); the usual 0.02 suits widths in the thousands and is slow here
_EMBEDDING_STD = 1.0

_BATCH = 16
_LEARNING_RATE = 7e-4
_ENOUGH_LOSS = 0.11  # nats per token, running mean: the format is certain, the reading is not


@dataclass(frozen=True, slots=True)
class _Example:
    """One problem with its worked answer. N patches, L tokens."""

    token_ids: Tensor  # [L]
    labels: Tensor  # [L], IGNORED on the prompt
    pixel_values: Tensor  # [N, 1176]
    image_grid_thw: Tensor  # [1, 3]


def create_tiny_policy(folder: Path, config: TinyModelConfig, *, tied: bool = True) -> int:
    """Build, warm-start and save the policy to ``folder``; returns its number of parameters.

    The same config gives the same weights on the same machine and library versions.

    Args:
        tied: the LM head is the embedding, as in Qwen2.5-VL-3B; else it has a matrix of its own, as in the 7B. Text
            policies always have one of their own, as Qwen2-7B does.
    """
    if config.task != "geometry":
        from rlcore.models.tiny_text import create_text_policy

        return create_text_policy(folder, config)
    processor = build_processor()
    model = build_model(processor, config.seed, tied=tied)
    warm_start(model, processor, config)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def build_model(processor: Qwen2_5_VLProcessor, seed: int, *, tied: bool = True) -> Qwen2_5_VLForConditionalGeneration:
    """Random weights in float32; torch's default generator is left as it was."""
    token = processor.tokenizer.convert_tokens_to_ids
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(processor.tokenizer),
            "hidden_size": _HIDDEN,
            "intermediate_size": 3 * _HIDDEN,
            "num_hidden_layers": 3,
            "num_attention_heads": _HEADS,
            "num_key_value_heads": _HEADS // 2,
            "max_position_embeddings": 4096,
            # With the usual base of 10,000, neighbours in a picture are told apart by 0.003 radian only.
            "rope_parameters": {"rope_type": "default", "rope_theta": 4.0, "mrope_section": [4, 6, 6]},
            "bos_token_id": token(PAD),
            "eos_token_id": token(END_OF_TURN),
            "pad_token_id": token(PAD),
            "tie_word_embeddings": tied,
        },
        vision_config={
            "depth": 1,
            "hidden_size": _HIDDEN,
            "intermediate_size": 2 * _HIDDEN,
            "num_heads": _HEADS,
            "out_hidden_size": _HIDDEN,
            "fullatt_block_indexes": [0],
        },
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
        tie_word_embeddings=tied,
        dtype="float32",
    )
    model: Qwen2_5_VLForConditionalGeneration = draw_weights(
        lambda: Qwen2_5_VLForConditionalGeneration(config), seed, _WEIGHT_STD, _EMBEDDING_STD
    )
    if tied:  # the head is as wide as the embedding: logits would have a deviation of sqrt(_HIDDEN), not of 1
        torch.nn.init.constant_(model.model.language_model.norm.weight, _HIDDEN**-0.5)
    model.generation_config = sampling_defaults(processor.tokenizer)
    return model


def warm_start(
    model: Qwen2_5_VLForConditionalGeneration, processor: Qwen2_5_VLProcessor, config: TinyModelConfig
) -> int:
    """Train in place on worked answers to ``warmup`` problems, each seen once; returns the steps taken.

    The loss is the mean negative log-likelihood per completion token; the run ends when its running mean falls to
    ``_ENOUGH_LOSS``, after ``config.warm_start_steps`` steps at the latest.
    """

    def loss_of(step: int) -> Tensor:
        indices = range((step - 1) * _BATCH, step * _BATCH)
        batch = [_worked_example(processor, draw_problem("warmup", index, config.seed)) for index in indices]
        return _supervised_loss(model, batch)

    return learn_until(
        model,
        loss_of,
        learning_rate=_LEARNING_RATE,
        enough_loss=_ENOUGH_LOSS,
        max_steps=config.warm_start_steps,
    )


def completion_text(problem: SyntheticProblem) -> str:
    """The worked answer in the ``math`` recipe's format, without the end-of-turn token."""
    return f"<think>{problem.reasoning}</think>\\boxed{{{problem.answer}}}"


def _worked_example(processor: Qwen2_5_VLProcessor, problem: SyntheticProblem) -> _Example:
    content = [{"type": "image"}, {"type": "text", "text": problem.question}]
    prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    inputs = processor(text=[prompt], images=[problem.picture], return_tensors="pt")
    answer = processor.tokenizer(completion_text(problem) + END_OF_TURN, return_tensors="pt")
    prompt_ids, completion = inputs["input_ids"][0], answer["input_ids"][0]
    return _Example(
        token_ids=torch.cat([prompt_ids, completion]),
        labels=torch.cat([torch.full_like(prompt_ids, IGNORED), completion]),
        pixel_values=inputs["pixel_values"],
        image_grid_thw=inputs["image_grid_thw"],
    )


def _supervised_loss(model: Qwen2_5_VLForConditionalGeneration, batch: list[_Example]) -> Tensor:
    pad = model.config.text_config.pad_token_id
    padded = torch.nn.utils.rnn.pad_sequence
    token_ids = padded([example.token_ids for example in batch], batch_first=True, padding_value=pad)
    labels = padded([example.labels for example in batch], batch_first=True, padding_value=IGNORED)
    mask = padded([torch.ones_like(example.token_ids) for example in batch], batch_first=True)
    return model(
        input_ids=token_ids,
        attention_mask=mask,
        mm_token_type_ids=(token_ids == model.config.image_token_id).int(),
        pixel_values=torch.cat([example.pixel_values for example in batch]),
        image_grid_thw=torch.cat([example.image_grid_thw for example in batch]),
        labels=labels,
    ).loss
