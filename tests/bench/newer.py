"""Newer families in real shapes with random weights, for ``tests.bench.update``: Qwen3-VL-4B, Qwen3-30B-A3B with 6 of
its 48 layers, and Qwen3.5 with 16 layers, three quarters of which have a recurrent state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.bench.cases import Shape, special_token, vision_tokens, vocabulary_of

# Qwen3-VL has patches of 16 pixels: 256 tokens for a picture of 512 x 512, where Qwen2.5-VL has 324
NEWER = {"vl3-4b": Shape(363, 512, 512, patch=16), "moe-30b": Shape(256, 1024, 0), "states-4b": Shape(256, 1024, 0)}
TINY_NEWER = {"vl3-4b": Shape(48, 48, 64, patch=16), "moe-30b": Shape(32, 64, 0), "states-4b": Shape(32, 64, 0)}


def build_newer(kind: str, tiny: bool, device: Any, dtype: Any) -> Any:
    """Random weights, made where they will be used."""
    import torch

    torch.manual_seed(0)
    with torch.device(device):
        return {"vl3-4b": _qwen3_vl, "moe-30b": _qwen3_moe, "states-4b": _qwen3_5}[kind](tiny, dtype)


def _ids(tiny: bool) -> dict[str, Any]:
    end, pad = special_token("<|im_end|>", tiny), special_token("<|endoftext|>", tiny)
    return {"vocab_size": vocabulary_of(tiny), "bos_token_id": None, "eos_token_id": end, "pad_token_id": pad}


def _qwen3_vl(tiny: bool, dtype: Any) -> Any:
    from transformers import AutoModelForImageTextToText, Qwen3VLConfig

    text: dict[str, Any] = {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "head_dim": 128}
    text |= {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 32_768}
    vision: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 4096, "depth": 24, "num_heads": 16}
    vision |= {"deepstack_visual_indexes": [5, 11, 17], "num_position_embeddings": 2304}
    section = [24, 20, 20]
    if tiny:
        text |= {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 32}
        text |= {"num_attention_heads": 2, "num_key_value_heads": 1}
        vision |= {"hidden_size": 32, "intermediate_size": 64, "depth": 3, "num_heads": 2}
        vision |= {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64}
        section = [6, 5, 5]
    start, end, image, video = vision_tokens(tiny)
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": section, "mrope_interleaved": True}
    config = Qwen3VLConfig(
        text_config={"rope_parameters": rope, "tie_word_embeddings": True, **text, **_ids(tiny)},
        vision_config={"out_hidden_size": text["hidden_size"], "patch_size": 16, **vision},
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=True,
    )
    return AutoModelForImageTextToText.from_config(config, dtype=dtype)


def _qwen3_moe(tiny: bool, dtype: Any) -> Any:
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    shape: Mapping[str, Any] = {
        "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 6,
        "num_experts": 128, "num_experts_per_tok": 8, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "max_position_embeddings": 32_768,
    }  # fmt: skip
    if tiny:
        shape = {
            "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 2,
            "num_experts": 4, "num_experts_per_tok": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
            "head_dim": 32,
        }  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 1e6}
    config = Qwen3MoeConfig(
        rope_parameters=rope, norm_topk_prob=True, tie_word_embeddings=False, **shape, **_ids(tiny)
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def _qwen3_5(tiny: bool, dtype: Any) -> Any:
    from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

    layers = 4 if tiny else 16
    kinds = ["full_attention" if number % 4 == 3 else "linear_attention" for number in range(layers)]
    shape: dict[str, Any] = {"hidden_size": 2560, "intermediate_size": 9728, "max_position_embeddings": 32_768}
    shape |= {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256}
    shape |= {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
    if tiny:
        shape = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
        shape |= {"head_dim": 32, "linear_num_key_heads": 1, "linear_num_value_heads": 2}
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    config = Qwen3_5TextConfig(
        num_hidden_layers=layers, layer_types=kinds, rope_parameters=rope, tie_word_embeddings=True, **shape,
        **_ids(tiny),
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=dtype)
