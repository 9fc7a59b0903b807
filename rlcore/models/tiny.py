"""The embedded default policies ``tiny``: real models of about a million parameters, made on the spot.

The policy for geometry is a Qwen2.5-VL, a Qwen3-VL with or without experts, a Qwen3.5, a GLM-4.1V, an InternVL3.5 or a
SmolVLM, with its own tower and image processor. Those for sums and countdown are a Qwen2. All read bytes and save as
ordinary Hugging Face folders.
Random weights are never right and so never rewarded. A short supervised run on synthetic problems therefore teaches the
format and a few right answers, and stops there: the rest is left to reinforcement learning.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    GenerationConfig,
    Glm4vConfig,
    Glm4vForConditionalGeneration,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    InternVLConfig,
    InternVLForConditionalGeneration,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from rlcore.config import CountdownConfig, TinyModelConfig
from rlcore.data.synthetic.arithmetic import ArithmeticProblem, generate_countdown, generate_sum
from rlcore.data.synthetic.geometry import SyntheticProblem, draw_problem
from rlcore.data.tiny import END_OF_TURN, PAD, PictureProcessor, build_processor, build_text_tokenizer, build_tokenizer
from rlcore.models.loading import save_published
from rlcore.models.lora import decoder_of

PictureModel = (
    Qwen2_5_VLForConditionalGeneration
    | Qwen3VLForConditionalGeneration
    | Qwen3VLMoeForConditionalGeneration
    | Qwen3_5ForConditionalGeneration
    | Glm4vForConditionalGeneration
    | InternVLForConditionalGeneration
    | Idefics3ForConditionalGeneration
)

GAME = CountdownConfig(numbers=(3, 4), max_number=12, max_target=40, operations=("+", "-"))
"""The countdown of the warm start. The experiment grpo-countdown-tiny plays the same kind."""

_HIDDEN = 128
_HEADS = 4  # head size 32, the smallest that vLLM's CPU attention takes
_LAYERS = 3
# heads of 128, which vLLM's CPU kernels of recurrent states take
_STATES = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
# with the usual base of 10,000, neighbours in a picture differ by 0.003 radian only
_PICTURE_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 4.0}
# sequences are a few dozen bytes long, and only their order matters
_TEXT_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 100.0}
_TOWER: dict[str, Any] = {"hidden_size": _HIDDEN, "intermediate_size": 2 * _HIDDEN}
_WEIGHT_STD = 0.09  # about 1 / sqrt(_HIDDEN); the usual 0.02 suits widths in the thousands and learns slowly here
_EMBEDDING_STD = 1.0
_IGNORED = -100  # label of a token that is not learned
_WARM_UP_STEPS = 20
_MAX_GRAD_NORM = 1.0
_LOSS_MEMORY = 0.97


@dataclass(frozen=True, slots=True)
class _Supervised:
    """The supervised run of one task, or of a family that has its own."""

    batch: int
    learning_rate: float
    enough_loss: float  # nats per token, running mean: the format is certain, the answers are not


_RUNS = {
    "geometry": _Supervised(16, 7e-4, 0.11),
    "qwen3_vl": _Supervised(16, 7e-4, 0.09),  # at the same loss it reads fewer digits than the first family
    "qwen3_vl_moe": _Supervised(16, 7e-4, 0.09),
    "qwen3_5": _Supervised(16, 7e-4, 0.06),
    "glm4v": _Supervised(16, 7e-4, 0.09),
    "internvl": _Supervised(16, 7e-4, 0.09),
    "sums": _Supervised(16, 2e-3, 0.10),
    "countdown": _Supervised(32, 2e-3, 0.44),
}


@dataclass(frozen=True, slots=True)
class _Example:
    """One problem with its worked answer. N patches, L tokens."""

    token_ids: Tensor  # [L]
    labels: Tensor  # [L], _IGNORED on the prompt
    pixel_values: Tensor | None = None  # [N, 1176], or [N, 1536] with patches of 16 pixels
    image_grid_thw: Tensor | None = (
        None  # [1, 3]; None of tiles, whose pixel_values are [tiles, channels, rows, columns]
    )


def create_tiny_policy(folder: Path, config: TinyModelConfig, *, tied: bool = True) -> int:
    """Build, warm-start and save the policy to ``folder``; return its number of parameters.

    The same config gives the same weights on the same machine and library versions.

    Args:
        tied: the LM head is the embedding, as in Qwen2.5-VL-3B; else it is a separate matrix, as in the 7B. The text
            policies always have a separate one, as Qwen2-7B does.
    """
    processor: PictureProcessor | PreTrainedTokenizerFast
    model: PictureModel | Qwen2ForCausalLM
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


def build_model(family: str | None, seed: int, *, tied: bool = True) -> PictureModel:
    """The geometry policy with random weights in float32. Does not change torch's default generator.

    Args:
        family: ``model.tiny.family``.
    """
    if family == "idefics3":
        return _build_named_tile_model(seed, tied)
    if family == "glm4v":
        return _build_glm_model(seed, tied)
    if family == "internvl":
        return _build_tile_model(seed, tied)
    tokenizer = build_tokenizer()
    token: Any = tokenizer.convert_tokens_to_ids
    rope: dict[str, Any] = dict(_PICTURE_ROPE)
    tower = {**_TOWER, "num_heads": _HEADS, "out_hidden_size": _HIDDEN}
    special: dict[str, Any] = {}
    make_config: Callable[..., PretrainedConfig] = Qwen2_5_VLConfig
    make_model: Callable[..., PictureModel] = Qwen2_5_VLForConditionalGeneration
    if family == "qwen3_5":
        make_config, make_model = Qwen3_5Config, Qwen3_5ForConditionalGeneration
        rope |= {"partial_rotary_factor": 0.5, "mrope_section": [2, 3, 3], "mrope_interleaved": True}
        tower |= {"depth": 2, "num_position_embeddings": 8 * 8}
        special = _STATES
    elif family in ("qwen3_vl", "qwen3_vl_moe"):
        make_config, make_model = Qwen3VLConfig, Qwen3VLForConditionalGeneration
        rope |= {"mrope_section": [6, 5, 5], "mrope_interleaved": True}
        tower |= {"depth": 2, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 8 * 8}
    else:
        rope |= {"mrope_section": [4, 6, 6]}
        tower |= {"depth": 1, "fullatt_block_indexes": [0]}
    if family == "qwen3_vl_moe":
        make_config, make_model = Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration
        special = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 3 * _HIDDEN // 2}
        special["norm_topk_prob"] = True  # vLLM reads it, and transformers always does it
    config = make_config(
        text_config={
            **_decoder_options(tokenizer),
            **special,
            "head_dim": _HIDDEN // _HEADS,
            "rope_parameters": rope,
            "tie_word_embeddings": tied,
        },
        vision_config=tower,
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
        tie_word_embeddings=tied,
        dtype="float32",
    )
    model: PictureModel = _random_model(make_model, config, tokenizer, seed)
    return model


def _build_glm_model(seed: int, tied: bool) -> Glm4vForConditionalGeneration:
    processor: Any = build_processor("glm4v")
    tokenizer = processor.tokenizer
    token: Any = tokenizer.convert_tokens_to_ids
    ids = {f"{kind}_token_id": token(f"<|{kind}|>") for kind in ("image", "video")}
    for side, word in (("start", "begin"), ("end", "end")):
        ids |= {f"{kind}_{side}_token_id": token(f"<|{word}_of_{kind}|>") for kind in ("image", "video")}
    config = Glm4vConfig(
        text_config={
            **_decoder_options(tokenizer),
            "attention_bias": True,
            "rope_parameters": _PICTURE_ROPE | {"partial_rotary_factor": 0.5, "mrope_section": [2, 3, 3]},
            "tie_word_embeddings": tied,
        },
        vision_config={
            **_TOWER,
            "out_hidden_size": _HIDDEN,
            "num_heads": _HEADS,
            "depth": 1,
            "image_size": 8 * 14,
        },
        tie_word_embeddings=tied,
        dtype="float32",
        **ids,
    )
    model: Glm4vForConditionalGeneration = _random_model(Glm4vForConditionalGeneration, config, tokenizer, seed)
    return model


def _build_tile_model(seed: int, tied: bool) -> InternVLForConditionalGeneration:
    processor: Any = build_processor("internvl")
    tokenizer, size = processor.tokenizer, processor.image_processor.size
    config = InternVLConfig(
        text_config={
            **_decoder_options(tokenizer),
            "model_type": "qwen3",
            "head_dim": _HIDDEN // _HEADS,
            "rope_parameters": _TEXT_ROPE,
            "tie_word_embeddings": tied,
        },
        vision_config={
            **_TOWER,
            "num_hidden_layers": 2,
            "num_attention_heads": _HEADS,
            "image_size": [size["height"], size["width"]],
        },
        image_token_id=processor.image_token_id,
        image_seq_length=processor.image_seq_length,
        tie_word_embeddings=tied,
        dtype="float32",
    )
    model: InternVLForConditionalGeneration = _random_model(InternVLForConditionalGeneration, config, tokenizer, seed)
    return model


def _build_named_tile_model(seed: int, tied: bool) -> Idefics3ForConditionalGeneration:
    processor: Any = build_processor("idefics3")
    tokenizer, side = processor.tokenizer, processor.image_processor.max_image_size["longest_edge"]
    config = Idefics3Config(
        text_config={
            **_decoder_options(tokenizer),
            "model_type": "llama",
            "rope_parameters": _TEXT_ROPE,
            "tie_word_embeddings": tied,
        },
        vision_config={
            **_TOWER,
            "num_hidden_layers": 2,
            "num_attention_heads": _HEADS,
            "image_size": side,
            "patch_size": side // 4,
        },
        image_token_id=processor.image_token_id,
        pad_token_id=tokenizer.pad_token_id,
        scale_factor=2,
        tie_word_embeddings=tied,
        dtype="float32",
    )
    model: Idefics3ForConditionalGeneration = _random_model(Idefics3ForConditionalGeneration, config, tokenizer, seed)
    return model


def build_text_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2ForCausalLM:
    """A text policy with random weights in float32. Does not change torch's default generator."""
    config = Qwen2Config(
        **_decoder_options(tokenizer),
        rope_parameters=_TEXT_ROPE,
        tie_word_embeddings=False,
        dtype="float32",
    )
    model: Qwen2ForCausalLM = _random_model(Qwen2ForCausalLM, config, tokenizer, seed)
    return model


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


