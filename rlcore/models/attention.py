"""Attention over packed rows, registered with transformers as one implementation for text and vision.

The only place that decides which kernel runs. In a text row a completion sees its prompt and itself, and nothing of
another sequence; an image's patches see those of the same image, or window of it.

On CUDA that is one FlashAttention call: a completion's keys are gathered to be its prompt's and its own, one behind the
other, and the causal mask is aligned to their end (FlashAttention 2.1 and later; arXiv:2307.08691). The keys' gradients
are added up where they came from, in float32. Two calls merged by their log-sum-exps (all completions of a group over
the prompt, each over itself) gather nothing, and were slower on an H200: few keys under many queries fill few of its
processors. FlexAttention wants a block mask for every microbatch and kernels of its own for the shapes.
Which build of FlashAttention runs is decided in ``flash.flash_kernel``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from rlcore.batch import Segments
from rlcore.errors import ModelError
from rlcore.models.flash import flash_kernel
from rlcore.models.sequence import SequenceGroup, heads_of_all_tokens, tokens_of_all_heads

# "flash" in the name is what makes transformers hand the vision tower's cu_seqlens over in one call
PACKED = "rlflow_packed_flash"

# What transformers hands to attention and no implementation of plain softmax attention uses.
_WITHOUT_EFFECT = frozenset(
    {
        "cache_position",
        "cu_seq_lens_k",
        "max_length_k",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "use_cache",
    }
)


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
    segments: Segments | None = None,
    sequence: SequenceGroup | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    dropout: float = 0.0,
    **others: object,
) -> tuple[Tensor, None]:
    """Softmax attention within a packed row: causal along ``segments`` in text, within ``cu_seq_lens_q`` in images.

    Args:
        sequence: the ranks that hold the other parts of a text row, if this one has only a part.
        sliding_window: allowed where no sequence is longer. Compiled code cannot ask, and relies on
            ``support.require_supported``.

    Returns:
        ([1, T, Hq, D], None), as transformers expects.

    Raises:
        ValueError: called without either, which would let sequences see each other.
        ModelError: a keyword that would change the result and is not computed here, such as a soft cap or sinks.
    """
    refused = {name: value for name, value in others.items() if value is not None and name not in _WITHOUT_EFFECT}
    if dropout:
        refused["dropout"] = dropout
    if segments is not None and is_causal is False:
        refused["is_causal"] = is_causal
    looks_back = sliding_window is not None and not torch.compiler.is_compiling()
    if looks_back and (segments is None or int(segments.sizes[2]) > sliding_window):
        refused["sliding_window"] = sliding_window
    if refused:
        raise ModelError(
            f"{type(module).__name__} wants attention with {', '.join(sorted(refused))}, which the packed attention "
            "does not compute. Choose a model without it."
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, H, D]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if segments is not None and sequence is not None:
        q, k, v = heads_of_all_tokens(q, k, v, sequence)
        return tokens_of_all_heads(shared_prompt_attention(q, k, v, segments, scale), sequence)[None], None
    if segments is not None:
        return shared_prompt_attention(q, k, v, segments, scale)[None], None
    if cu_seq_lens_q is None:
        raise ValueError("packed attention was called without segments or cu_seq_lens_q: sequences would see others")
    return within(q, k, v, cu_seq_lens_q, max_length_q, scale)[None], None


def shared_prompt_attention(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Tensor:
    """Each prompt over itself, each completion over its prompt and itself, causal. [T, Hq, D], [T, Hkv, D] twice
    -> [T, Hq, D]"""
    if not _has_kernel(query):
        return _shared_prompt_padded(query, key, value, segments, scale)
    where = (segments.bounds, segments.key_bounds, segments.key_rows, segments.sizes)
    out, _ = OPERATOR(query, key, value, *where, scale)
    return out  # type: ignore[no-any-return]


def within(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int | None, scale: float) -> Tensor:
    """Each sequence over all of itself, not causal. [T, H, D] thrice -> [T, H, D]"""
    if not _has_kernel(query):
        return _within_padded(query, key, value, bounds, scale)
    if longest is None:
        longest = int(bounds.diff().max())
    from torch.nn.attention.varlen import varlen_attn

    bounds = bounds.to(torch.int32)
    return varlen_attn(query, key, value, bounds, bounds, longest, longest, scale=scale)  # type: ignore[return-value]


def _has_kernel(query: Tensor) -> bool:
    """FlashAttention computes in 16 bits only."""
    return query.is_cuda and query.element_size() == 2


# an operator of its own, so that torch.compile takes it whole and activation checkpointing can tell it apart
@torch.library.custom_op("rlflow::shared_prompt_attention", mutates_args=(), device_types="cuda")
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    key_bounds: Tensor,
    key_rows: Tensor,
    sizes: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Output [T, Hq, D] and log-sum-exp [Hq, T] float32."""
    ends = (bounds, key_bounds, *sizes[1:].tolist())
    out, lse = flash_kernel().forward(query, key[key_rows], value[key_rows], *ends, scale)
    return out.contiguous(), lse


