"""The embedded default policy ``tiny``: a real Qwen2.5-VL of about a million parameters, made on the spot.

It reads bytes, sees pictures through Qwen2.5-VL's own vision tower and image processor, and saves as an
ordinary Hugging Face folder. Random weights cannot be rewarded, so it starts with a short supervised run on
synthetic problems, stopped long before it has learnt them: reinforcement learning does the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import track
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)
from torch import Tensor

from rlcore.config import TinyModelConfig
from rlcore.data.synthetic import SyntheticProblem, draw_problem

# Qwen2.5-VL's special tokens, then Qwen3's thinking marks, which are ordinary text and stay in decoded completions.
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

# ChatML as Qwen2-VL writes it, without a default system message: at one token per byte it would be half the prompt.
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

_HIDDEN = 128
_HEADS = 4  # head size 32, the smallest that vLLM's CPU attention takes
_BATCH = 24
_LEARNING_RATE = 3e-3
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
    return Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(min_pixels=56 * 56, max_pixels=1024 * 1024, image_mean=[1.0]*3, image_std=[0.5]*3),
        tokenizer=_build_tokenizer(),
        video_processor=Qwen2VLVideoProcessor(min_pixels=56 * 56, max_pixels=1024 * 1024),
        chat_template=CHAT_TEMPLATE,
    )


def create_tiny_policy(folder: Path, config: TinyModelConfig) -> int:
    """Build, warm-start and save the policy to ``folder``; returns its number of parameters.

    The same config gives the same weights on the same machine and library versions.
    """
    processor = build_processor()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = build_model(processor)
    warm_start(model, processor, config)
    model.save_pretrained(folder, safe_serialization=True)
    processor.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def build_model(processor: Qwen2_5_VLProcessor) -> Qwen2_5_VLForConditionalGeneration:
    """Randomly initialised weights in float32, drawn from torch's default generator."""
    tokenizer = processor.tokenizer
    token = tokenizer.convert_tokens_to_ids
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": _HIDDEN,
            "intermediate_size": 3 * _HIDDEN,
            "num_hidden_layers": 3,
            "num_attention_heads": _HEADS,
            "num_key_value_heads": _HEADS // 2,
            "max_position_embeddings": 4096,
            "initializer_range": _INIT,
            "rope_parameters": {"rope_type": "default", "rope_theta": _THETA, "mrope_section": [4, 6, 6]},
            "bos_token_id": token("<|endoftext|>"),
            "eos_token_id": token("<|im_end|>"),
            "pad_token_id": token("<|endoftext|>"),
        },
        vision_config={
            "depth": 2,
            "hidden_size": _HIDDEN,
            "intermediate_size": 2 * _HIDDEN,
            "num_heads": _HEADS,
            "out_hidden_size": _HIDDEN,
            "fullatt_block_indexes": [1],
            "window_size": 112,
            "initializer_range": _INIT,
        },
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
        tie_word_embeddings=False,
        dtype="float32",
    )
    model = Qwen2_5_VLForConditionalGeneration(config)
    model.generation_config = GenerationConfig(
        bos_token_id=token("<|endoftext|>"),
        eos_token_id=[token("<|im_end|>"), token("<|endoftext|>")],
        pad_token_id=token("<|endoftext|>"),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
    )
    return model

_INIT = 0.05
_THETA = 10.0


def warm_start(
    model: Qwen2_5_VLForConditionalGeneration, processor: Qwen2_5_VLProcessor, config: TinyModelConfig
) -> None:
    """``config.warm_start_steps`` supervised steps on worked answers to ``warmup`` problems, in place.

    The loss is the mean negative log-likelihood per completion token. Each problem is seen once.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    model.train()
    for step in track(range(config.warm_start_steps), description="warm start", transient=True):
        for group in optimizer.param_groups:
            group["lr"] = _LEARNING_RATE * min(1.0, (step + 1) / 20) 
        indices = range(step * _BATCH, (step + 1) * _BATCH)
        batch = [_worked_example(processor, draw_problem("warmup", index, config.seed)) for index in indices]
        _supervised_loss(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    model.eval()


def completion_text(problem: SyntheticProblem) -> str:
    """The worked answer in the ``math`` recipe's format, without the end-of-turn token."""
    return f"<think>{problem.reasoning}</think>\\boxed{{{problem.answer}}}"


def _build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, no merges, so that it reads any text and no vocabulary has to be shipped."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: rank for rank, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in TEXT_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[text for text in SPECIAL_TOKENS if text not in ("<|im_end|>", "<|endoftext|>")],
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
        chat_template=CHAT_TEMPLATE,
    )


def _worked_example(processor: Qwen2_5_VLProcessor, problem: SyntheticProblem) -> _Example:
    content = [{"type": "image"}, {"type": "text", "text": problem.question}]
    prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    inputs = processor(text=[prompt], images=[problem.picture], return_tensors="pt")
    completion = processor.tokenizer(completion_text(problem) + "<|im_end|>", return_tensors="pt")["input_ids"][0]
    prompt_ids = inputs["input_ids"][0]
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
