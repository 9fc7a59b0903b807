"""Attention over packed rows, registered with transformers as one implementation for text and vision.

This file alone decides which kernel runs. In a text row a completion attends to its prompt and itself only. In a vision
row a patch attends to its own image, to its window of it, or to its own tile. The sliding window of a decoder layer
counts positions inside a sequence: a completion's first token still sees the end of its prompt, wherever that lies in
the row. Scores may have a soft cap. Tokens of a picture
may attend to each other in both directions: their rows are then computed a second time, without the causal mask.

On CUDA this is one FlashAttention call. The keys of each completion are gathered: its prompt's, then its own. The
causal mask is aligned to their end (FlashAttention 2.1 and later; arXiv:2307.08691). The backward pass adds the
gradients of the gathered keys in float32. Two calls merged by their log-sum-exps gather nothing but were slower on an
H200: few keys under many queries leave most of its processors idle. FlexAttention needs a block mask for every
microbatch and compiles kernels for each shape. ``flash.flash_kernel`` selects the build of FlashAttention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from rlcore.batch import Pictures, Segments
from rlcore.errors import ModelError
from rlcore.models.flash import Sequences, flash_kernel
from rlcore.models.sequence import SequenceGroup, heads_of_all_tokens, tokens_of_all_heads

# transformers passes the vision tower's cu_seqlens in one call only if the name contains "flash"
PACKED = "rlflow_packed_flash"
TILES = "rlflow_tiles"

# Keywords that transformers passes and that do not change softmax attention.
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
    _switch(model, PACKED, packed_attention)


def use_tile_attention(tower: nn.Module) -> None:
    """Switch a vision tower whose input is a batch of tiles to attention within each tile."""
    _switch(tower, TILES, tile_attention)


def _switch(model: nn.Module, name: str, attention: Callable[..., Any]) -> None:
    """Register ``attention``, which needs no mask, under ``name`` and let every configuration of ``model`` name it."""
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, lambda *_args, **_kwargs: None)
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None:
            config._attn_implementation = name


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
    softcap: float | None = None,
    dropout: float = 0.0,
    **others: object,
) -> tuple[Tensor, None]:
    """Softmax attention within a packed row: causal along ``segments`` in text, within ``cu_seq_lens_q`` in images.

    Args:
        sequence: the ranks that hold the other parts of a text row, with sequence parallelism.
        sliding_window: number of last tokens of its sequence that a token of a text row attends to, itself included.
        softcap: of the scores in a text row: softcap * tanh(score / softcap).

    Returns:
        ([1, T, Hq, D], None), as transformers expects.

    Raises:
        ValueError: neither ``segments`` nor ``cu_seq_lens_q`` was given: sequences would see each other.
        ModelError: a keyword changes the result and is not implemented here, such as sinks.
    """
    refused = _refused(others, dropout)
    if segments is not None and is_causal is False:
        refused["is_causal"] = is_causal
    if segments is None:
        text_alone = {"sliding_window": sliding_window, "softcap": softcap}
        refused |= {name: value for name, value in text_alone.items() if value is not None}
    _require_none(module, refused)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, H, D]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = Scores(scale, sliding_window, softcap)
    if segments is not None and sequence is not None:
        q, k, v = heads_of_all_tokens(q, k, v, sequence)
        out = shared_prompt_attention(q, k, v, segments, scores)
        return tokens_of_all_heads(out, sequence)[None], None
    if segments is not None:
        return shared_prompt_attention(q, k, v, segments, scores)[None], None
    if cu_seq_lens_q is None:
        raise ValueError(
            "packed attention was called without segments or cu_seq_lens_q: sequences would see each other"
        )
    return full_attention(q, k, v, cu_seq_lens_q, max_length_q, scale)[None], None


def tile_attention(
    module: nn.Module,
    query: Tensor,  # [B, H, S, D]: S patches of each of B tiles
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    dropout: float = 0.0,
    **others: object,
) -> tuple[Tensor, None]:
    """Softmax attention of each patch to all of its tile.

    Returns:
        ([B, S, H, D], None), as transformers expects.

    Raises:
        ModelError: attention is causal, or a keyword changes the result and is not implemented here.
    """
    refused = _refused(others, dropout)
    if is_causal is not False:
        refused["is_causal"] = is_causal
    _require_none(module, refused)
    tiles, _, patches, size = query.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))  # [B * S, H, D]
    bounds = torch.arange(tiles + 1, device=query.device, dtype=torch.int32) * patches
    out = full_attention(q, k, v, bounds, patches, size**-0.5 if scaling is None else scaling)
    return out.unflatten(0, (tiles, patches)), None  # type: ignore[no-untyped-call]


def _refused(others: dict[str, object], dropout: float) -> dict[str, object]:
    """The keywords of a call that change the result and are not implemented here."""
    refused = {name: value for name, value in others.items() if value is not None and name not in _WITHOUT_EFFECT}
    return refused | {"dropout": dropout} if dropout else refused


def _require_none(module: nn.Module, refused: dict[str, object]) -> None:
    if refused:
        raise ModelError(
            f"{type(module).__name__} calls attention with {', '.join(sorted(refused))}, which the packed attention "
            "does not compute. Choose a model without it."
        )


class Scores(NamedTuple):
    """How the scores of text are computed, and which of them count."""

    scale: float  # of the product of query and key
    window: int | None = None  # number of last tokens of its sequence that a token attends to, itself included
    cap: float | None = None  # soft cap of the scaled product


def shared_prompt_attention(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scores: Scores) -> Tensor:
    """Causal attention of each prompt to itself and of each completion to its prompt and itself. With
    ``segments.pictures`` the rows of their tokens are then computed again, not causally.

    [T, Hq, D] queries, [T, Hkv, D] keys and values -> [T, Hq, D].
    """
    out: Tensor
    if _has_kernel(query):
        where = (segments.bounds, segments.key_bounds, segments.key_rows, segments.sizes)
        out, _ = OPERATOR(query, key, value, *where, *scores, True)
    else:
        out = _shared_prompt_padded(query, key, value, segments, scores)
    pictures = segments.pictures
    if pictures is None:
        return out
    return out.index_copy(0, pictures.rows, _picture_attention(query[pictures.rows], key, value, pictures, scores))


def _picture_attention(query: Tensor, key: Tensor, value: Tensor, pictures: Pictures, scores: Scores) -> Tensor:
    """[M, Hq, D]: of the tokens of pictures to all of their picture, and to what comes before it in the prompt."""
    if not _has_kernel(query):
        return _pictures_padded(query, key, value, pictures, scores)
    where = (pictures.bounds, pictures.key_bounds, pictures.key_rows, pictures.sizes)
    out, _ = OPERATOR(query, key, value, *where, *scores, False)
    return out  # type: ignore[no-any-return]


def full_attention(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int | None, scale: float
) -> Tensor:
    """Attention of each sequence to all of itself, not causal: three times [T, H, D] -> [T, H, D]."""
    if not _has_kernel(query):
        rows, inside = _padded_rows(bounds)
        mask = None if bool(inside.all()) else inside[:, None, None, :]
        return _attend(query, key, value, rows, rows, mask, False, Scores(scale))[inside]
    if longest is None:
        longest = int(bounds.diff().max())
    from torch.nn.attention.varlen import varlen_attn

    bounds = bounds.to(torch.int32)
    return varlen_attn(query, key, value, bounds, bounds, longest, longest, scale=scale)  # type: ignore[return-value]


def _has_kernel(query: Tensor) -> bool:
    """FlashAttention computes in 16 bits only."""
    return query.is_cuda and query.element_size() == 2


def _sequences(
    bounds: Tensor, key_bounds: Tensor, sizes: Tensor, window: int | None, cap: float | None, causal: bool
) -> Sequences:
    _, longest, longest_keys = sizes.tolist()
    return Sequences(bounds, key_bounds, longest, longest_keys, window, cap, causal)


# a custom operator: torch.compile does not look inside, and activation checkpointing can name it
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
    window: int | None,
    cap: float | None,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Output [T, Hq, D] and log-sum-exp [Hq, T] float32."""
    where = _sequences(bounds, key_bounds, sizes, window, cap, causal)
    out, lse = flash_kernel(cap is not None).forward((query, key[key_rows], value[key_rows]), where, scale)
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
    window: int | None,
    cap: float | None,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    where = _sequences(bounds, key_bounds, sizes, window, cap, causal)
    inputs = (query, key[key_rows], value[key_rows])
    of_query, *of_copies = flash_kernel(cap is not None).backward(grad, inputs, out, lse, where, scale)
    of_key, of_value = (_add_copies(part, key_rows, len(key)) for part in of_copies)
    return of_query.contiguous(), of_key, of_value


