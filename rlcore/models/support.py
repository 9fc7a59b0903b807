"""What the packed forward pass does not compute, refused by name before anything is trained."""

from __future__ import annotations

import math
from typing import Any

from rlcore.config import ExperimentConfig
from rlcore.errors import ModelError
from rlcore.families import family_of


def require_supported(model: Any, *, longest: int, sequence_parallel: int, tensor_parallel: int = 1) -> None:
    """
    Args:
        model: Hugging Face configuration.
        longest: tokens that a sequence can have, prompt and completion.
        sequence_parallel: ranks that compute a row together.
        tensor_parallel: ranks that hold an engine together.

    Raises:
        ModelError: no supported family; heads or widths that do not divide evenly over the ranks; layers without
            attention over the whole sequence; a window shorter than a sequence can be; soft caps or scales of logits.
    """
    family, name = family_of(model), model.model_type
    heads = model.get_text_config().num_attention_heads
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
    family.require_plain(model)
    masks = family.masks(model)
    if unknown := [mask.kind for mask in masks if mask.kind not in ("full_attention", "sliding_attention")]:
        raise ModelError(
            f"{name} has layers of the kinds {unknown}: allowed are full_attention and, for sequences within the "
            "window, sliding_attention. Others would let the sequences of a packed row see each other."
        )
    window = min((mask.window for mask in masks if mask.window is not None), default=longest)
    if longest > window:
        raise ModelError(
            f"{name} has layers that look back {window} tokens at most (sliding_window), and the packed attention lets "
            f"them see the whole sequence, which may have {longest} tokens. Lower data.max_prompt_tokens and "
            f"rollout.max_completion_tokens to {window} together, or take a model without a window."
        )


def tensor_parallel_degrees(model: Any) -> list[int]:
    """Over how many ranks vLLM can spread one engine: each has equally many query heads and rows of the feed-forward
    weights, in the tower as well; key-value heads are spread, or each is held by equally many ranks."""
    text, images = model.get_text_config(), family_of(model).images
    cut = [getattr(text, size) for size in ("num_attention_heads", "intermediate_size") if hasattr(text, size)]
    cut += [] if images is None else images.head_counts_and_widths(model)
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
