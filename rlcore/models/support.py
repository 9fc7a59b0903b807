"""What the packed forward pass does not compute, refused by name before anything is trained."""

from __future__ import annotations

import math
from typing import Any

from rlcore.config import ExperimentConfig
from rlcore.errors import ModelError

# Fields that change logits or attention scores, and the values with which they do not.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "final_logit_softcapping": (None,),  # Gemma 2
    "attn_logit_softcapping": (None,),
    "logits_soft_cap": (None,),  # RecurrentGemma
    "logit_scale": (None, 1.0),  # Cohere
    "logits_scaling": (None, 1.0),  # Granite
    "lm_head_multiplier": (None, 1.0),  # Falcon-H1
}


def require_supported(model: Any, *, longest: int, sequence_parallel: int, tensor_parallel: int = 1) -> None:
    """
    Args:
        model: Hugging Face configuration.
        longest: tokens that a sequence can have, prompt and completion.
        sequence_parallel: ranks that compute a row together.
        tensor_parallel: ranks that hold an engine together.

    Raises:
        ModelError: heads or widths that these ranks cannot have equally much of; vision features that go into layers
            beside the first (deepstack); layers that are no attention over the whole sequence; a window that sequences
            can be longer than; soft caps or scales of logits.
    """
    name, text = model.model_type, model.get_text_config()
    heads = text.num_attention_heads
    if heads % sequence_parallel:
        raise ModelError(
            f"training.sequence_parallel is {sequence_parallel}, and {name} has {heads} attention heads, which it does "
            f"not divide. Allowed are {_divisors(heads)}."
        )
    if tensor_parallel > 1 and tensor_parallel not in (allowed := tensor_parallel_degrees(model)):
        raise ModelError(
            f"rollout.tensor_parallel is {tensor_parallel}, and the heads and widths of {name} cannot be cut into as "
            f"many equal parts. Allowed are {allowed}."
        )
    deepstack = getattr(getattr(model, "vision_config", None), "deepstack_visual_indexes", None)
    if deepstack:
        raise ModelError(
            f"{name} feeds features of its vision layers {list(deepstack)} into the first layers of its decoder "
            "(deepstack), which the packed forward pass does not. Allowed are models whose images enter as embeddings "
            "alone, Qwen2-VL and Qwen2.5-VL among them."
        )
    kinds = set(getattr(text, "layer_types", None) or ())
    if kinds - {"full_attention", "sliding_attention"}:
        raise ModelError(
            f"{name} has layers of the kinds {sorted(kinds)}: allowed are full_attention and, for sequences within the "
            "window, sliding_attention. Others would let the sequences of a packed row see each other."
        )
    for field, neutral in _NEUTRAL.items():
        value = getattr(text, field, getattr(model, field, None))
        if value not in neutral:
            raise ModelError(
                f"{name} sets {field} to {value}, which neither the packed attention nor the LM head computes: another "
                f"model would be trained. Allowed is {' or '.join(map(str, neutral))}, or a model without that field."
            )
    window = getattr(text, "sliding_window", None)
    if window is not None and (not kinds or "sliding_attention" in kinds) and longest > window:
        raise ModelError(
            f"{name} has layers that look back {window} tokens at most (sliding_window), and the packed attention lets "
            f"them see the whole sequence, which may have {longest} tokens. Lower data.max_prompt_tokens and "
            f"rollout.max_completion_tokens to {window} together, or take a model without a window."
        )


def tensor_parallel_degrees(model: Any) -> list[int]:
    """Over how many ranks vLLM can spread one engine: each has equally many query heads and rows of the feed-forward
    weights, in the tower as well; key-value heads are spread, or each is held by equally many ranks."""
    text, tower = model.get_text_config(), getattr(model, "vision_config", None)
    sizes = ("num_attention_heads", "num_heads", "intermediate_size")
    cut = [getattr(part, size) for part in (text, tower) for size in sizes if hasattr(part, size)]
    key_value = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return [n for n in _divisors(math.gcd(*cut)) if key_value % n == 0 or n % key_value == 0]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def pick_device(config: ExperimentConfig) -> str:
    """The device of ``resources.device``; auto takes CUDA where torch finds it."""
    if config.resources.device != "auto":
        return config.resources.device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