def _add_copies(gradient: Tensor, rows: Tensor, count: int) -> Tensor:
    """[count, H, D] sum over the copies of each row, in float32."""
    total = gradient.new_zeros(count, *gradient.shape[1:], dtype=torch.float32)
    return total.index_add_(0, rows, gradient.float()).to(gradient.dtype)


@_attention.register_fake
def _(query: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32)


@_attention_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, *where, scale, window, cap, causal = inputs
    ctx.save_for_backward(query, key, value, *output, *where)
    ctx.scores, ctx.causal = Scores(scale, window, cap), causal


def _gradient(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    gradients = torch.ops.rlflow.shared_prompt_attention_backward(grad, *ctx.saved_tensors, *ctx.scores, ctx.causal)
    return *gradients, None, None, None, None, None, None, None, None


_attention.register_autograd(_gradient, setup_context=_remember)
OPERATOR = torch.ops.rlflow.shared_prompt_attention.default


# --- on a CPU or in float32: segments as one padded batch ---


def _shared_prompt_padded(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scores: Scores) -> Tensor:
    count, window = int(segments.sizes[0]), scores.window
    rows, inside = _padded_rows(segments.bounds[: count + 1])  # prompts, whose keys are their own
    plain = window is None and scores.cap is None
    own = None if plain else _seen(_upto(rows), _upto(rows), window)
    outs = [_attend(query, key, value, rows, rows, own, plain, scores)[inside]]
    if len(segments.bounds) > count + 1:
        rows, inside = _padded_rows(segments.bounds[count:])  # [completions, longest]
        keys, _ = _padded_rows(segments.key_bounds[count:])
        lengths, key_lengths = segments.bounds[count:].diff(), segments.key_bounds[count:].diff()
        # padded keys come after the last key that a real query sees; padded queries see the last key too
        last_seen = torch.minimum(_upto(rows) + (key_lengths - lengths)[:, None], key_lengths[:, None] - 1)
        mask = _seen(last_seen, _upto(keys), window)
        outs.append(_attend(query, key, value, rows, segments.key_rows[keys], mask[:, None], False, scores)[inside])
    return torch.cat(outs)


def _pictures_padded(query: Tensor, key: Tensor, value: Tensor, pictures: Pictures, scores: Scores) -> Tensor:
    rows, inside = _padded_rows(pictures.bounds)  # [P, longest]
    keys, seen = _padded_rows(pictures.key_bounds)
    lengths, key_lengths = pictures.bounds.diff(), pictures.key_bounds.diff()
    mask = seen[:, None]  # [P, 1, longest keys]
    if scores.window is not None:  # padded queries see the last key too
        own = torch.minimum(_upto(rows) + (key_lengths - lengths)[:, None], key_lengths[:, None] - 1)
        mask = mask & (_upto(keys) > own[..., None] - scores.window)
    return _attend(query, key, value, rows, pictures.key_rows[keys], mask[:, None], False, scores)[inside]


def _padded_rows(bounds: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [B, longest] of the segments between ``bounds``, 0 on padding; and a mask [B, longest], False on padding."""
    starts, lengths = bounds[:-1].long(), bounds.diff().long()
    column = torch.arange(int(lengths.max()), device=bounds.device)
    inside = column[None] < lengths[:, None]
    return torch.where(inside, starts[:, None] + column[None], 0), inside


def _seen(last: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """[..., queries, keys] bool: the keys up to the last one of each query, only ``window`` of them if it is given."""
    mask = keys <= last[..., None]
    return mask if window is None else mask & (keys > last[..., None] - window)


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
    scores: Scores,
) -> Tensor:
    """[B, queries, Hq, D]: attention of the rows ``queries`` [B, queries] to the rows ``keys`` [B, keys].

    Args:
        mask: which keys a query sees, the window included; needed with a cap.
    """

    def batched(x: Tensor, rows: Tensor) -> Tensor:  # [T, H, D] -> [B, H, rows, D]
        chosen: Tensor = x.index_select(0, rows.flatten()).unflatten(0, rows.shape)  # type: ignore[no-untyped-call]
        return chosen.transpose(1, 2)

    q, k, v = batched(query, queries), batched(key, keys), batched(value, keys)
    if scores.cap is not None and mask is not None:
        return _capped(q, k, v, mask, scores.scale, scores.cap).transpose(1, 2)
    grouped = query.shape[1] != key.shape[1]
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scores.scale, enable_gqa=grouped
    )
    return out.transpose(1, 2)


def _capped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, cap: float) -> Tensor:
    """[B, Hq, queries, D]: softmax attention with a soft cap, which torch's has not."""
    repeat = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeat, 1) for x in (key, value))
    capped = cap * torch.tanh(query @ key.transpose(-1, -2) * (scale / cap))
    exact = torch.promote_types(query.dtype, torch.float32)
    return capped.masked_fill(~mask, float("-inf")).softmax(-1, dtype=exact).to(query.dtype) @ value
