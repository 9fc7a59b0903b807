"""Ulysses sequence parallelism: the ranks of a sequence group compute one row together. arXiv:2309.14509.

Each rank holds an equal part of the row's tokens. Only attention needs the others. Before it the ranks exchange heads
for tokens: each gets some heads of all tokens. After it they exchange back. One rank of the group embeds each image,
for all. The log-probs of all trained tokens are gathered, so every rank computes the whole microbatch's loss. Gradients
flow only into the rank's own log-probs, so the sum over ranks is the gradient of the loss.

Letters as in ``rlcore.batch``; S ranks of the group, Hq query heads, Hkv key-value heads, D their size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad

from rlcore.batch import Microbatch, RowShare, Segments
from rlcore.families.protocol import ImageLayout

_GROUPS: dict[str, dist.ProcessGroup] = {}  # an operator takes a name


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """The ranks that compute a row together, and this rank's place among them."""

    name: str
    rank: int
    size: int


def sequence_group(mesh: DeviceMesh, size: int) -> SequenceGroup | None:
    """This rank's group: ``size`` neighbours in the one-dimensional ``mesh``. None for size 1. Collective."""
    if size == 1:
        return None
    data_and_sequence = DeviceMesh(mesh.device_type, mesh.mesh.view(-1, size), mesh_dim_names=("data", "sequence"))
    group = data_and_sequence.get_group("sequence")
    _GROUPS[group.group_name] = group
    return SequenceGroup(group.group_name, data_and_sequence.get_local_rank("sequence"), size)


# --- splitting a row: index arithmetic on the CPU ---


