"""The embedded default policy ``tiny``: a real Qwen2.5-VL of about a million parameters, made on the spot.

It reads bytes, sees pictures through Qwen2.5-VL's own vision tower and image processor, and saves as an
ordinary Hugging Face folder. Random weights are never right and so never rewarded; a short supervised run on
synthetic problems teaches the format and a first blurred reading, and stops there: the rest is left to
reinforcement learning.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

from rlcore.config import TinyModelConfig
from rlcore.data.synthetic import SyntheticProblem, draw_problem

# Qwen2.5-VL's special tokens, then Qwen3's thinking marks, which are ordinary text and stay when decoded.
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
TEXT_TOKENS = ("<think>", "</think>")
_END_OF_TURN = "<|im_end|>"
_PAD = "<|endoftext|>"

# ChatML as Qwen2-VL writes it, without a default system message: at a token per byte that is half the prompt.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] in ('image', 'image_url') -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part['type'] == 'text' -%}
{{- part['text'] -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

# Paper is 0 and ink is negative: an empty patch then adds nothing, and what is left is what has to be read.
_IMAGE_MEAN = [1.0, 1.0, 1.0]
_IMAGE_STD = [0.5, 0.5, 0.5]
_PIXELS = {"min_pixels": 56 * 56, "max_pixels": 1024 * 1024}

_HIDDEN = 128
_HEADS = 4  # head size 32, the smallest that vLLM's CPU attention takes
_WEIGHT_STD = 0.09  # about 1 / sqrt(_HIDDEN); the usual 0.02 suits widths in the thousands and is slow here
_EMBEDDING_STD = 1.0

_BATCH = 16
_LEARNING_RATE = 7e-4
_WARM_UP_STEPS = 20
_MAX_GRAD_NORM = 1.0
_ENOUGH_LOSS = 0.11  # nats per token, running mean: the format is certain, the reading is not
_LOSS_MEMORY = 0.97
_IGNORED = -100


@dataclass(frozen=True, slots=True)
class _Example:
    """One problem with its worked answer. N patches, L tokens."""

    token_ids: Tensor  # [L]
    labels: Tensor  # [L], _IGNORED on the prompt
    pixel_values: Tensor  # [N, 1176]
    image_grid_thw: Tensor  # [1, 3]


def build_processor() -> Qwen2_5_VLProcessor:
    """Byte-level tokenizer, Qwen2-VL image and video processors and chat template; needs no files."""
    look = {"image_mean": _IMAGE_MEAN, "image_std": _IMAGE_STD, **_PIXELS}
    return Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(**look),
        tokenizer=_build_tokenizer(),
        video_processor=Qwen2VLVideoProcessor(**look),
        chat_template=CHAT_TEMPLATE,
    )


def create_tiny_policy(folder: Path, config: TinyModelConfig) -> int:
    """Build, warm-start and save the policy to ``folder``; returns its number of parameters.

    The same config gives the same weights on the same machine and library versions.
    """
    processor = build_processor()
    model = build_model(processor, config.seed)
    warm_start(model, processor, config)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def build_model(processor: Qwen2_5_VLProcessor, seed: int) -> Qwen2_5_VLForConditionalGeneration:
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
            "bos_token_id": token(_PAD),
            "eos_token_id": token(_END_OF_TURN),
            "pad_token_id": token(_PAD),
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
        tie_word_embeddings=False,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = Qwen2_5_VLForConditionalGeneration(config)
        for parameter in model.parameters():
            if parameter.ndim >= 2:  # Hugging Face has set norms to one and biases to zero
                parameter.normal_(std=_WEIGHT_STD)
        model.get_input_embeddings().weight.normal_(std=_EMBEDDING_STD)
    model.generation_config = GenerationConfig(
        bos_token_id=token(_PAD),
        eos_token_id=[token(_END_OF_TURN), token(_PAD)],
        pad_token_id=token(_PAD),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
    )
    return model


def warm_start(
    model: Qwen2_5_VLForConditionalGeneration, processor: Qwen2_5_VLProcessor, config: TinyModelConfig
) -> int:
    """Train in place on worked answers to ``warmup`` problems, each seen once; returns the steps taken.

    The loss is the mean negative log-likelihood per completion token. The run ends when its running mean
    falls to ``_ENOUGH_LOSS``, after ``config.warm_start_steps`` steps at the latest. Reading is learnt within
    a hundred steps that come sooner or later depending on the seed: a fixed number would leave some seeds
    blind and others with nothing to learn.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / _WARM_UP_STEPS, total_iters=_WARM_UP_STEPS)
    steps = track(range(1, config.warm_start_steps + 1), "warm start", console=Console(stderr=True))
    running_loss = math.inf
    step = 0
    model.train()
    for step in steps:
        indices = range((step - 1) * _BATCH, step * _BATCH)
        batch = [_worked_example(processor, draw_problem("warmup", index, config.seed)) for index in indices]
        loss = _supervised_loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), _MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        warm_up.step()
        latest = loss.item()
        running_loss = latest if step == 1 else _LOSS_MEMORY * running_loss + (1 - _LOSS_MEMORY) * latest
        if running_loss <= _ENOUGH_LOSS:
            break
    model.eval()
    return step


def completion_text(problem: SyntheticProblem) -> str:
    """The worked answer in the ``math`` recipe's format, without the end-of-turn token."""
    return f"<think>{problem.reasoning}</think>\\boxed{{{problem.answer}}}"


def _build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, no merges, so that it reads any text and no vocabulary has to be shipped."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: rank for rank, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = [AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS]
    tokenizer.add_special_tokens(specials)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in TEXT_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=_END_OF_TURN,
        pad_token=_PAD,
        additional_special_tokens=[text for text in SPECIAL_TOKENS if text not in (_END_OF_TURN, _PAD)],
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
        chat_template=CHAT_TEMPLATE,
    )


def _worked_example(processor: Qwen2_5_VLProcessor, problem: SyntheticProblem) -> _Example:
    content = [{"type": "image"}, {"type": "text", "text": problem.question}]
    prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    inputs = processor(text=[prompt], images=[problem.picture], return_tensors="pt")
    answer = processor.tokenizer(completion_text(problem) + _END_OF_TURN, return_tensors="pt")
    prompt_ids, completion = inputs["input_ids"][0], answer["input_ids"][0]
    return _Example(
        token_ids=torch.cat([prompt_ids, completion]),
        labels=torch.cat([torch.full_like(prompt_ids, _IGNORED), completion]),
        pixel_values=inputs["pixel_values"],
        image_grid_thw=inputs["image_grid_thw"],
    )


def _supervised_loss(model: Qwen2_5_VLForConditionalGeneration, batch: list[_Example]) -> Tensor:
    pad = model.config.text_config.pad_token_id
    padded = torch.nn.utils.rnn.pad_sequence
    token_ids = padded([example.token_ids for example in batch], batch_first=True, padding_value=pad)
    labels = padded([example.labels for example in batch], batch_first=True, padding_value=_IGNORED)
    mask = padded([torch.ones_like(example.token_ids) for example in batch], batch_first=True)
    return model(
        input_ids=token_ids,
        attention_mask=mask,
        mm_token_type_ids=(token_ids == model.config.image_token_id).int(),
        pixel_values=torch.cat([example.pixel_values for example in batch]),
        image_grid_thw=torch.cat([example.image_grid_thw for example in batch]),
        labels=labels,
    ).loss
