"""Tiny random models of every family, and check-model on them, for tests and for docs/models.md."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    CohereConfig,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    Glm4vConfig,
    GptOssConfig,
    GraniteConfig,
    Idefics3Config,
    InternVLConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    SmolVLMConfig,
)

from rlcore.artifacts import ModelCheck, ModelRef
from rlcore.config import build_experiment
from rlcore.data.tiny import build_processor, build_text_tokenizer
from rlcore.families import FAMILIES as TABLE
from rlcore.models.loading import save_published
from rlcore.models.tiny import sampling_defaults
from rlcore.specs import CheckModelSpec

_STD = 0.15  # about 1 / sqrt(width): with the usual 0.02 all tokens would be equally likely


@dataclass(frozen=True, slots=True)
class Size:
    """Of a tiny model."""

    head: int
    heads: int
    vocabulary: int

    @property
    def width(self) -> int:
        return self.head * self.heads

    @property
    def sections(self) -> list[int]:
        """Halves of rotated pairs of a head, for the axes of a picture."""
        first = self.head // 8
        second = (self.head // 2 - first) // 2
        return [first, second, self.head // 2 - first - second]


def for_vllm(vocabulary: int) -> Size:
    """With heads of 32, the smallest that vLLM's attention on a CPU takes."""
    return Size(head=32, heads=2, vocabulary=vocabulary)


