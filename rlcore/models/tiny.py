"""The embedded default policies ``tiny``: real models of about a million parameters, made on the spot.

The policy for geometry is a Qwen2-VL, a Qwen2.5-VL, a Qwen3-VL with or without experts, a Qwen3.5, a GLM-4.1V, an
InternVL3.5, a SmolVLM or a Gemma 3, with its own tower and image processor. Those for sums and countdown are a Qwen2.
All read bytes and save as ordinary Hugging Face folders.
Random weights are never right and so never rewarded. A short supervised run on synthetic problems therefore teaches the
format and a few right answers, and stops there: the rest is left to reinforcement learning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    Gemma3Config,
    GenerationConfig,
    Glm4vConfig,
    Idefics3Config,
    InternVLConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen3_5Config,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)

from rlcore.config import CountdownConfig, TinyModelConfig
from rlcore.data.synthetic.arithmetic import ArithmeticProblem, generate_countdown, generate_sum
from rlcore.data.synthetic.geometry import SyntheticProblem, draw_problem
from rlcore.data.tiny import (
    END_OF_TURN,
    PAD,
    SQUARE,
    TILE,
    TOKENS_PER_SQUARE,
    TOKENS_PER_TILE,
    PictureProcessor,
    build_processor,
    build_text_tokenizer,
)
from rlcore.models.loading import auto_class, save_published
from rlcore.models.lora import decoder_of

GAME = CountdownConfig(numbers=(3, 4), max_number=12, max_target=40, operations=("+", "-"))
"""The countdown of the warm start. The experiment grpo-countdown-tiny plays the same kind."""

_HIDDEN = 128
_HEADS = 4  # head size 32, the smallest that vLLM's CPU attention takes
_LAYERS = 3
# with the usual base of 10,000, neighbours in a picture differ by 0.003 radian only
_PICTURE_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 4.0}
# sequences are a few dozen bytes long, and only their order matters
_TEXT_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 100.0}
_BOTH_ROPES = {"full_attention": _TEXT_ROPE, "sliding_attention": _TEXT_ROPE}
_WEIGHT_STD = 0.09  # about 1 / sqrt(_HIDDEN); the usual 0.02 suits widths in the thousands and learns slowly here
_EMBEDDING_STD = 1.0
_IGNORED = -100  # label of a token that is not learned
_WARM_UP_STEPS = 20
_MAX_GRAD_NORM = 1.0
_LOSS_MEMORY = 0.97


@dataclass(frozen=True, slots=True)
class _Shape:
    """The configuration of a family that reads pictures, without what all tiny policies have."""

    make_config: Callable[..., PretrainedConfig]
    text: Mapping[str, Any]
    tower: Mapping[str, Any]
    tokens: Mapping[str, str]  # by the field that has the token's id
    others: Mapping[str, Any] = field(default_factory=dict)
    marks: str | None = None  # the argument of the forward pass that tells tokens of pictures from others


def _positions(sections: list[int], **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {**_PICTURE_ROPE, "mrope_section": sections, **options}}


_HEAD = {"head_dim": _HIDDEN // _HEADS}
_WIDTHS: dict[str, Any] = {"hidden_size": _HIDDEN, "intermediate_size": 2 * _HIDDEN}
_GRID_TOWER = {**_WIDTHS, "num_heads": _HEADS, "out_hidden_size": _HIDDEN, "depth": 1}
_LEARNED_POSITIONS = {**_GRID_TOWER, "num_position_embeddings": 8 * 8, "depth": 2}
_DEEPSTACK = {**_LEARNED_POSITIONS, "deepstack_visual_indexes": [0, 1]}
_TILE_TOWER = {**_WIDTHS, "num_attention_heads": _HEADS, "num_hidden_layers": 2}
_QWEN_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
_GLM_TOKENS = {
    "image_token_id": "<|image|>",
    "video_token_id": "<|video|>",
    **{f"{kind}_start_token_id": f"<|begin_of_{kind}|>" for kind in ("image", "video")},
    **{f"{kind}_end_token_id": f"<|end_of_{kind}|>" for kind in ("image", "video")},
}
# heads of 128, which vLLM's CPU kernels of recurrent states take
_STATES = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 3 * _HIDDEN // 2,
    "norm_topk_prob": True,  # vLLM reads it, and transformers always does it
}
_GRID_MARKS = "mm_token_type_ids"
_SHAPES = {
    "qwen2_vl": _Shape(
        Qwen2VLConfig,
        _positions([4, 6, 6]),
        {"embed_dim": _HIDDEN, "hidden_size": _HIDDEN, "mlp_ratio": 2, "num_heads": _HEADS, "depth": 1},
        _QWEN_TOKENS,
        marks=_GRID_MARKS,
    ),
    "qwen2_5_vl": _Shape(
        Qwen2_5_VLConfig,
        {**_HEAD, **_positions([4, 6, 6])},
        {**_GRID_TOWER, "fullatt_block_indexes": [0]},
        _QWEN_TOKENS,
        marks=_GRID_MARKS,
    ),
    "qwen3_vl": _Shape(
        Qwen3VLConfig,
        {**_HEAD, **_positions([6, 5, 5], mrope_interleaved=True)},
        _DEEPSTACK,
        _QWEN_TOKENS,
        marks=_GRID_MARKS,
    ),
    "qwen3_vl_moe": _Shape(
        Qwen3VLMoeConfig,
        {**_HEAD, **_positions([6, 5, 5], mrope_interleaved=True), **_EXPERTS},
        _DEEPSTACK,
        _QWEN_TOKENS,
        marks=_GRID_MARKS,
    ),
    "qwen3_5": _Shape(
        Qwen3_5Config,
        {**_HEAD, **_positions([2, 3, 3], mrope_interleaved=True, partial_rotary_factor=0.5), **_STATES},
        _LEARNED_POSITIONS,
        _QWEN_TOKENS,
        marks=_GRID_MARKS,
    ),
    "glm4v": _Shape(
        Glm4vConfig,
        {**_positions([2, 3, 3], partial_rotary_factor=0.5), "attention_bias": True},
        {**_GRID_TOWER, "image_size": 8 * 14},
        _GLM_TOKENS,
        marks=_GRID_MARKS,
    ),
    "internvl": _Shape(
        InternVLConfig,
        {**_HEAD, "rope_parameters": _TEXT_ROPE, "model_type": "qwen3"},
        {**_TILE_TOWER, "image_size": [TILE, TILE], "patch_size": [TILE // 4, TILE // 4]},
        {"image_token_id": "<IMG_CONTEXT>"},
        {"image_seq_length": TOKENS_PER_TILE},
    ),
    "idefics3": _Shape(
        Idefics3Config,
        {"rope_parameters": _TEXT_ROPE, "model_type": "llama"},
        {**_TILE_TOWER, "image_size": TILE, "patch_size": TILE // 4},
        {"image_token_id": "<image>", "pad_token_id": PAD},
        {"scale_factor": 2},
    ),
    "gemma3": _Shape(
        Gemma3Config,
        {**_HEAD, "query_pre_attn_scalar": _HIDDEN // _HEADS, "rope_parameters": _BOTH_ROPES, "sliding_window": 512},
        {**_TILE_TOWER, "image_size": SQUARE, "patch_size": SQUARE // 12, "vision_use_head": False},
        {
            "image_token_id": "<image_soft_token>",
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
        },
        {"mm_tokens_per_image": TOKENS_PER_SQUARE},
        marks="token_type_ids",
    ),
}


@dataclass(frozen=True, slots=True)
class _Supervised:
    """The supervised run of one task, or of a family that has its own."""

    batch: int
    learning_rate: float
    enough_loss: float  # nats per token, running mean: the format is certain, the answers are not


_RUNS = {
    "geometry": _Supervised(16, 7e-4, 0.11),
    "qwen2_vl": _Supervised(16, 7e-4, 0.07),
    "qwen3_vl": _Supervised(16, 7e-4, 0.09),  # at the same loss it reads fewer digits than the first family
    "qwen3_vl_moe": _Supervised(16, 7e-4, 0.09),
    "qwen3_5": _Supervised(16, 7e-4, 0.06),
    "glm4v": _Supervised(16, 7e-4, 0.09),
    "internvl": _Supervised(16, 7e-4, 0.09),
    "idefics3": _Supervised(16, 7e-4, 0.08),
    "gemma3": _Supervised(16, 7e-4, 0.065),
    "sums": _Supervised(16, 2e-3, 0.10),
    "countdown": _Supervised(32, 2e-3, 0.44),
}


@dataclass(frozen=True, slots=True)
class _Example:
    """One problem with its worked answer. N patches, L tokens."""

    token_ids: Tensor  # [L]
    labels: Tensor  # [L], _IGNORED on the prompt
    images: Mapping[str, Tensor]  # as the processor makes them; empty of text


def create_tiny_policy(folder: Path, config: TinyModelConfig, *, tied: bool = True) -> int:
    """Build, warm-start and save the policy to ``folder``; return its number of parameters.

    The same config gives the same weights on the same machine and library versions.

    Args:
        tied: the LM head is the embedding, as in Qwen2.5-VL-3B; else it is a separate matrix, as in the 7B. The text
            policies always have a separate one, as Qwen2-7B does.
    """
    processor: PictureProcessor | PreTrainedTokenizerFast
    if config.task == "geometry":
        processor = build_processor(config.family)
        model = build_model(config.family, config.seed, tied=tied)
    else:
        processor = build_text_tokenizer()
        model = build_text_model(processor, config.seed)
    warm_start(model, processor, config)
    save_published(model, folder)
    processor.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def build_model(family: str | None, seed: int, *, tied: bool = True) -> PreTrainedModel:
    """The geometry policy with random weights in float32. Does not change torch's default generator.

    Args:
        family: ``model.tiny.family``.
    """
    shape = deepcopy(_SHAPES[family or "qwen2_5_vl"])  # transformers writes into what it is given
    processor: Any = build_processor(family)
    tokenizer = processor.tokenizer
    config = shape.make_config(
        text_config={**_decoder_options(tokenizer), **shape.text, "tie_word_embeddings": tied},
        vision_config=shape.tower,
        tie_word_embeddings=tied,
        dtype="float32",
        **{name: tokenizer.convert_tokens_to_ids(token) for name, token in shape.tokens.items()},
        **shape.others,
    )
    return _random_model(config, tokenizer, seed)


def build_text_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> PreTrainedModel:
    """A text policy with random weights in float32. Does not change torch's default generator."""
    config = Qwen2Config(
        **_decoder_options(tokenizer),
        rope_parameters=_TEXT_ROPE,
        tie_word_embeddings=False,
        dtype="float32",
    )
    return _random_model(config, tokenizer, seed)


