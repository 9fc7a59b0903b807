"""Ulysses sequence parallelism: the ranks of a sequence group compute one row together. arXiv:2309.14509.

Each holds an even part of the row's tokens. Only attention looks at others: before it every rank gives its tokens'
heads away and gets its heads of all tokens, after it the other way round. An image is embedded by one rank of the
group, for all. The log-probs of all trained tokens are gathered, so that every rank has the whole microbatch's loss;
its gradient flows into the rank's own log-probs alone, and the plain sum of the ranks' gradients is the loss's.

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
    """The ranks that compute a row together, as one of them sees it."""

    name: str
    rank: int
    size: int


def sequence_group(mesh: DeviceMesh, size: int) -> SequenceGroup | None:
    """This rank's group, of ``size`` neighbours in the one-dimensional ``mesh``; None where every rank has rows of its
    own. Collective."""
    if size == 1:
        return None
    data_and_sequence = DeviceMesh(mesh.device_type, mesh.mesh.view(-1, size), mesh_dim_names=("data", "sequence"))
    group = data_and_sequence.get_group("sequence")
    _GROUPS[group.group_name] = group
    return SequenceGroup(group.group_name, data_and_sequence.get_local_rank("sequence"), size)


# --- shares of a row: index arithmetic on the CPU ---


def cut(batch: Microbatch, rank: int, size: int, layout: ImageLayout | None) -> Microbatch:
    """The share of a packed microbatch (on the CPU) that ``rank`` of a group of ``size`` has.

    A row whose length ``size`` does not divide is filled up by tokens that see each other and nothing else.
    """
    count = len(batch.token_ids)
    length = -(-count // size)  # t
    own = slice(rank * length, (rank + 1) * length)
    filled = length * size - count
    holder = batch.predict_from // length  # [N] rank that has the hidden state
    trained, places, most_trained = _shares(holder, rank, size)
    images = torch.nonzero(batch.image_index // length == rank)[:, 0]
    found = replace(
        batch,
        token_ids=pad(batch.token_ids, (0, filled))[own],
        position_ids=pad(batch.position_ids, (0, filled))[..., own],
        segments=_filled(batch.segments, filled),
        predict_from=batch.predict_from[trained] - own.start,
        targets=batch.targets[trained],
        image_index=batch.image_index[images] - own.start,
        image_rows=batch.image_rows[images],
        share=RowShare(trained, places, most_trained, 0),
    )
    if batch.pixel_values is None or batch.image_grid_thw is None or layout is None:
        return found
    grids = batch.image_grid_thw.tolist()
    patches = torch.tensor([layout.num_inputs(grid) for grid in grids])  # [I]
    rows = torch.tensor([layout.num_rows(grid) for grid in grids])  # [I]
    ends = patches.cumsum(0)
    maker = ((2 * ends - patches) * size // (2 * ends[-1])).long()  # [I] by where its middle lies among all patches
    _, row_places, most_features = _shares(maker.repeat_interleave(rows), rank, size)
    made = maker == rank
    any_made = bool(made.any())
    return replace(
        found,
        pixel_values=batch.pixel_values[made.repeat_interleave(patches)] if any_made else None,
        image_grid_thw=batch.image_grid_thw[made] if any_made else None,
        image_rows=row_places[batch.image_rows[images]],
        share=RowShare(trained, places, most_trained, most_features),
    )


def _shares(holder: Tensor, rank: int, size: int) -> tuple[Tensor, Tensor, int]:
    """Which things ``rank`` holds, where each lies when the ranks' own are put one behind the other with equally many
    places for each, and that number of places."""
    counts = torch.bincount(holder, minlength=size)
    most = int(counts.max())
    order = holder.argsort(stable=True)
    inside = torch.empty_like(order)
    inside[order] = torch.arange(len(order)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    return torch.nonzero(holder == rank)[:, 0], holder * most + inside, most


def _filled(segments: Segments, count: int) -> Segments:
    if not count:
        return segments
    end = segments.bounds[-1:]
    sizes = segments.sizes.clone()
    sizes[1:] = sizes[1:].clamp_min(count)
    return Segments(
        bounds=torch.cat([segments.bounds, end + count]),
        key_bounds=torch.cat([segments.key_bounds, segments.key_bounds[-1:] + count]),
        key_rows=torch.cat([segments.key_rows, torch.arange(int(end), int(end) + count)]),
        sizes=sizes,
    )


# --- what travels ---


# an operator of its own, so that torch.compile takes it whole and activation checkpointing can tell it apart
@torch.library.custom_op("rlflow::exchange", mutates_args=())
def _exchange(parts: Tensor, group: str) -> Tensor:
    """[S, ...] -> [S, ...]: part s goes to rank s of the group; what comes back was this rank's part at each."""
    found = torch.empty_like(parts, memory_format=torch.contiguous_format)
    dist.all_to_all_single(found, parts.contiguous(), group=_GROUPS[group])
    return found


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
    """[t, Hq, D], [t, Hkv, D] twice of this rank's tokens -> [T, Hq / S, D], [T, Hkv' / S, D] twice of this rank's
    heads, in one exchange. Key-value heads that S does not divide are repeated until it does (Hkv')."""
    copies = 1
    while key.shape[1] * copies % group.size:
        copies += 1
    key, value = (x.repeat_interleave(copies, 1) if copies > 1 else x for x in (key, value))
    parts: list[Tensor] = [  # [t, S, heads of a rank, D]
        x.unflatten(1, (group.size, -1))  # type: ignore[no-untyped-call]
        for x in (query, key, value)
    ]
    heads = [part.shape[2] for part in parts]
    found = EXCHANGE(torch.cat(parts, 2).transpose(0, 1), group.name)  # [S, t, heads, D]
    whole_query, whole_key, whole_value = found.flatten(0, 1).split(heads, 1)
    return whole_query, whole_key, whole_value


def tokens_of_all_heads(out: Tensor, group: SequenceGroup) -> Tensor:
    """[T, Hq / S, D] of this rank's heads -> [t, Hq, D] of its tokens."""
    parts: Tensor = out.unflatten(0, (group.size, -1))  # type: ignore[no-untyped-call]
    found = EXCHANGE(parts, group.name)  # [S, t, Hq / S, D]
    return found.transpose(0, 1).flatten(1, 2)  # type: ignore[no-any-return]


def gathered(own: Tensor, most: int, group: SequenceGroup) -> Tensor:
    """[n, ...] of each rank -> [S * most, ...], n of each filled up to ``most``. What any rank makes of it counts in
    the gradient of ``own``."""
    filled = torch.cat([own, own.new_zeros(most - len(own), *own.shape[1:])])
    return EXCHANGE(filled.expand(group.size, *filled.shape), group.name).flatten(0, 1)  # type: ignore[no-any-return]


def of_all_trained(own: tuple[Tensor, ...], share: RowShare, group: SequenceGroup) -> tuple[Tensor, ...]:
    """Values [n] of each rank's trained tokens -> those [N] of the whole row; the first are differentiable, with the
    other ranks' values as constants."""
    everyone = gathered(torch.stack([x.detach() for x in own], 1), share.most_trained, group)[share.places]  # [N, .]
    first, *rest = everyone.unbind(1)
    return first.index_copy(0, share.trained, own[0]), *rest
