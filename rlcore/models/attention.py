"""Attention over packed rows, registered with transformers as one implementation for text and vision.

The only place that decides which kernel runs. In a text row a completion sees its prompt and itself, and nothing of
another sequence; an image's patches see those of the same image, or window of it.

Shared prompts on CUDA take two FlashAttention calls: every segment over itself, causal; and the completions of each
prompt, as one long sequence of queries, over that prompt. Two softmaxes over parts of the keys become the softmax over
all of them by their log-sum-exps (arXiv:2112.05682, section 3), and FlashAttention's backward, which computes
exp(score - lse) again, gives each part's exact gradient when it is handed the output and the lse of the whole
(arXiv:2307.08691, algorithm 2). FlexAttention could do it in one call, but its kernels are slower, want a block mask
for every microbatch and compile anew for new shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from rlcore.batch import Segments

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
    segments: Segments | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Softmax attention within a packed row: causal along ``segments`` in text, within ``cu_seq_lens_q`` in images.

    Returns:
        ([1, T, Hq, D], None), as transformers expects.

    Raises:
        ValueError: called without either, which would let sequences see each other.
    """
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, H, D]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if segments is not None:
        return shared_prompt_attention(q, k, v, segments, scale)[None], None
    if cu_seq_lens_q is None:
        raise ValueError("packed attention was called without segments or cu_seq_lens_q: sequences would see others")
    return within(q, k, v, cu_seq_lens_q, max_length_q, scale)[None], None


def shared_prompt_attention(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Tensor:
    """Each prompt over itself, each completion over its prompt and itself, causal. [T, Hq, D], [T, Hkv, D] twice
    -> [T, Hq, D]"""
    if not query.is_cuda:
        return _shared_prompt_padded(query, key, value, segments, scale)
    bounds = (segments.bounds, segments.prompt_bounds, segments.group_bounds, segments.sizes)
    out, _ = OPERATOR(query, key, value, *bounds, scale)
    return out  # type: ignore[no-any-return]


def within(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int | None, scale: float) -> Tensor:
    """Each sequence over all of itself, not causal. [T, H, D] thrice -> [T, H, D]"""
    if not query.is_cuda:
        return _within_padded(query, key, value, bounds, scale)
    if longest is None:
        longest = int(bounds.diff().max())
    from torch.nn.attention.varlen import varlen_attn

    bounds = bounds.to(torch.int32)
    return varlen_attn(query, key, value, bounds, bounds, longest, longest, scale=scale)  # type: ignore[return-value]


# --- the parts of a shared prompt, merged ---

# query, key, value, query bounds, key bounds, longest query, longest key, causal, scale -> out [Tq, H, D], lse [H, Tq]
Forward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int, bool, float], tuple[Tensor, Tensor]]
# gradient of out, query, key, value, out, lse, then as above -> gradients of query, key and value
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]