def _random_model(
    model_class: Callable[..., Any], config: PretrainedConfig, tokenizer: PreTrainedTokenizerFast, seed: int
) -> Any:
    """The model of a configuration, with every matrix sampled from ``seed``."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = model_class(config)
        for parameter in model.parameters():
            if parameter.ndim >= 2:  # Hugging Face has set norms to one and biases to zero
                parameter.normal_(std=_WEIGHT_STD)
        model.get_input_embeddings().weight.normal_(std=_EMBEDDING_STD)
        if config.tie_word_embeddings:  # the head has the embedding's deviation: logits would have one of sqrt(_HIDDEN)
            norm = decoder_of(model).norm.weight
            norm.fill_(_HIDDEN**-0.5 - (1.0 - float(norm[0])))  # the weight of some norms is 0 where they multiply by 1
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
    pixels: dict[str, Tensor] = {}
    if isinstance(problem, SyntheticProblem):
        inputs = processor(text=[prompt], images=[problem.picture], return_tensors="pt")
        prompt_ids = inputs["input_ids"][0]
        pixels = {name: inputs[name] for name in ("pixel_values", "image_grid_thw") if name in inputs}
        if pixels["pixel_values"].ndim == 5:  # of one prompt
            pixels["pixel_values"] = pixels["pixel_values"][0]
    else:
        prompt_ids = torch.tensor(tokenizer.encode(prompt, add_special_tokens=False))
    completion = torch.tensor(tokenizer.encode(completion_text(problem) + END_OF_TURN, add_special_tokens=False))
    return _Example(
        token_ids=torch.cat([prompt_ids, completion]),
        labels=torch.cat([torch.full_like(prompt_ids, _IGNORED), completion]),
        **pixels,
    )


def _supervised_loss(model: PreTrainedModel, batch: list[_Example]) -> Tensor:
    pad = model.config.get_text_config().pad_token_id
    token_ids = pad_sequence([example.token_ids for example in batch], batch_first=True, padding_value=pad)
    labels = pad_sequence([example.labels for example in batch], batch_first=True, padding_value=_IGNORED)
    mask = pad_sequence([torch.ones_like(example.token_ids) for example in batch], batch_first=True)
    images: dict[str, Tensor] = {}
    if batch[0].pixel_values is not None:
        images["pixel_values"] = torch.cat([e.pixel_values for e in batch if e.pixel_values is not None])
        if isinstance(model, Idefics3ForConditionalGeneration):
            images["pixel_values"] = images["pixel_values"][None]
        elif batch[0].image_grid_thw is not None:
            images["mm_token_type_ids"] = (token_ids == model.config.image_token_id).int()
            images["image_grid_thw"] = torch.cat([e.image_grid_thw for e in batch if e.image_grid_thw is not None])
    loss: Tensor = model(input_ids=token_ids, attention_mask=mask, labels=labels, **images).loss
    return loss