@torch.library.custom_op("rlflow::shared_prompt_attention_backward", mutates_args=(), device_types="cuda")
def _attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    bounds: Tensor,
    key_bounds: Tensor,
    key_rows: Tensor,
    sizes: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    ends = (bounds, key_bounds, *sizes[1:].tolist())
    kernel = flash_kernel()
    of_query, *of_copies = kernel.backward(grad, query, key[key_rows], value[key_rows], out, lse, *ends, scale)
    of_key, of_value = (_scattered(part, key_rows, len(key)) for part in of_copies)
    return of_query.contiguous(), of_key, of_value


def _scattered(gradient: Tensor, rows: Tensor, count: int) -> Tensor:
    """[count, H, D] sums of the gradients of each row's copies."""
    total = gradient.new_zeros(count, *gradient.shape[1:], dtype=torch.float32)
    return total.index_add_(0, rows, gradient.float()).to(gradient.dtype)


@_attention.register_fake
def _(query: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32)


@_attention_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, *where, scale = inputs
    ctx.save_for_backward(query, key, value, *output, *where)
    ctx.scale = scale


def _gradient(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    found = torch.ops.rlflow.shared_prompt_attention_backward(grad, *ctx.saved_tensors, ctx.scale)
    return *found, None, None, None, None, None


_attention.register_autograd(_gradient, setup_context=_remember)
OPERATOR = torch.ops.rlflow.shared_prompt_attention.default


# --- on a CPU or in float32: segments side by side in one batch, padded at the end inside these functions only ---


def _shared_prompt_padded(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Tensor:
    count = int(segments.sizes[0])
    rows, inside = _padded_rows(segments.bounds[: count + 1])  # prompts, whose keys are their own
    outs = [_attend(query, key, value, rows, rows, None, True, scale)[inside]]
    if len(segments.bounds) > count + 1:
        rows, inside = _padded_rows(segments.bounds[count:])  # [completions, longest]
        keys, _ = _padded_rows(segments.key_bounds[count:])
        lengths, key_lengths = segments.bounds[count:].diff(), segments.key_bounds[count:].diff()
        last_seen = _upto(rows) + (key_lengths - lengths)[:, None]
        mask = _upto(keys) <= last_seen[..., None]  # padded keys come after all that real queries see
        outs.append(_attend(query, key, value, rows, segments.key_rows[keys], mask[:, None], False, scale)[inside])
    return torch.cat(outs)


def _within_padded(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scale: float) -> Tensor:
    rows, inside = _padded_rows(bounds)
    mask = None if bool(inside.all()) else inside[:, None, None, :]
    return _attend(query, key, value, rows, rows, mask, False, scale)[inside]


def _padded_rows(bounds: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [B, longest] of the segments between ``bounds``, 0 where there is none, and where there is one."""
    starts, lengths = bounds[:-1].long(), bounds.diff().long()
    column = torch.arange(int(lengths.max()), device=bounds.device)
    inside = column[None] < lengths[:, None]
    return torch.where(inside, starts[:, None] + column[None], 0), inside


def _upto(rows: Tensor) -> Tensor:
    return torch.arange(rows.shape[1], device=rows.device)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    queries: Tensor,
    keys: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> Tensor:
    """[B, queries, Hq, D] of the rows ``queries`` [B, queries] over the rows ``keys``."""

    def batched(x: Tensor, rows: Tensor) -> Tensor:  # [T, H, D] -> [B, H, rows, D]
        return x.index_select(0, rows.flatten()).unflatten(0, rows.shape).transpose(1, 2)

    out = scaled_dot_product_attention(
        batched(query, queries),
        batched(key, keys),
        batched(value, keys),
        attn_mask=mask,
        is_causal=causal,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2)
