"""Layers with a recurrent state over packed rows: gated delta nets, arXiv:2412.06464.

A prompt starts with an empty state. A completion starts with the state after its prompt, so a shared prompt is computed
once. The short convolution in front of the state sees the last tokens of the prompt in the same way.

The state S [Dk, Dv] of a head maps keys to values. A token forgets a part of it, then replaces the value v' of its key:

    S <- exp(g) S        S <- S + k (b (v - S^T k))^T        output = S^T q

Tokens are computed in chunks, as in section 3.3 of the paper: all pairs within each chunk at once, then the states from
chunk to chunk, at each step those of all sequences that are so long. So a row of ragged sequences is padded by less
than a chunk per sequence. On a GPU, in 16 bits, the kernels of flash-linear-attention compute the same if that package
is installed.

T tokens of the row, S prompts and completions, Hk key heads of size Dk, Hv value heads of size Dv, C = 64 tokens of a
chunk, M chunks.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import silu, softplus
from torch.utils.checkpoint import checkpoint

from rlcore.batch import Segments
from rlcore.errors import ModelError
from rlcore.families.protocol import Recurrence
from rlcore.models.sequence import SequenceGroup, own_heads_of_all_tokens, tokens_of_all_heads

log = logging.getLogger(__name__)

# query [T, Hv, Dk], scaled; key [T, Hv, Dk], of length 1; value [T, Hv, Dv];
# log-decay [T, Hv], g above, not positive; write [T, Hv], b above, in 0..1
Tokens = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
# tokens, bounds of the sequences, their first states -> what the tokens read, and the last states
Along = Callable[[Tokens, Tensor, Tensor], tuple[Tensor, Tensor]]
CHUNK = 64
# What the backward pass needs of the rule is computed again, for some heads at a time: measured are 145 bytes for each
# element of the values, which at 16,384 tokens and a width of 4,096 would be 9 GiB for each layer.
_HELD_PER_VALUE = 145
_HELD_BYTES = 4 << 30
_TINY = 1e-6  # as transformers and vLLM add it to the length of a key


def use_packed_recurrence(recurrence: Recurrence, decoder: Any) -> None:
    """Let each layer with a recurrent state compute ``packed_delta_net``.

    Raises:
        ModelError: another activation than SiLU follows the convolution.
    """
    for layer in recurrence.layers(decoder):
        if layer.activation not in ("silu", "swish"):
            raise ModelError(
                f"{type(layer).__name__} has the activation {layer.activation} after its convolution. Allowed is silu. "
                "Choose a model with it."
            )
        layer.forward = partial(packed_delta_net, layer, recurrence)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the number of chunks depends on the lengths of the sequences
def packed_delta_net(
    layer: Any,
    recurrence: Recurrence,
    hidden_states: Tensor,  # [1, T, H], of a rank of a sequence group [1, t, H]
    segments: Segments | None = None,
    sequence: SequenceGroup | None = None,
    **_: object,
) -> Tensor:
    """The layer's output, in the shape of its input.

    Args:
        layer: with ``conv1d`` (no bias), ``A_log``, ``dt_bias``, ``norm``, ``out_proj`` and the sizes of its heads.
        sequence: the ranks that hold the other parts of the row. Each computes some heads of all its tokens.

    Raises:
        ValueError: without ``segments`` sequences would see each other.
    """
    if segments is None:
        raise ValueError("a layer with a recurrent state was called without segments: sequences would see each other")
    heads, copies = layer.num_k_heads, layer.num_v_heads // layer.num_k_heads
    sizes = [layer.head_k_dim, layer.head_k_dim, copies * layer.head_v_dim]  # of a key head: query, key, values
    inputs = recurrence.inputs(layer, hidden_states[0])
    weight = _by_key_head(layer.conv1d.weight[:, 0].T, heads, sizes)  # [K, Hk, sum of sizes]
    bias, rate = layer.dt_bias.view(heads, copies), layer.A_log.float().exp().view(heads, copies)
    of_values = (x.view(-1, heads, copies) for x in (inputs.write, inputs.decay))
    tokens = torch.cat([_by_key_head(inputs.mixed, heads, sizes), *of_values], 2)
    if sequence is not None:
        tokens = own_heads_of_all_tokens(tokens, sequence)
        own = slice(sequence.rank * heads // sequence.size, (sequence.rank + 1) * heads // sequence.size)
        weight, bias, rate = weight[:, own], bias[own], rate[own]
    at_once = max(1, _HELD_BYTES // (_HELD_PER_VALUE * len(tokens) * sizes[2]))
    again = partial(checkpoint, _of_heads, use_reentrant=False, preserve_rng_state=False)
    parts = [
        again(tokens[:, some], weight[:, some], bias[some], rate[some], segments, sizes, copies)
        for some in (slice(first, first + at_once) for first in range(0, tokens.shape[1], at_once))
    ]
    out = torch.cat(parts, 1)  # [T, Hv, Dv]
    if sequence is not None:
        out = tokens_of_all_heads(out, sequence)
    gated = layer.norm(out.flatten(0, 1), inputs.gate.reshape(-1, layer.head_v_dim))
    return layer.out_proj(gated.view(1, len(out), -1))  # type: ignore[no-any-return]


def _of_heads(
    tokens: Tensor,  # [T, h, sum of sizes + 2 copies], of h key heads
    weight: Tensor,  # [K, h, sum of sizes]
    bias: Tensor,  # [h, copies]
    rate: Tensor,
    segments: Segments,
    sizes: list[int],
    copies: int,
) -> Tensor:
    """[T, h * copies, Dv] what the tokens read from the states of some heads."""
    mixed, write, decay = torch.split(tokens, [sum(sizes), copies, copies], 2)
    mixed = causal_convolution(mixed.flatten(1), weight.flatten(1).T, segments).view(mixed.shape)
    query, key, value = torch.split(mixed.float(), sizes, 2)
    query, key = (_normalised(x).repeat_interleave(copies, 1) for x in (query, key))
    log_decay = -rate * softplus(decay.float() + bias)
    value = value.reshape(len(value), log_decay[0].numel(), -1)
    query = query * sizes[0] ** -0.5
    rates = log_decay.flatten(1), write.sigmoid().float().flatten(1)
    if tokens.is_cuda and tokens.dtype != torch.float32 and has_kernels():
        in_16_bits = (query.to(tokens.dtype), key.to(tokens.dtype), value.to(tokens.dtype), *rates)
        return gated_delta_rule(in_16_bits, segments, along_by_kernels)
    return gated_delta_rule((query, key, value, *rates), segments).to(tokens.dtype)


def _by_key_head(channels: Tensor, heads: int, sizes: list[int]) -> Tensor:
    """[N, all queries, all keys, all values] -> [N, Hk, query, key and values of a key head]."""
    parts = torch.split(channels, [heads * size for size in sizes], 1)
    return torch.cat([part.reshape(len(part), heads, -1) for part in parts], 2)


def causal_convolution(mixed: Tensor, weight: Tensor, segments: Segments) -> Tensor:
    """SiLU of a convolution of each channel along its sequence, of which a completion's prompt is a part.

    Args:
        mixed: [T, channels].
        weight: [channels, K]; the last column belongs to the token itself.
    """
    lengths = segments.bounds.diff().long()
    segment = torch.arange(len(lengths), device=mixed.device).repeat_interleave(lengths)  # [T]
    # of each token among the rows that its segment attends to, the last of which are the segment's own
    place = torch.arange(len(mixed), device=mixed.device) + (segments.key_bounds[1:] - segments.bounds[1:])[segment]
    first = segments.key_bounds[segment]
    total = torch.zeros_like(mixed, dtype=torch.float32)
    for back in range(weight.shape[1]):
        exists = place - back >= first
        row = segments.key_rows[torch.where(exists, place - back, place)]
        total = total + weight[:, -1 - back].float() * mixed.index_select(0, row).float() * exists[:, None]
    return silu(total).to(mixed.dtype)


def gated_delta_rule(tokens: Tokens, segments: Segments, along: Along | None = None) -> Tensor:
    """[T, Hv, Dv] what each token reads from its sequence's state, in the dtype of the values.

    Args:
        along: computes sequences whose first states are known; by default ``along_by_chunks``.
    """
    along = along or along_by_chunks
    prompts = int(segments.sizes[0])
    _, key, value, log_decay, _ = tokens
    empty = log_decay.new_zeros(prompts, *key.shape[1:], value.shape[2])
    out, states = along(tokens, segments.bounds[: prompts + 1], empty)
    if len(segments.bounds) == prompts + 1:
        return out
    first_keys = segments.key_rows[segments.key_bounds[prompts:-1].long()]  # the first row of each completion's prompt
    prompt = torch.searchsorted(segments.bounds[: prompts + 1].long(), first_keys, right=True) - 1
    states = torch.cat([states, states.new_zeros(1, *states.shape[1:])])  # the last one for tokens that fill up a row
    later, _ = along(tokens, segments.bounds[prompts:], states[prompt])
    return torch.cat([out, later])


@cache
def has_kernels() -> bool:
    """Whether flash-linear-attention is installed."""
    installed = find_spec("fla") is not None
    log.info(
        "layers with a recurrent state run on %s", "flash-linear-attention" if installed else "operations of torch"
    )
    return installed


@cache
def _kernels() -> Callable[..., tuple[Tensor, Tensor]]:
    """flash-linear-attention's rule, with one configuration of each kernel. It would compile and time all of them for
    minutes, and the sums of a run would depend on which was the fastest."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from triton.runtime import Autotuner

    for name, module in list(sys.modules.items()):
        if name.startswith(("fla.ops.common", "fla.ops.gated_delta_rule", "fla.ops.utils")):
            for kernel in list(vars(module).values()):
                while not isinstance(kernel, Autotuner) and hasattr(kernel, "fn"):
                    kernel = kernel.fn
                if isinstance(kernel, Autotuner):
                    kernel.configs = [min(kernel.configs, key=_distance)]
    rule: Callable[..., tuple[Tensor, Tensor]] = chunk_gated_delta_rule
    return rule