def _decoder(size: Size) -> dict[str, Any]:
    return {
        "vocab_size": size.vocabulary,
        "hidden_size": size.width,
        "intermediate_size": 3 * size.width // 2,
        "num_hidden_layers": 3,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.heads // 2,
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
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def _experts(size: Size) -> dict[str, Any]:
    """Six experts, of which a token uses two."""
    return {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": size.width, "norm_topk_prob": True}


def _shared_expert(size: Size) -> dict[str, Any]:
    """The same and one that every token uses."""
    return _experts(size) | {"shared_expert_intermediate_size": size.width}


def _text(config: type, of_size: Callable[[Size], dict[str, Any]] | None = None, **fixed: Any) -> Callable[..., Any]:
    """
    Args:
        of_size: fields that depend on the size.
    """

    def make(size: Size, **changes: Any) -> Any:
        return config(**{**_decoder(size), **(of_size(size) if of_size else {}), **fixed, **changes})

    return make


def _with_images(
    config: type,
    tower: Callable[[int], dict[str, Any]],
    of_size: Callable[[Size], dict[str, Any]] | None = None,
    **rope: Any,
) -> Callable[..., Any]:
    """
    Args:
        tower: fields of the vision tower, by the decoder's width.
        of_size: fields of the decoder that depend on the size.
    """

    def make(size: Size, **changes: Any) -> Any:
        token = build_processor().tokenizer.convert_tokens_to_ids
        names = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
        ids = {f"{name}_token_id": token(text) for name, text in names.items()}
        ids |= {f"vision_{side}_token_id": token(f"<|vision_{side}|>") for side in ("start", "end")}
        return config(
            text_config={
                **_decoder(size),
                "head_dim": size.head,
                "rope_parameters": _ROPE | {"mrope_section": size.sections} | rope,
                **(of_size(size) if of_size else {}),
                **changes,
            },
            vision_config={"depth": 2, "num_heads": 2, **tower(size.width)},
            tie_word_embeddings=False,
            **ids,
        )

    return make


def _with_tiles(decoder: str) -> Callable[..., Any]:
    """
    Args:
        decoder: its model type.
    """

    def make(size: Size, **changes: Any) -> Any:
        tower = {"hidden_size": size.width, "intermediate_size": 3 * size.width // 2}
        tower |= {"image_size": [28, 28], "patch_size": [7, 7]}
        return InternVLConfig(
            text_config={**_decoder(size), "model_type": decoder, "head_dim": size.head, **changes},
            vision_config={"num_hidden_layers": 2, "num_attention_heads": 2, **tower},
            image_token_id=build_processor("internvl").image_token_id,
            image_seq_length=4,
            tie_word_embeddings=False,
        )

    return make


def _glm4v(size: Size, **changes: Any) -> Any:
    """Half of each head is turned."""
    token = build_processor("glm4v").tokenizer.convert_tokens_to_ids
    ids = {f"{kind}_token_id": token(f"<|{kind}|>") for kind in ("image", "video")}
    for side, word in (("start", "begin"), ("end", "end")):
        ids |= {f"{kind}_{side}_token_id": token(f"<|{word}_of_{kind}|>") for kind in ("image", "video")}
    pairs = size.head // 4
    sections = [pairs // 4, (pairs - pairs // 4) // 2]
    rope = _ROPE | {"partial_rotary_factor": 0.5, "mrope_section": [*sections, pairs - sum(sections)]}
    tower = {"hidden_size": size.width, "out_hidden_size": size.width, "intermediate_size": 3 * size.width // 2}
    return Glm4vConfig(
        text_config={**_decoder(size), "attention_bias": True, "rope_parameters": rope, **changes},
        vision_config={"depth": 2, "num_heads": 2, "image_size": 112, **tower},
        tie_word_embeddings=False,
        **ids,
    )


def _with_named_tiles(size: Size, config: type = Idefics3Config, **changes: Any) -> Any:
    processor = build_processor("idefics3")
    tower = {"hidden_size": size.width, "intermediate_size": 3 * size.width // 2, "image_size": 28, "patch_size": 7}
    return config(
        text_config={**_decoder(size), "model_type": "llama", "head_dim": size.head, **changes},
        vision_config={"num_hidden_layers": 2, "num_attention_heads": 2, **tower},
        image_token_id=processor.image_token_id,
        pad_token_id=0,
        scale_factor=2,
        tie_word_embeddings=False,
    )


def _with_squares(size: Size, **changes: Any) -> Any:
    """Pictures of 84 x 84 pixels: 12 x 12 patches, merged into 36 tokens."""
    token = build_processor("gemma3").tokenizer.convert_tokens_to_ids
    tower = {"hidden_size": size.width, "intermediate_size": 3 * size.width // 2, "image_size": 84, "patch_size": 7}
    return Gemma3Config(
        text_config={
            **_decoder(size),
            "head_dim": size.head,
            "query_pre_attn_scalar": size.head,
            "sliding_window": 40,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "tie_word_embeddings": True,
            **changes,
        },
        vision_config={"num_hidden_layers": 2, "num_attention_heads": 2, "vision_use_head": False, **tower},
        mm_tokens_per_image=36,
        boi_token_index=token("<start_of_image>"),
        eoi_token_index=token("<end_of_image>"),
        image_token_id=token("<image_soft_token>"),
    )


def _qwen3_tower(width: int) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "out_hidden_size": width,
        "intermediate_size": 3 * width // 2,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    }


def _qwen3_5_tower(width: int) -> dict[str, Any]:
    return {name: value for name, value in _qwen3_tower(width).items() if name != "deepstack_visual_indexes"}


def _states(size: Size) -> dict[str, Any]:
    """Two value heads to a key head, and half of each attention head turned."""
    sections = [max(1, part // 2) for part in size.sections]
    sections[0] = size.head // 4 - sum(sections[1:])
    return {
        "head_dim": size.head,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "linear_num_key_heads": size.heads // 2,
        "linear_num_value_heads": size.heads,
        "linear_key_head_dim": 4 * size.head,  # vLLM on a CPU takes 128
        "linear_value_head_dim": 4 * size.head,
        "rope_parameters": _ROPE | {"partial_rotary_factor": 0.5, "mrope_section": sections, "mrope_interleaved": True},
    }


FAMILIES: dict[str, Callable[..., Any]] = {
    "qwen2": _text(Qwen2Config),
    "qwen2, tied": _text(Qwen2Config, tie_word_embeddings=True),
    "qwen3": _text(Qwen3Config, lambda size: {"head_dim": 2 * size.head}),
    "qwen3_moe": _text(Qwen3MoeConfig, lambda size: _experts(size) | {"head_dim": size.head}),
    "qwen3_moe, a layer without experts": _text(
        Qwen3MoeConfig, lambda size: _experts(size) | {"head_dim": size.head}, mlp_only_layers=[1], norm_topk_prob=False
    ),
    "llama": _text(LlamaConfig),
    "llama, long context": _text(LlamaConfig, rope_parameters=_LLAMA3_ROPE),
    "mistral": _text(MistralConfig, lambda size: {"head_dim": size.head}, sliding_window=None),
    "phi3": _text(Phi3Config, rope_parameters=_ROPE),
    "phi3, part of each head turned": _text(Phi3Config, rope_parameters=_ROPE | {"partial_rotary_factor": 0.75}),
    "olmo2": _text(Olmo2Config),
    "olmo3": _text(
        Olmo3Config,
        lambda size: {"rope_parameters": dict(_ROPE)},  # transformers changes it
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "gemma2": _text(
        Gemma2Config,
        lambda size: {"head_dim": size.head, "query_pre_attn_scalar": 3 * size.head // 2},
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
        tie_word_embeddings=True,
    ),
    "gemma3_text": _text(
        Gemma3TextConfig,
        lambda size: {"head_dim": size.head, "query_pre_attn_scalar": 3 * size.head // 2},
        sliding_window=16,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        tie_word_embeddings=True,
    ),
    "cohere": _text(CohereConfig, logit_scale=1.0, tie_word_embeddings=True),
    "granite": _text(GraniteConfig, embedding_multiplier=3.0, residual_multiplier=0.5, logits_scaling=1.0),
    "qwen2_vl": _with_images(Qwen2VLConfig, lambda width: {"embed_dim": width, "hidden_size": width}),
    "qwen2_5_vl": _with_images(
        Qwen2_5_VLConfig,
        lambda width: {
            "hidden_size": width,
            "out_hidden_size": width,
            "intermediate_size": 3 * width // 2,
            "fullatt_block_indexes": [1],
        },
    ),
    "qwen3_vl": _with_images(Qwen3VLConfig, _qwen3_tower, mrope_interleaved=True),
    "qwen3_vl_moe": _with_images(
        Qwen3VLMoeConfig,
        _qwen3_tower,
        # not square, because transformers tells the layouts of stored experts apart by their shapes
        lambda size: _experts(size) | {"moe_intermediate_size": 3 * size.width // 2},
        mrope_interleaved=True,
    ),
    "qwen3_5_text": _text(Qwen3_5TextConfig, _states),
    "qwen3_5": _with_images(Qwen3_5Config, _qwen3_5_tower, _states),
    "qwen3_5_moe_text": _text(Qwen3_5MoeTextConfig, lambda size: _states(size) | _shared_expert(size)),
    "qwen3_5_moe": _with_images(Qwen3_5MoeConfig, _qwen3_5_tower, lambda size: _states(size) | _shared_expert(size)),
    "glm4v": _glm4v,
    "internvl": _with_tiles("qwen3"),
    "internvl, older decoder": _with_tiles("qwen2"),
    "idefics3": _with_named_tiles,
    "smolvlm": partial(_with_named_tiles, config=SmolVLMConfig),
    "gemma3": _with_squares,
}
"""Name -> size and further fields of the decoder -> configuration. The name starts with the model type."""


def settings_on_a_cpu(name: str) -> tuple[str, ...]:
    """What vLLM on a CPU needs for a family."""
    family = TABLE.get(name.partition(",")[0])
    return () if family is None or family.recurrence is None else ("rollout.dtype=bfloat16",)


def _gpt_oss(folder: Path) -> None:
    tokenizer = build_text_tokenizer()
    size = for_vllm(len(tokenizer))
    config = GptOssConfig(
        **_decoder(size) | {"head_dim": size.head, "num_local_experts": 4, "num_experts_per_tok": 2},
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters=_ROPE,
    )
    _random_model(AutoModelForCausalLM, config, "gpt_oss").save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _only_a_config(folder: Path, model_type: str) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "vision_config": {}}))


REFUSED: dict[str, Callable[[Path], None]] = {
    "gpt_oss": _gpt_oss,
    "kimi_vl": partial(_only_a_config, model_type="kimi_vl"),
}
"""Model type -> writes a model of it to a folder."""


def _random_model(loader: Any, config: Any, name: str) -> Any:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(zlib.crc32(name.encode()))
        model = loader.from_config(config).eval()
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(_STD * noise if parameter.ndim > 1 else parameter + 0.1 * noise)
            if name.endswith(".A_log"):  # transformers draws states that forget almost all within a token
                parameter -= 4
    return model


def sampled_on_a_cpu(name: str) -> bool:
    """Whether vLLM on a CPU computes the family."""
    family = TABLE.get(name.partition(",")[0])
    return family is None or family.images is None or not family.images.both_ways


def takes_images(name: str) -> bool:
    return TABLE[name.partition(",")[0]].images is not None


def make_model(folder: Path, name: str, **changes: Any) -> Path:
    """A random model of a family as a Hugging Face folder.

    Args:
        changes: fields of its text configuration.
    """
    if name in REFUSED:
        REFUSED[name](folder)
        return folder
    model_type = name.partition(",")[0]
    with_images = takes_images(name)
    processor: Any = build_processor(model_type) if with_images else build_text_tokenizer()
    tokenizer = processor.tokenizer if with_images else processor
    config = FAMILIES[name](for_vllm(len(tokenizer)), **changes)
    model = _random_model(AutoModelForImageTextToText if with_images else AutoModelForCausalLM, config, name)
    model.generation_config = sampling_defaults(tokenizer)
    save_published(model, folder)
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