def _decoder_options(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    token = tokenizer.convert_tokens_to_ids
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": _HIDDEN,
        "intermediate_size": 3 * _HIDDEN,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS // 2,
        "max_position_embeddings": 4096,
        "bos_token_id": token(PAD),
        "eos_token_id": token(END_OF_TURN),
        "pad_token_id": token(PAD),
    }


def _random_model(config: PretrainedConfig, tokenizer: PreTrainedTokenizerFast, seed: int) -> PreTrainedModel:
    """The model of a configuration, with every matrix sampled from ``seed``."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model: PreTrainedModel = auto_class(config).from_config(config)
        for parameter in model.parameters():
            if parameter.ndim >= 2:  # Hugging Face has set norms to one and biases to zero
                parameter.normal_(std=_WEIGHT_STD)
        embeddings: Any = model.get_input_embeddings()
        scale = float(getattr(embeddings, "embed_scale", 1.0))  # by which Gemma multiplies its embeddings
        embeddings.weight.normal_(std=_EMBEDDING_STD / scale)
        if config.tie_word_embeddings:  # the head has the embedding's deviation: logits would have one of sqrt(_HIDDEN)
            norm = decoder_of(model).norm.weight
            zero = float(norm[0]) - 1.0  # the weight with which the norm multiplies by 0: that of some norms is -1
            norm.fill_(scale * _HIDDEN**-0.5 + zero)
    model.generation_config = sampling_defaults(tokenizer)
    return model


def sampling_defaults(tokenizer: PreTrainedTokenizerFast) -> GenerationConfig:
    """Plain sampling at temperature 1, up to the end of the turn."""
    token = tokenizer.convert_tokens_to_ids
    return GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=token(PAD),
        eos_token_id=[token(END_OF_TURN), token(PAD)],
        pad_token_id=token(PAD),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
    )


def warm_start(
    model: PreTrainedModel, processor: PictureProcessor | PreTrainedTokenizerFast, config: TinyModelConfig
) -> int:
    """Train in place on worked answers to ``warmup`` problems, each seen once; return the number of steps.

    The loss is the mean negative log-likelihood per completion token. The run ends when its running mean falls to the
    task's ``enough_loss``, or after ``config.warm_start_steps`` steps. The policy learns within a hundred steps, but
    how early depends on the seed: a fixed number of steps would teach some seeds nothing and others everything.
    """
    run = _RUNS.get(config.family or config.task, _RUNS[config.task])
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / _WARM_UP_STEPS, total_iters=_WARM_UP_STEPS)
    steps = track(range(1, config.warm_start_steps + 1), "warm start", console=Console(stderr=True))
    running_loss = math.inf
    step = 0
    model.train()
    for step in steps:
        problems = [_warmup_problem(config, index) for index in range((step - 1) * run.batch, step * run.batch)]
        loss = _supervised_loss(model, [_worked_example(processor, problem) for problem in problems])
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), _MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        warm_up.step()
        latest = loss.item()
        running_loss = latest if step == 1 else _LOSS_MEMORY * running_loss + (1 - _LOSS_MEMORY) * latest
        if running_loss <= run.enough_loss:
            break
    model.eval()  # type: ignore[no-untyped-call]
    return step


def _warmup_problem(config: TinyModelConfig, index: int) -> SyntheticProblem | ArithmeticProblem:
    match config.task:
        case "geometry":
            return draw_problem("warmup", index, config.seed)
        case "sums":
            return generate_sum("warmup", index, config.seed)
        case _:
            return generate_countdown("warmup", index, config.seed, GAME)


def completion_text(problem: SyntheticProblem | ArithmeticProblem) -> str:
    """The worked answer in the format of the task's reward, without the end-of-turn token.

    A countdown is answered at once: this policy learns to guess well in seconds, and to reason in minutes.
    """
    if isinstance(problem, SyntheticProblem):
        return f"<think>{problem.reasoning}</think>\\boxed{{{problem.answer}}}"
    if problem.question.endswith("="):
        return f"{problem.reasoning}\n#### {problem.answer}"
    return f"<answer>{problem.solution}</answer>"


def _worked_example(
    processor: PictureProcessor | PreTrainedTokenizerFast, problem: SyntheticProblem | ArithmeticProblem
) -> _Example:
    tokenizer: Any = getattr(processor, "tokenizer", processor)
    content: Any = problem.question
    if isinstance(problem, SyntheticProblem):
        content = [{"type": "image"}, {"type": "text", "text": problem.question}]
    message = {"role": "user", "content": content}
    prompt = processor.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    images: dict[str, Tensor] = {}
    if isinstance(problem, SyntheticProblem):
        inputs = processor(text=[prompt], images=[problem.picture], return_tensors="pt")
        prompt_ids = inputs["input_ids"][0]
        images = {name: inputs[name] for name in ("pixel_values", "image_grid_thw") if name in inputs}
    else:
        prompt_ids = torch.tensor(tokenizer.encode(prompt, add_special_tokens=False))
    completion = torch.tensor(tokenizer.encode(completion_text(problem) + END_OF_TURN, add_special_tokens=False))
    return _Example(
        token_ids=torch.cat([prompt_ids, completion]),
        labels=torch.cat([torch.full_like(prompt_ids, _IGNORED), completion]),
        images=images,
    )


def _supervised_loss(model: PreTrainedModel, batch: list[_Example]) -> Tensor:
    pad = model.config.get_text_config().pad_token_id
    token_ids = pad_sequence([example.token_ids for example in batch], batch_first=True, padding_value=pad)
    labels = pad_sequence([example.labels for example in batch], batch_first=True, padding_value=_IGNORED)
    mask = pad_sequence([torch.ones_like(example.token_ids) for example in batch], batch_first=True)
    images = {}
    for name, first in batch[0].images.items():
        # [N, 1176] patches, [tiles, channels, rows, columns], or such tiles after a dimension of 1
        images[name] = torch.cat([example.images[name] for example in batch], dim=max(0, first.ndim - 4))
    if images:
        marks = _SHAPES[model.config.model_type].marks
        if marks is not None:
            images[marks] = (token_ids == model.config.image_token_id).int()
    loss: Tensor = model(input_ids=token_ids, attention_mask=mask, labels=labels, **images).loss
    return loss