def cut(batch: Microbatch, rank: int, size: int, layout: ImageLayout | None) -> Microbatch:
    """The part of a packed microbatch, on the CPU, that ``rank`` of a group of ``size`` computes.

    A row whose length is no multiple of ``size`` is padded with tokens that attend only to each other.
    """
    count = len(batch.token_ids)
    length = -(-count // size)  # t
    own = slice(rank * length, (rank + 1) * length)
    filled = length * size - count
    holder = batch.predict_from // length  # [N] rank that has the hidden state
    trained, places, most_trained = _split(holder, rank, size)
    images = torch.nonzero(batch.image_index // length == rank)[:, 0]
    share = replace(
        batch,
        token_ids=pad(batch.token_ids, (0, filled))[own],
        position_ids=pad(batch.position_ids, (0, filled))[..., own],
        segments=_pad_segments(batch.segments, filled),
        predict_from=batch.predict_from[trained] - own.start,
        targets=batch.targets[trained],
        image_index=batch.image_index[images] - own.start,
        image_rows=batch.image_rows[images],
        routes=None if batch.routes is None else pad(batch.routes, (0, 0, 0, 0, 0, filled), value=-1)[own],
        share=RowShare(trained, places, most_trained, 0),
    )
    if batch.pixel_values is None or batch.image_grid_thw is None or layout is None:
        return share
    grids = batch.image_grid_thw.tolist()
    patches = torch.tensor([layout.num_inputs(grid) for grid in grids])  # [I]
    rows = torch.tensor([layout.num_rows(grid) for grid in grids])  # [I]
    ends = patches.cumsum(0)
    maker = ((2 * ends - patches) * size // (2 * ends[-1])).long()  # [I] rank, by the middle of the image's patches
    _, row_places, most_features = _split(maker.repeat_interleave(rows), rank, size)
    made = maker == rank
    any_made = bool(made.any())
    return replace(
        share,
        pixel_values=batch.pixel_values[made.repeat_interleave(patches)] if any_made else None,
        image_grid_thw=batch.image_grid_thw[made] if any_made else None,
        image_rows=row_places[batch.image_rows[images]],
        share=RowShare(trained, places, most_trained, most_features),
    )


def _split(holder: Tensor, rank: int, size: int) -> tuple[Tensor, Tensor, int]:
    """
    Args:
        holder: [M] the rank that holds each item.

    Returns:
        The items of ``rank``; the place [M] of each item after a gather, where every rank has the same number of
        places; and this number.
    """
    counts = torch.bincount(holder, minlength=size)
    most = int(counts.max())
    order = holder.argsort(stable=True)
    inside = torch.empty_like(order)
    inside[order] = torch.arange(len(order)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    return torch.nonzero(holder == rank)[:, 0], holder * most + inside, most


def _pad_segments(segments: Segments, count: int) -> Segments:
    if not count:
        return segments
    end = segments.bounds[-1:]
    sizes = segments.sizes.clone()
    sizes[1:] = sizes[1:].clamp_min(count)
    return replace(
        segments,
        bounds=torch.cat([segments.bounds, end + count]),
        key_bounds=torch.cat([segments.key_bounds, segments.key_bounds[-1:] + count]),
        key_rows=torch.cat([segments.key_rows, torch.arange(int(end), int(end) + count)]),
        sizes=sizes,
    )


# --- communication ---


# a custom operator: torch.compile does not look inside, and activation checkpointing can name it
@torch.library.custom_op("rlflow::exchange", mutates_args=())
def _exchange(parts: Tensor, group: str) -> Tensor:
    """[S, ...] -> [S, ...]: sends part s to rank s of the group, and receives this rank's part from each."""
    received = torch.empty_like(parts, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, parts.contiguous(), group=_GROUPS[group])
    return received


@_exchange.register_fake
def _(parts: Tensor, group: str) -> Tensor:
    return torch.empty_like(parts, memory_format=torch.contiguous_format)


def _remember(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    ctx.group = inputs[1]


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return torch.ops.rlflow.exchange(grad, ctx.group), None


_exchange.register_autograd(_gradient, setup_context=_remember)
EXCHANGE = torch.ops.rlflow.exchange.default


def heads_of_all_tokens(
    query: Tensor, key: Tensor, value: Tensor, group: SequenceGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """All heads of this rank's tokens -> this rank's heads of all tokens, in one exchange.

    [t, Hq, D], [t, Hkv, D], [t, Hkv, D] -> [T, Hq / S, D], [T, Hkv' / S, D], [T, Hkv' / S, D]. Key-value heads are
    repeated until their number Hkv' is a multiple of S.
    """
    copies = 1
    while key.shape[1] * copies % group.size:
        copies += 1
    key, value = (x.repeat_interleave(copies, 1) if copies > 1 else x for x in (key, value))
    parts: list[Tensor] = [  # [t, S, heads of a rank, D]
        x.unflatten(1, (group.size, -1))  # type: ignore[no-untyped-call]
        for x in (query, key, value)
    ]
    heads = [part.shape[2] for part in parts]
    received = own_heads_of_all_tokens(torch.cat(parts, 2).flatten(1, 2), group)
    whole_query, whole_key, whole_value = received.split(heads, 1)  # type: ignore[no-untyped-call]
    return whole_query, whole_key, whole_value


def own_heads_of_all_tokens(values: Tensor, group: SequenceGroup) -> Tensor:
    """All heads of this rank's tokens [t, H, D] -> this rank's heads of all tokens [T, H / S, D]."""
    parts: Tensor = values.unflatten(1, (group.size, -1))  # type: ignore[no-untyped-call]
    received = EXCHANGE(parts.transpose(0, 1), group.name)  # [S, t, H / S, D]
    return received.flatten(0, 1)  # type: ignore[no-any-return]


def tokens_of_all_heads(out: Tensor, group: SequenceGroup) -> Tensor:
    """This rank's heads of all tokens [T, Hq / S, D] -> all heads of its tokens [t, Hq, D]."""
    parts: Tensor = out.unflatten(0, (group.size, -1))  # type: ignore[no-untyped-call]
    received = EXCHANGE(parts, group.name)  # [S, t, Hq / S, D]
    return received.transpose(0, 1).flatten(1, 2)  # type: ignore[no-any-return]


def gather_rows(own: Tensor, most: int, group: SequenceGroup) -> Tensor:
    """[n, ...] of each rank -> [S * most, ...], padded to ``most`` rows per rank. ``own`` gets the gradients of all
    ranks."""
    filled = torch.cat([own, own.new_zeros(most - len(own), *own.shape[1:])])
    return EXCHANGE(filled.expand(group.size, *filled.shape), group.name).flatten(0, 1)  # type: ignore[no-any-return]


def gather_trained(own: tuple[Tensor, ...], share: RowShare, group: SequenceGroup) -> tuple[Tensor, ...]:
    """Values [n] of each rank's trained tokens -> values [N] of the whole row. The first tensor stays differentiable in
    this rank's tokens; the other ranks' values are constants."""
    everyone = gather_rows(torch.stack([x.detach() for x in own], 1), share.most_trained, group)[share.places]  # [N, .]
    first, *rest = everyone.unbind(1)
    return first.index_copy(0, share.trained, own[0]), *rest