def _distance(configuration: Any) -> int:
    """From four warps and two stages, which suit blocks of 64 tokens."""
    return int(abs(configuration.num_warps - 4) + abs(configuration.num_stages - 2))


def along_by_kernels(tokens: Tokens, bounds: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    """``along_by_chunks`` on a GPU. Query, key and value are bfloat16 or float16, the others float32."""
    first, last = int(bounds[0]), int(bounds[-1])
    query, key, value, log_decay, write = (x[None, first:last] for x in tokens)
    out, after = _kernels()(
        query, key, value, log_decay, write,
        scale=1.0, initial_state=states, output_final_state=True, cu_seqlens=(bounds - first).long(),
    )  # fmt: skip
    return out[0], after


def along_by_chunks(tokens: Tokens, bounds: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    """What the tokens between ``bounds`` read, [tokens, Hv, Dv], and the states [sequences, Hv, Dk, Dv] after them.

    Args:
        states: of each sequence before its first token.
    """
    plan = _chunks(bounds)
    query, key, value, log_decay, write = (
        _in_chunks(x, plan) for x in tokens
    )  # [M, Hv, C, Dk] three times with Dv, [M, Hv, C] twice
    since_start = log_decay.cumsum(2)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=key.device).tril()
    between = (since_start[..., :, None] - since_start[..., None, :]).masked_fill(~lower, float("-inf")).exp()
    # a token of the chunk writes the difference to what is there by then: a triangular system over the chunk
    solved = unit_lower_inverse((write[..., None] * key @ key.transpose(2, 3)) * between)
    own = solved @ (write[..., None] * value)
    known = solved @ ((write * since_start.exp())[..., None] * key)
    seen = (query @ key.transpose(2, 3)) * between
    query = query * since_start.exp()[..., None]
    key = key * (since_start[..., -1:] - since_start).exp()[..., None]
    left = since_start[..., -1].exp()[..., None, None]  # of the state at the end of the chunk

    # every product in one kernel and call: a row has thousands of them
    heads, state = states.shape[1], states.index_select(0, plan.order).flatten(0, 1)
    steps = [x.flatten(0, 1) for x in (own, known, query, seen, key.transpose(2, 3), left)]
    ended, read = [], []
    for now in zip(*(torch.split(x, [count * heads for count in plan.counts]) for x in steps), strict=True):
        own, known, query, seen, key, left = now
        if len(own) < len(state):
            state, done = torch.split(state, [len(own), len(state) - len(own)])
            ended.append(done)
        written = torch.baddbmm(own, known, state, alpha=-1)
        read.append(torch.baddbmm(torch.bmm(query, state), seen, written))
        state = torch.baddbmm(state * left, key, written)
    after = torch.cat([state, *reversed(ended)]).view(states.shape).index_select(0, plan.order.argsort())
    out = torch.cat(read).unflatten(0, (-1, heads)).transpose(1, 2)  # type: ignore[no-untyped-call]
    return out.flatten(0, 1).index_select(0, plan.places), after


class _UnitLowerInverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, system: Tensor) -> Tensor:
        size = system.shape[-1]
        inverse = torch.eye(size, dtype=system.dtype, device=system.device).expand(system.shape).clone()
        half = 1
        while half < size:  # [[A, 0], [B, C]] has the inverse [[A', 0], [-C' B A', C']]
            of_inverse, of_system = (_halves(x, half) for x in (inverse, system))
            (upper, lower), below = (of_inverse(side, side) for side in (0, 1)), of_system(1, 0)
            of_inverse(1, 0).copy_(-(lower @ below @ upper))
            half *= 2
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        inverse: Tensor = ctx.saved_tensors[0]
        transposed = inverse.transpose(-1, -2)
        return -(transposed @ grad @ transposed).tril(-1)