def merged_forward(
    kernel: Forward,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    prompt_bounds: Tensor,
    group_bounds: Tensor,
    sizes: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Output [T, Hq, D] and log-sum-exp [Hq, T] float32 of the whole, from two calls of ``kernel``."""
    prompts, longest, longest_prompt, longest_group = sizes.tolist()
    out, lse = kernel(query, key, value, bounds, bounds, longest, longest, True, scale)
    if prompts < len(query):
        ends = (group_bounds, prompt_bounds, longest_group, longest_prompt)
        of_prompt, prompt_lse = kernel(query[prompts:], key[:prompts], value[:prompts], *ends, False, scale)
        own, own_lse = out[prompts:], lse[:, prompts:]
        whole_lse = torch.logaddexp(own_lse, prompt_lse)
        share = (prompt_lse - whole_lse).exp().t()[..., None]  # [T - P, Hq, 1] of the attention that the prompt has
        own.copy_(own + share * (of_prompt - own))
        own_lse.copy_(whole_lse)
    return out, lse


def merged_backward(
    kernel: Backward,
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    bounds: Tensor,
    prompt_bounds: Tensor,
    group_bounds: Tensor,
    sizes: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; ``out`` and ``lse`` are those of the whole."""
    prompts, longest, longest_prompt, longest_group = sizes.tolist()
    ends = (bounds, bounds, longest, longest)
    of_query, of_key, of_value = kernel(grad, query, key, value, out, lse, *ends, True, scale)
    if prompts < len(query):
        more = kernel(
            grad[prompts:],
            query[prompts:],
            key[:prompts],
            value[:prompts],
            out[prompts:],
            lse[:, prompts:].contiguous(),
            group_bounds,
            prompt_bounds,
            longest_group,
            longest_prompt,
            False,
            scale,
        )
        of_query[prompts:] += more[0]
        of_key[:prompts] += more[1]
        of_value[:prompts] += more[2]
    return of_query, of_key, of_value


def _flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_bounds: Tensor,
    key_bounds: Tensor,
    longest_query: int,
    longest_key: int,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    ends = (query_bounds, key_bounds, longest_query, longest_key)
    found = torch.ops.aten._flash_attention_forward(query, key, value, *ends, 0.0, causal, False, scale=scale)
    return found[0], found[1]


def _flash_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    query_bounds: Tensor,
    key_bounds: Tensor,
    longest_query: int,
    longest_key: int,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    ends = (query_bounds, key_bounds, longest_query, longest_key)
    no_dropout = (query.new_zeros(2, dtype=torch.uint64), query.new_empty(0))  # its generator's state
    return torch.ops.aten._flash_attention_backward(  # type: ignore[no-any-return]
        grad, query, key, value, out, lse, *ends, 0.0, causal, *no_dropout, scale=scale
    )


# operators of their own, so that torch.compile takes them whole and activation checkpointing can tell them apart
@torch.library.custom_op("rlflow::shared_prompt_attention", mutates_args=(), device_types="cuda")
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    prompt_bounds: Tensor,
    group_bounds: Tensor,
    sizes: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    ends = (bounds, prompt_bounds, group_bounds, sizes)
    out, lse = merged_forward(_flash_forward, query, key, value, *ends, scale)
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
    prompt_bounds: Tensor,
    group_bounds: Tensor,
    sizes: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    ends = (bounds, prompt_bounds, group_bounds, sizes)
    of_query, of_key, of_value = merged_backward(_flash_backward, grad, query, key, value, out, lse, *ends, scale)
    return of_query.contiguous(), of_key.contiguous(), of_value.contiguous()


@_attention.register_fake
def _(query: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32)


@_attention_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, *ends, scale = inputs
    ctx.save_for_backward(query, key, value, *output, *ends)
    ctx.scale = scale


def _gradient(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    found = torch.ops.rlflow.shared_prompt_attention_backward(grad, *ctx.saved_tensors, ctx.scale)
    return *found, None, None, None, None, None


_attention.register_autograd(_gradient, setup_context=_remember)
OPERATOR = torch.ops.rlflow.shared_prompt_attention.default


# --- CPU: segments side by side in one batch, padded at the end inside these functions only ---


def _shared_prompt_padded(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Tensor:
    count = len(segments.prompt_bounds) - 1
    starts, lengths = segments.bounds[:-1].long(), segments.bounds.diff().long()
    prompts, prompts_inside = _padded_rows(starts[:count], lengths[:count])
    outs = [_attend(query, key, value, prompts, prompts, None, True, scale)[prompts_inside]]
    if len(starts) > count:
        own, own_inside = _padded_rows(starts[count:], lengths[count:])  # [B, longest]
        ends = segments.group_bounds[1:].long() + segments.sizes[0]
        prompt_of = torch.searchsorted(ends, starts[count:], right=True)
        causal = torch.ones(own.shape[1], own.shape[1], dtype=torch.bool).tril()
        seen = torch.cat(
            [prompts_inside[prompt_of][:, None].expand(-1, own.shape[1], -1), causal.expand(len(own), -1, -1)], dim=-1
        )  # padding of a completion comes after all of its own queries
        rows = torch.cat([prompts[prompt_of], own], dim=1)
        outs.append(_attend(query, key, value, own, rows, seen[:, None], False, scale)[own_inside])
    return torch.cat(outs)


def _within_padded(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scale: float) -> Tensor:
    rows, inside = _padded_rows(bounds[:-1].long(), bounds.diff().long())
    mask = None if bool(inside.all()) else inside[:, None, None, :]
    return _attend(query, key, value, rows, rows, mask, False, scale)[inside]


def _padded_rows(starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [B, longest] of each segment's tokens, 0 where there is none, and where there is one."""
    column = torch.arange(int(lengths.max()))
    inside = column[None] < lengths[:, None]
    return torch.where(inside, starts[:, None] + column[None], 0), inside


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
