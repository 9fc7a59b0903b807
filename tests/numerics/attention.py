"""Attention over shared prompts in plain arithmetic: layouts, a dense mask, and a FlashAttention kernel's contract."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rlcore.batch import Segments

SCALE = 0.3


def segments(groups: Sequence[tuple[int, Sequence[int]]]) -> Segments:
    """Of (prompt, completions) lengths."""
    prompts = [prompt for prompt, _ in groups]
    lengths = [*prompts, *(length for _, lengths in groups for length in lengths)]
    starts = np.cumsum([0, *lengths])
    keys = [np.arange(starts[i], starts[i + 1]) for i in range(len(groups))]
    for group, (_, completions) in enumerate(groups):
        for _ in completions:
            own = np.arange(starts[len(keys)], starts[len(keys) + 1])
            keys.append(np.concatenate([keys[group], own]))
    return Segments(
        bounds=torch.tensor(starts, dtype=torch.int32),
        key_bounds=torch.tensor(np.cumsum([0, *map(len, keys)]), dtype=torch.int32),
        key_rows=torch.from_numpy(np.concatenate(keys)),
        sizes=torch.tensor([len(prompts), max(lengths), max(map(len, keys))]),
    )


def dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    groups: Sequence[tuple[int, Sequence[int]]],
    window: int | None = None,
    cap: float | None = None,
    pictures: Sequence[tuple[int, int]] = (),
) -> Tensor:
    """Every sequence alone, written as a mask over the whole row.

    Args:
        pictures: first row and end of each run of tokens that see each other.
    """
    total = len(query)
    position = torch.zeros(total)
    seen = torch.zeros(total, total, dtype=torch.bool)
    start, completion = 0, sum(prompt for prompt, _ in groups)
    for prompt, lengths in groups:
        position[start : start + prompt] = torch.arange(prompt).float()
        seen[start : start + prompt, start : start + prompt] = torch.ones(prompt, prompt).tril().bool()
        for length in lengths:
            rows = slice(completion, completion + length)
            seen[rows, start : start + prompt] = True
            seen[rows, rows] = torch.ones(length, length).tril().bool()
            position[rows] = torch.arange(prompt, prompt + length).float()
            completion += length
        start += prompt
    for first, end in pictures:
        seen[first:end, first:end] = True
    if window is not None:
        seen &= position[:, None] - position < window
    repeat = query.shape[1] // key.shape[1]
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(repeat, 1)) * SCALE
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    probs = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", probs, value.repeat_interleave(repeat, 1))


def math_forward(query, key, value, bounds, key_bounds, longest, longest_keys, window, cap, causal, scale):
    """A FlashAttention kernel's contract in plain arithmetic: output and log-sum-exp of each query over its keys."""
    outs, lses = [], []
    repeat = query.shape[1] // key.shape[1]
    assert longest == bounds.diff().max()
    assert longest_keys == key_bounds.diff().max()
    for b in range(len(bounds) - 1):
        q = query[bounds[b] : bounds[b + 1]]
        k, v = (x[key_bounds[b] : key_bounds[b + 1]].repeat_interleave(repeat, 1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        scores = scores if cap is None else cap * torch.tanh(scores / cap)
        scores = scores.masked_fill(unseen(len(q), len(k), window, causal), -torch.inf)
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
        lses.append(scores.logsumexp(-1).float())
    return torch.cat(outs), torch.cat(lses, dim=1)


def unseen(queries: int, keys: int, window: int | None, causal: bool) -> Tensor:
    """[queries, keys] bool, aligned at the end: later keys if causal, and those before the window."""
    before = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)
    return ((before < 0) & causal) | (before >= (keys if window is None else window))


def math_backward(
    grad, query, key, value, out, lse, bounds, key_bounds, _longest, _longest_keys, window, cap, causal, scale
):
    """As FlashAttention's backward: probabilities from the lse it is given, and the row sums of grad * out."""
    found = [torch.zeros_like(x) for x in (query, key, value)]
    repeat = query.shape[1] // key.shape[1]
    for b in range(len(bounds) - 1):
        qs, ks = slice(bounds[b], bounds[b + 1]), slice(key_bounds[b], key_bounds[b + 1])
        k, v = (x[ks].repeat_interleave(repeat, 1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[qs], k) * scale
        share = torch.zeros(()) if cap is None else torch.tanh(scores / cap)
        scores = scores if cap is None else cap * share
        probs = (scores.masked_fill(unseen(*scores.shape[1:], window, causal), -torch.inf) - lse[:, qs, None]).exp()
        of_probs = torch.einsum("qhd,khd->hqk", grad[qs], v)
        of_scores = probs * (of_probs - (grad[qs] * out[qs]).sum(-1).t()[..., None]) * (1 - share**2) * scale
        found[0][qs] += torch.einsum("hqk,khd->qhd", of_scores, k)
        found[1][ks] += torch.einsum("hqk,qhd->khd", of_scores, query[qs]).unflatten(1, (-1, repeat)).sum(2)
        found[2][ks] += torch.einsum("hqk,qhd->khd", probs, grad[qs]).unflatten(1, (-1, repeat)).sum(2)
    return tuple(found)


LAYOUTS = {
    "one group": [(5, [3, 1, 7])],
    "several": [(5, [3, 1, 7]), (1, [4]), (2, [2, 2])],
    "one without completions": [(3, [2]), (4, []), (2, [5, 1])],
    "nothing but a prompt": [(6, [])],
}