def _halves(matrix: Tensor, half: int) -> Callable[[int, int], Tensor]:
    """Of each of the n diagonal blocks of 2 ``half`` rows: the part [..., n, half, half] in these halves of its rows
    and columns, as a view."""
    count = matrix.shape[-1] // (2 * half)
    blocks = matrix.view(*matrix.shape[:-2], count, 2, half, count, 2, half)
    return lambda row, column: blocks[..., row, :, :, column, :].diagonal(0, -4, -2).movedim(-1, -3)


def unit_lower_inverse(system: Tensor) -> Tensor:
    """[..., n, n], n a power of two: the inverse of the matrix with ones on the diagonal and these values below it.

    By blocks of 1, 2, 4, ... rows, which is as stable as solving row by row. A series in powers of the matrix is not:
    where the same token comes again and again its terms are large, of either sign.
    """
    return _UnitLowerInverse.apply(system)  # type: ignore[no-any-return, no-untyped-call]


@dataclass(frozen=True, slots=True, eq=False)
class _Chunks:
    """The chunks of some sequences: the first of each, then the second of each that has two, and so on."""

    order: Tensor  # [sequences] int64, the longest first
    counts: list[int]  # of the sequences that have a first chunk, a second, ...
    rows: Tensor  # [M * C] int64: the token of each place of the chunks
    inside: Tensor  # [M, C] bool, False on padding
    places: Tensor  # [tokens] int64: the place of each token


