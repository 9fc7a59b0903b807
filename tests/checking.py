"""Tiny random models of every family, and check-model on them, for tests and for docs/models.md."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen3Config,
    Qwen3VLConfig,
)

from rlcore.artifacts import ModelCheck, ModelRef
from rlcore.config import build_experiment
from rlcore.data.tiny import build_processor, build_text_tokenizer
from rlcore.models.tiny import sampling_defaults
from rlcore.specs import CheckModelSpec

_HIDDEN = 64
_STD = 0.15  # about 1 / sqrt(_HIDDEN): with the usual 0.02 all tokens would be equally likely
SMALL: dict[str, Any] = {
    "hidden_size": _HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,  # head size 32, the smallest that vLLM's attention on a CPU takes
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}


def _with_images(config: type, interleaved: bool = False, **vision: int | list[int]) -> Callable[[int], Any]:
    token = build_processor().tokenizer.convert_tokens_to_ids
    names = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
    ids = {f"{name}_token_id": token(text) for name, text in names.items()}
    ids |= {f"vision_{side}_token_id": token(f"<|vision_{side}|>") for side in ("start", "end")}
    rope = _MROPE | ({"mrope_interleaved": True} if interleaved else {})
    return lambda vocabulary: config(
        text_config={**SMALL, "head_dim": 32, "vocab_size": vocabulary, "rope_parameters": rope},
        vision_config={"depth": 2, "num_heads": 2, **vision},
        tie_word_embeddings=False,
        **ids,
    )


def _text(config: type, **changes: Any) -> Callable[[int], Any]:
    return lambda vocabulary: config(**{**SMALL, **changes, "vocab_size": vocabulary})


FAMILIES: dict[str, Callable[[int], Any]] = {
    "qwen2": _text(Qwen2Config),
    "qwen2, tied": _text(Qwen2Config, tie_word_embeddings=True),
    "qwen3": _text(Qwen3Config, head_dim=32),
    "llama": _text(LlamaConfig),
    "llama, long context": _text(LlamaConfig, rope_parameters=_LLAMA3_ROPE),
    "mistral": _text(MistralConfig, sliding_window=None, head_dim=32),
    "phi3": _text(Phi3Config, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
    "phi3, part of each head turned": _text(
        Phi3Config,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75},
    ),
    "olmo2": _text(Olmo2Config),
    "gemma2": _text(
        Gemma2Config,
        head_dim=32,
        final_logit_softcapping=None,
        attn_logit_softcapping=None,
        tie_word_embeddings=True,
    ),
    "gemma3_text": _text(
        Gemma3TextConfig,
        head_dim=32,
        query_pre_attn_scalar=48,
        sliding_window=16,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        tie_word_embeddings=True,
    ),
    "cohere": _text(CohereConfig, logit_scale=1.0, tie_word_embeddings=True),
    "granite": _text(GraniteConfig, embedding_multiplier=3.0, residual_multiplier=0.5, logits_scaling=1.0),
    "qwen2_vl": _with_images(Qwen2VLConfig, embed_dim=_HIDDEN, hidden_size=_HIDDEN),
    "qwen2_5_vl": _with_images(
        Qwen2_5_VLConfig, hidden_size=_HIDDEN, out_hidden_size=_HIDDEN, intermediate_size=96, fullatt_block_indexes=[1]
    ),
    "qwen3_vl": _with_images(
        Qwen3VLConfig,
        interleaved=True,
        hidden_size=_HIDDEN,
        out_hidden_size=_HIDDEN,
        intermediate_size=96,
        num_position_embeddings=64,
        deepstack_visual_indexes=[0, 1],
    ),
}
"""Name -> vocabulary size -> configuration. The name starts with the model type."""


def make_model(folder: Path, name: str, **changes: Any) -> Path:
    """A random model of a family as a Hugging Face folder.

    Args:
        changes: fields of its text configuration.
    """
    model_type = name.partition(",")[0]
    with_images = "_vl" in model_type
    processor: Any = build_processor(model_type) if with_images else build_text_tokenizer()
    tokenizer = processor.tokenizer if with_images else processor
    config = FAMILIES[name](len(tokenizer))
    for field, value in changes.items():
        setattr(config.get_text_config(), field, value)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(zlib.crc32(name.encode()))
        model = (AutoModelForImageTextToText if with_images else AutoModelForCausalLM).from_config(config)
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(_STD * noise if parameter.ndim > 1 else parameter + 0.1 * noise)
    model.generation_config = sampling_defaults(tokenizer)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def spec_of(model: Path, out: Path, *overrides: str, with_engine: bool = True) -> CheckModelSpec:
    """check-model on a folder, on the CPU."""
    values = {"name": "check", "model": {"path": str(model)}, "data": {"template": "tiny", "max_prompt_tokens": 512}}
    values |= {"rollout": {"max_completion_tokens": 128}, "resources": {"device": "cpu"}}
    return CheckModelSpec(
        result=out / "result.json",
        experiment=build_experiment(values, overrides),
        model=ModelRef(path=str(model), digest=hashlib.sha256(str(model).encode()).hexdigest(), source="random",
                       num_parameters=1000),
        with_engine=with_engine,
    )  # fmt: skip


def checked(model: Path, *overrides: str, with_engine: bool = True) -> ModelCheck:
    """The table for a folder, computed in this process, with every row."""
    from rlcore.jobs.check_model import examine

    out = model.parent / f"{model.name}-check"
    return examine(spec_of(model, out, *overrides, with_engine=with_engine), out / "scratch")


def differing(check: ModelCheck) -> dict[str, str]:
    """Name -> place of the rows that have not passed."""
    return {row.name: row.place for row in check.rows if not row.passed}
