"""Attention over packed sequences, registered with transformers as one implementation for text and vision.

The only place that decides which kernel runs. A sequence never sees another one of the same microbatch.
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

# "flash" in the name is what makes transformers hand the vision tower's cu_seqlens over in one call
PACKED = "rlflow_packed_flash"


def use_packed_attention(model: nn.Module) -> None:
    """Switch every sub-configuration of ``model`` to packed attention."""
    AttentionInterface.register(PACKED, packed_attention)
    AttentionMaskInterface.register(PACKED, lambda *_args, **_kwargs: None)
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None:
            config._attn_implementation = PACKED


def packed_attention(
    module: nn.Module,
    query: Tensor,  # [1, Hq, T, D]
    key: Tensor,  # [1, Hkv, T, D]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Softmax attention within each sequence of a packed row; causal unless ``is_causal`` is False.

    Returns:
        ([1, T, Hq, D], None), as transformers expects.

    Raises:
        ValueError: called without ``cu_seq_lens_q``, which would let sequences see each other.
    """
    if cu_seq_lens_q is None:
        raise ValueError("packed attention was called without cu_seq_lens_q: sequences would see each other")
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    arguments = (query[0], key[0], value[0], cu_seq_lens_q, max_length_q, scaling, causal)
    out = _varlen(*arguments) if query.is_cuda else _padded(*arguments)
    return out[None], None


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    longest: int | None,
    scaling: float | None,
    causal: bool,
) -> Tensor:
    """FlashAttention through torch. [H, T, D] -> [T, H, D]"""
    from torch.nn.attention.varlen import varlen_attn

    if longest is None:
        longest = int((cu_seqlens[1:] - cu_seqlens[:-1]).max())
    cu_seqlens = cu_seqlens.to(torch.int32)
    return varlen_attn(
        query.transpose(0, 1).contiguous(),
        key.transpose(0, 1).contiguous(),
        value.transpose(0, 1).contiguous(),
        cu_seqlens,
        cu_seqlens,
        longest,
        longest,
        scale=scaling,
        window_size=(-1, 0) if causal else (-1, -1),
        **_grouped(query.shape[0] != key.shape[0]),
    )


def _grouped(fewer_key_heads: bool) -> dict[str, bool]:
    """torch 2.13 wants to be told that several query heads share a key head; 2.11 sees it, and takes no such word."""
    from torch.nn.attention.varlen import varlen_attn

    takes_it = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return {"enable_gqa": fewer_key_heads} if takes_it else {}


def _padded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    longest: int | None,
    scaling: float | None,
    causal: bool,
) -> Tensor:
    """CPU: sequences side by side in one batch, padded at the end inside this function only. [H, T, D] -> [T, H, D]"""
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).long()
    longest = int(lengths.max()) if longest is None else longest
    column = torch.arange(longest)
    inside = column[None] < lengths[:, None]  # [B, longest]
    row_of = torch.where(inside, cu_seqlens[:-1, None].long() + column[None], 0)  # padding reads token 0 ...

    def batched(x: Tensor) -> Tensor:  # [H, T, D] -> [B, H, longest, D]
        return x.index_select(1, row_of.flatten()).unflatten(1, row_of.shape).transpose(0, 1)

    # ... which no real query sees: a causal one looks back only, the others get a mask
    mask = None if causal or bool(inside.all()) else inside[:, None, None, :]
    out = scaled_dot_product_attention(
        batched(query),
        batched(key),
        batched(value),
        attn_mask=mask,
        is_causal=causal,
        scale=scaling,
        enable_gqa=query.shape[0] != key.shape[0],
    )  # [B, Hq, longest, D]
    return out.transpose(1, 2)[inside]