def _chunks(bounds: Tensor) -> _Chunks:
    starts, ends = (np.asarray(x) for x in (bounds[:-1].tolist(), bounds[1:].tolist()))  # on a GPU: one wait for it
    numbers = -(-(ends - starts) // CHUNK)
    order = np.argsort(-numbers, kind="stable")
    counts = [int((numbers > i).sum()) for i in range(int(numbers.max()))]
    first = np.concatenate([starts[order[:count]] + i * CHUNK for i, count in enumerate(counts)])
    last = np.concatenate([ends[order[:count]] for count in counts])
    rows = first[:, None] + np.arange(CHUNK)
    inside = rows < last[:, None]
    places = np.empty(ends[-1] - starts[0], np.int64)
    places[rows[inside] - starts[0]] = np.flatnonzero(inside)
    rows = np.where(inside, rows, first[:, None]).ravel()
    made = {"order": order, "rows": rows, "inside": inside, "places": places}
    return _Chunks(counts=counts, **{name: torch.from_numpy(x).to(bounds.device) for name, x in made.items()})


def _in_chunks(x: Tensor, plan: _Chunks) -> Tensor:
    """[T, Hv, ...] -> [M, Hv, C, ...], 0 on padding: such a token forgets and writes nothing."""
    inside = plan.inside.view(*plan.inside.shape, *[1] * (x.dim() - 1))
    return (x.index_select(0, plan.rows).view(*plan.inside.shape, *x.shape[1:]) * inside).transpose(1, 2)


def _normalised(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _TINY)
