"""Packing: many sequences in one row, no padding. The shape legend of the project.

Letters: B sequences of a microbatch, L tokens of one sequence, T = sum of L over the microbatch, N trained
(completion) tokens of the microbatch, I distinct images, R = rows of their merged vision features, W ranks.

Alignment: a value at index t describes token t. ``logprobs[t] = log p(token t | tokens < t)``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlcore.types import Floats, ImageRef, TrainingSample


@dataclass(frozen=True, slots=True, eq=False)
class ImageFeatures:
    """One image as the vision tower takes it."""

    pixel_values: Tensor  # [patches, channels * temporal * patch * patch]
    grid_thw: tuple[int, int, int]  # in patches, before merging


@dataclass(frozen=True, slots=True, eq=False)
class Microbatch:
    """Sequences packed end to end for one forward pass."""

    token_ids: Tensor  # [T] int64
    cu_seqlens: Tensor  # [B+1] int32, starts of the sequences, then T
    max_seqlen: int
    position_ids: Tensor  # [T], or [3, T] (time, height, width) for M-RoPE models
    loss_mask: Tensor  # [T] bool
    sampler_logprobs: Tensor  # [T]
    advantages: Tensor  # [T]
    old_logprobs: Tensor | None  # [T]
    log_kept: Tensor | None  # [T]
    ref_logprobs: Tensor | None  # [T]
    pixel_values: Tensor | None  # [patches of I images, ...]
    image_grid_thw: Tensor | None  # [I, 3]
    image_rows: Tensor  # [image tokens of T] int64: row of the merged vision features that each one takes


@dataclass(frozen=True, slots=True)
class VisionLayout:
    """How a model places images among its tokens."""

    image_token_id: int
    merge_size: int  # patches per side that become one token


def mrope_positions(
    token_ids: npt.NDArray[np.int32], grids: Sequence[tuple[int, int, int]], layout: VisionLayout
) -> npt.NDArray[np.int64]:
    """[3, L] time, height and width positions of one sequence.

    Text advances all three by one per token. An image at position p takes p on the time axis and
    p + (row, column) of the merged grid on the others; what follows continues from p + max(rows, columns).
    Source: Qwen2-VL, arXiv:2409.12191, section 2.1.

    Raises:
        ValueError: the image tokens do not match the grids.
    """
    is_image = token_ids == layout.image_token_id
    positions = np.empty((3, len(token_ids)), np.int64)
    start, position = 0, 0
    for grid in grids:
        rows, columns = grid[1] // layout.merge_size, grid[2] // layout.merge_size
        remaining = np.flatnonzero(is_image[start:])
        first = start + int(remaining[0]) if len(remaining) else len(token_ids)
        end = first + rows * columns
        if end > len(token_ids) or not is_image[first:end].all():
            raise ValueError(f"an image of {rows}x{columns} tokens does not fit the image tokens at {first}")
        positions[:, start:first] = np.arange(position, position + first - start)
        position += first - start
        positions[0, first:end] = position
        positions[1, first:end] = position + np.repeat(np.arange(rows), columns)
        positions[2, first:end] = position + np.tile(np.arange(columns), rows)
        position += max(rows, columns)
        start = end
    if is_image[start:].any():
        raise ValueError(f"{int(is_image[start:].sum())} image tokens are left over after {len(grids)} images")
    positions[:, start:] = np.arange(position, position + len(token_ids) - start)
    return positions


def pack(
    samples: Sequence[TrainingSample],
    *,
    layout: VisionLayout | None,
    features: Callable[[ImageRef], ImageFeatures] | None,
    device: torch.device,
) -> Microbatch:
    """Pack samples in the given order. Each distinct image appears once, however many sequences show it.

    Args:
        layout: None for a text model.
        features: reads one image; needed where samples have images.
    """
    lengths = [sample.num_tokens for sample in samples]
    images: dict[str, ImageFeatures] = {}
    row_of: dict[str, int] = {}
    rows_so_far = 0
    image_rows: list[npt.NDArray[np.int64]] = []
    positions: list[npt.NDArray[np.int64]] = []
    for sample in samples:
        grids = []
        for image in sample.images:
            if layout is None or features is None:
                raise ValueError("a text model was given a sample with images")
            if image.sha256 not in images:
                images[image.sha256] = features(image)
                row_of[image.sha256] = rows_so_far
                rows_so_far += _merged(images[image.sha256].grid_thw, layout)
            grid = images[image.sha256].grid_thw
            grids.append(grid)
            first = row_of[image.sha256]
            image_rows.append(np.arange(first, first + _merged(grid, layout)))
        if layout is None:
            positions.append(np.arange(sample.num_tokens))
        else:
            positions.append(mrope_positions(sample.token_ids, grids, layout))

    def joined(arrays: Sequence[npt.NDArray[np.generic]], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.concatenate(arrays, axis=-1)).to(device, dtype)

    def optional(arrays: list[Floats | None]) -> Tensor | None:
        present = [a for a in arrays if a is not None]
        if present and len(present) != len(arrays):
            raise ValueError("some samples of a microbatch carry log-probs and some do not")
        return joined(present, torch.float32) if present else None

    grid_rows = [f.grid_thw for f in images.values()]
    return Microbatch(
        token_ids=joined([s.token_ids for s in samples], torch.int64),
        cu_seqlens=torch.from_numpy(np.cumsum([0, *lengths])).to(device, torch.int32),
        max_seqlen=max(lengths),
        position_ids=joined(positions, torch.int64),
        loss_mask=joined([s.loss_mask for s in samples], torch.bool),
        sampler_logprobs=joined([s.sampler_logprobs for s in samples], torch.float32),
        advantages=joined([_or_zeros(s.advantages, s.num_tokens) for s in samples], torch.float32),
        old_logprobs=optional([s.old_logprobs for s in samples]),
        log_kept=optional([s.log_kept for s in samples]),
        ref_logprobs=optional([s.ref_logprobs for s in samples]),
        pixel_values=torch.cat([f.pixel_values for f in images.values()]).to(device) if images else None,
        image_grid_thw=torch.tensor(grid_rows, dtype=torch.int64, device=device) if images else None,
        image_rows=joined(image_rows, torch.int64) if image_rows else torch.empty(0, dtype=torch.int64, device=device),
    )


def _or_zeros(values: Floats | None, length: int) -> Floats:
    return np.zeros(length, np.float32) if values is None else values


def _merged(grid_thw: tuple[int, int, int], layout: VisionLayout) -> int:
    return grid_thw[0] * grid_thw[1] * grid_thw[2] // layout.merge_size**2


def plan_microbatches(
    lengths: Sequence[int], *, num_ranks: int, token_budget: int, keys: Sequence[object] | None = None
) -> list[list[list[int]]]:
    """Spread sequences over ranks and microbatches: ``plan[rank][microbatch]`` lists indices into ``lengths``.

    Every rank gets the same number of microbatches (ranks meet in collectives), none above ``token_budget`` tokens.
    Sequences of one key (one problem) stay together where the budget allows it, so that their image is encoded once.
    The plan depends on the arguments alone; a microbatch may be empty on a rank with little work.

    Raises:
        ValueError: one sequence alone exceeds the budget.
    """
    if lengths and max(lengths) > token_budget:
        raise ValueError(f"a sequence of {max(lengths)} tokens exceeds the budget of {token_budget} per microbatch")
    units = _units(lengths, token_budget, keys or list(range(len(lengths))))
    per_rank = _spread(units, lengths, num_ranks)
    count = max(1, *(-(-sum(lengths[i] for unit in rank for i in unit) // token_budget) for rank in per_rank))
    while True:
        plan = [_spread(rank, lengths, count) for rank in per_rank]
        if all(sum(lengths[i] for unit in micro for i in unit) <= token_budget for rank in plan for micro in rank):
            return [[sorted(i for unit in micro for i in unit) for micro in rank] for rank in plan]
        count += 1


def _units(lengths: Sequence[int], token_budget: int, keys: Sequence[object]) -> list[list[int]]:
    """Runs of one key, cut where the budget would be exceeded."""
    by_key: dict[object, list[list[int]]] = {}
    for index, key in enumerate(keys):
        runs = by_key.setdefault(key, [[]])
        if sum(lengths[i] for i in runs[-1]) + lengths[index] > token_budget:
            runs.append([])
        runs[-1].append(index)
    return [run for runs in by_key.values() for run in runs]


def _spread(units: Sequence[list[int]], lengths: Sequence[int], bins: int) -> list[list[list[int]]]:
    """Longest first onto the emptiest bin; ties go to the lower index."""
    loads = [0] * bins
    chosen: list[list[list[int]]] = [[] for _ in range(bins)]
    sizes = {id(unit): sum(lengths[i] for i in unit) for unit in units}
    for unit in sorted(units, key=lambda unit: (-sizes[id(unit)], unit[0])):
        bin_ = loads.index(min(loads))
        loads[bin_] += sizes[id(unit)]
        chosen[bin_].append(unit)
    return chosen
