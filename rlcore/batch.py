"""Packing: many sequences in one row, without padding, each prompt once. The shape legend of the project.

A row holds the K distinct prompts, then the completions of all B sequences in the order of their prompts. Sequences
with the same prompt share it. For example, two completions a and b of prompt p, and one c of q, make the row p q a b c.

Letters: B sequences of a microbatch, L tokens of one sequence, K distinct prompts, S prompts and completions, T tokens
of the row, N trained (completion) tokens of the microbatch, I distinct images, R rows of their merged vision features,
F values of such a row, M image tokens of the row, W ranks, E layers with experts, k experts of a token in such a layer.
If the ranks of a sequence group share a row (``rlcore.models.sequence``), a rank has t of its T tokens, m of the M, i
of the I, and n of the N.

Alignment: a value at index t of a sequence describes token t. ``logprobs[t] = log p(token t | tokens < t)``. Values of
a microbatch cover only its trained tokens, in the order in which the sequences were given.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlcore.families.protocol import Grid, ImageLayout
from rlcore.types import Bools, Floats, ImageRef, TrainingSample


@dataclass(frozen=True, slots=True, eq=False)
class ImageFeatures:
    """One image or video as the vision tower takes it, and the tower's output if it is cached."""

    pixel_values: Tensor  # [patches, channels * temporal * patch * patch], or [tiles, channels, height, width]
    grid_thw: Grid
    embedded: Tensor | None = None  # [patches / merge^2, F]


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Attention in a packed row: a prompt attends to itself, a completion to its prompt and itself, both causally,
    except the tokens of ``pictures``."""

    bounds: Tensor  # [S+1] int32, starts of the K prompts and then of the completions, then T
    key_bounds: Tensor  # [S+1] int32, the part of key_rows that each segment attends to; its own rows come last
    key_rows: Tensor  # int64: row of each key, prompt before completion
    sizes: Tensor  # [3] int64, on the CPU: K, longest segment, longest segment with its prompt
    pictures: Pictures | None = None  # whose tokens attend to each other in both directions


@dataclass(frozen=True, slots=True, eq=False)
class Pictures:
    """Pictures whose tokens attend to all of their picture, and to what comes before it in the prompt."""

    rows: Tensor  # [M] int64: their tokens in the row, one picture after the other
    bounds: Tensor  # [P+1] int32, starts of the P pictures in ``rows``, then M
    key_bounds: Tensor  # [P+1] int32, the part of key_rows that each picture attends to; its own rows come last
    key_rows: Tensor  # int64: the row of each key
    sizes: Tensor  # [3] int64, on the CPU: P, longest picture, longest picture with what comes before it


@dataclass(frozen=True, slots=True, eq=False)
class RowShare:
    """One rank's share of a row."""

    trained: Tensor  # [n] int64: indices of the trained tokens that this rank predicts
    places: Tensor  # [N] int64: index of each trained token in all ranks' shares, padded to ``most_trained`` per rank
    most_trained: int  # the largest n of a rank
    most_features: int  # the largest number of merged vision features of a rank; 0: the row has no image


@dataclass(frozen=True, slots=True, eq=False)
class Microbatch:
    """Sequences packed for one forward pass. With a ``share``, tensors of the row cover only this rank's share;
    segments and values of the trained tokens always cover the whole row."""

    token_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T], or [A, T] with A axes; each sequence counts from its own start
    segments: Segments
    predict_from: Tensor  # [N] int64: position in the row whose hidden state predicts the token; [n] of a share
    targets: Tensor  # [N] int64: the token; [n] of a share
    sequence_index: Tensor  # [N] int64 in 0..B-1
    sequence_lengths: Tensor  # [B] int64, in trained tokens
    sampler_logprobs: Tensor  # [N]
    advantages: Tensor  # [N]
    old_logprobs: Tensor | None  # [N]
    truncation_logprobs: Tensor | None  # [N]
    ref_logprobs: Tensor | None  # [N]
    high_entropy: Tensor | None  # [N] bool: tokens that an entropy mask keeps; None: all
    pixel_values: Tensor | None  # [patches, or tiles, of I images, ...]
    image_grid_thw: Tensor | None  # [I, 3], on the CPU
    image_features: Tensor | None  # [R, F] if they are cached; then the two above are None
    image_index: Tensor  # [M] int64: position in the row of each image token
    image_rows: Tensor  # [M] int64: row of the merged vision features that replaces it
    routes: Tensor | None = None  # [T, E, k] int16: experts to use, -1 where the router chooses; None: everywhere
    share: RowShare | None = None


def prompt_key(sample: TrainingSample) -> Hashable:
    """Equal for samples with the same prompt and images, and the same experts for the prompt."""
    end = sample.num_prompt
    routes = None if sample.routes is None else sample.routes[:end].tobytes()
    return tuple(image.sha256 for image in sample.images), sample.token_ids[:end].tobytes(), routes


def pack(
    samples: Sequence[TrainingSample],
    *,
    layout: ImageLayout | None,
    features: Callable[[ImageRef], ImageFeatures] | None,
) -> Microbatch:
    """Pack samples, on the CPU. Each distinct prompt and each distinct image appears once.

    Args:
        layout: None for a text model.
        features: reads one image; required if samples have images. Either all images are embedded or none.

    Raises:
        ValueError: the first token of a sample is trained; a text model gets images; image tokens do not match the
            images; only some samples have log-probs.
    """
    images = _read_images(samples, layout, features)
    tokens = np.concatenate([s.token_ids for s in samples])
    starts = np.cumsum([0, *(s.num_tokens for s in samples)])
    mask = torch.from_numpy(np.concatenate([s.loss_mask for s in samples]))
    predict_from, token_index = trained_positions(mask, torch.from_numpy(starts))
    sequence_index, sequence_lengths = trained_sequences(mask, torch.from_numpy(starts))
    row_of, source, segments = _share_prompts(samples, starts)
    if layout is not None and layout.both_ways:
        segments = replace(segments, pictures=_pictures(np.isin(tokens[source], layout.feature_token_ids), segments))
    embedded = [image.embedded for image in images.values() if image.embedded is not None]
    raw = [] if embedded else list(images.values())

    positions, image_row = _places(samples, images, layout)
    image_row = image_row[source]
    image_index = np.flatnonzero(image_row >= 0)

    def of_trained(arrays: Sequence[Floats | Bools | None]) -> Tensor | None:
        present = [a[s.loss_mask] for a, s in zip(arrays, samples, strict=True) if a is not None]
        if present and len(present) != len(arrays):
            raise ValueError("some samples of a microbatch carry log-probs and some do not")
        return _floats(present) if present else None

    def zeros(sample: TrainingSample) -> Floats:
        return np.zeros(sample.num_tokens, np.float32)

    def required(arrays: Sequence[Floats]) -> Tensor:
        return _floats([a[s.loss_mask] for a, s in zip(arrays, samples, strict=True)])

    high_entropy = of_trained([s.high_entropy for s in samples])

    return Microbatch(
        token_ids=torch.from_numpy(tokens[source]).long(),
        position_ids=torch.from_numpy(positions[..., source]),
        segments=segments,
        predict_from=torch.from_numpy(row_of[predict_from.numpy()]),
        targets=torch.from_numpy(tokens[token_index.numpy()]).long(),
        sequence_index=sequence_index,
        sequence_lengths=sequence_lengths,
        sampler_logprobs=required([s.sampler_logprobs for s in samples]),
        advantages=required([zeros(s) if s.advantages is None else s.advantages for s in samples]),
        old_logprobs=of_trained([s.old_logprobs for s in samples]),
        truncation_logprobs=of_trained([s.truncation_logprobs for s in samples]),
        ref_logprobs=of_trained([s.ref_logprobs for s in samples]),
        high_entropy=None if high_entropy is None else high_entropy.bool(),
        pixel_values=torch.cat([f.pixel_values for f in raw]) if raw else None,
        image_grid_thw=torch.tensor([f.grid_thw for f in raw]) if raw else None,
        image_features=torch.cat(embedded) if embedded else None,
        image_index=torch.from_numpy(image_index),
        image_rows=torch.from_numpy(image_row[image_index]),
        routes=_routes(samples, starts, source),
    )


def _routes(
    samples: Sequence[TrainingSample], starts: npt.NDArray[np.int64], source: npt.NDArray[np.int64]
) -> Tensor | None:
    """``Microbatch.routes``."""
    known = [(start, s.routes) for start, s in zip(starts, samples, strict=False) if s.routes is not None]
    if not known:
        return None
    routes = np.full((starts[-1], *known[0][1].shape[1:]), -1, np.int16)
    for start, own in known:
        routes[start : start + len(own)] = own
    return torch.from_numpy(routes[source])


def _read_images(
    samples: Sequence[TrainingSample],
    layout: ImageLayout | None,
    features: Callable[[ImageRef], ImageFeatures] | None,
) -> dict[str, ImageFeatures]:
    distinct = {image.sha256: image for sample in samples for image in sample.images}
    if not distinct:
        return {}
    if layout is None or features is None:
        raise ValueError("a text model was given a sample with images")
    return {sha256: features(image) for sha256, image in distinct.items()}


def _places(
    samples: Sequence[TrainingSample], images: Mapping[str, ImageFeatures], layout: ImageLayout | None
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """For the concatenated sequences: position ids ([sum L], or [A, sum L] with A axes), and the row of the vision
    features that replaces each token (-1: none)."""
    if layout is None:
        return np.concatenate([np.arange(s.num_tokens) for s in samples]), np.full(
            sum(s.num_tokens for s in samples), -1
        )
    counts = [layout.num_rows(image.grid_thw) for image in images.values()]
    first_row = dict(zip(images, np.cumsum([0, *counts]), strict=False))
    places, rows = [], []
    for sample in samples:
        grids = [images[image.sha256].grid_thw for image in sample.images]
        places.append(layout.positions(sample.token_ids, grids, sample.images))
        row = np.full(sample.num_tokens, -1)
        row[np.isin(sample.token_ids, layout.feature_token_ids)] = np.concatenate(
            [
                np.empty(0, np.int64),
                *(
                    first_row[image.sha256] + np.arange(layout.num_rows(grid))
                    for image, grid in zip(sample.images, grids, strict=True)
                ),
            ]
        )
        rows.append(row)
    return np.concatenate(places, axis=-1), np.concatenate(rows)


def rows_of(samples: Sequence[TrainingSample]) -> list[Tensor]:
    """For each sample [L] int64: where ``pack`` puts each of its tokens in the row."""
    starts = np.cumsum([0, *(s.num_tokens for s in samples)])
    row_of, _, _ = _share_prompts(samples, starts)
    return [torch.from_numpy(row_of[first:end]) for first, end in pairwise(starts)]


def _share_prompts(
    samples: Sequence[TrainingSample], starts: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Segments]:
    """Map the concatenated sequences to a row that has each prompt once.

    Returns:
        The row index of each token of the sequences ([sum L]), the inverse ([T]), and the segments of the row.
    """
    groups: dict[Hashable, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(prompt_key(sample), []).append(index)
    row_of = np.empty(starts[-1], np.int64)
    source: list[npt.NDArray[np.int64]] = []
    keys: list[npt.NDArray[np.int64]] = []
    prompts: list[npt.NDArray[np.int64]] = []
    end, bounds = 0, [0]
    for members in groups.values():
        rows = np.arange(end, end + samples[members[0]].num_prompt)
        for index in members:
            row_of[starts[index] : starts[index] + len(rows)] = rows
        source.append(np.arange(starts[members[0]], starts[members[0]] + len(rows)))
        prompts.append(rows)
        keys.append(rows)
        end += len(rows)
        bounds.append(end)
    for prompt, members in zip(prompts, groups.values(), strict=True):
        for index in members:
            own = np.arange(starts[index] + len(prompt), starts[index + 1])
            if len(own):  # a sample without trained tokens is only a prompt
                rows = np.arange(end, end + len(own))
                row_of[own] = rows
                source.append(own)
                keys.append(np.concatenate([prompt, rows]))
                end += len(own)
                bounds.append(end)
    key_lengths = [len(rows) for rows in keys]
    segments = Segments(
        bounds=torch.tensor(bounds, dtype=torch.int32),
        key_bounds=torch.from_numpy(np.cumsum([0, *key_lengths])).to(torch.int32),
        key_rows=torch.from_numpy(np.concatenate(keys)),
        sizes=torch.tensor([len(prompts), int(np.diff(bounds).max()), max(key_lengths)]),
    )
    return row_of, np.concatenate(source), segments


def _pictures(of_image: npt.NDArray[np.bool_], segments: Segments) -> Pictures | None:
    """
    Args:
        of_image: [T], whether a token of the row stands for an image. A picture is a run of such tokens in a prompt.
    """
    rows: list[npt.NDArray[np.int64]] = []
    keys: list[npt.NDArray[np.int64]] = []
    prompts = segments.bounds[: int(segments.sizes[0]) + 1].tolist()
    for start, end in pairwise(prompts):
        of_picture = np.pad(of_image[start:end], 1)
        edges = start + np.flatnonzero(of_picture[1:] != of_picture[:-1])
        for first, last in edges.reshape(-1, 2).tolist():
            rows.append(np.arange(first, last))
            keys.append(np.arange(start, last))
    if not rows:
        return None
    lengths, key_lengths = ([len(part) for part in parts] for parts in (rows, keys))
    return Pictures(
        rows=torch.from_numpy(np.concatenate(rows)),
        bounds=torch.from_numpy(np.cumsum([0, *lengths])).to(torch.int32),
        key_bounds=torch.from_numpy(np.cumsum([0, *key_lengths])).to(torch.int32),
        key_rows=torch.from_numpy(np.concatenate(keys)),
        sizes=torch.tensor([len(rows), max(lengths), max(key_lengths)]),
    )


def _floats(arrays: Sequence[Floats | Bools]) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays)).float()


def on_device(batch: Microbatch, device: torch.device) -> Microbatch:
    """The microbatch on ``device``, except the tensors that are read on the CPU."""
    stay = ("image_grid_thw", "sizes")

    def with_moved(part: Any) -> Any:
        values = {field.name: getattr(part, field.name) for field in fields(part) if field.name not in stay}
        return replace(part, **{k: moved(v, device) for k, v in values.items() if isinstance(v, Tensor)})

    share = None if batch.share is None else with_moved(batch.share)
    pictures = None if batch.segments.pictures is None else with_moved(batch.segments.pictures)
    segments = replace(with_moved(batch.segments), pictures=pictures)
    on_it: Microbatch = replace(with_moved(batch), segments=segments, share=share)
    return on_it


def moved(values: Tensor, device: torch.device) -> Tensor:
    """The tensor on ``device``, without synchronising with it."""
    if values.device.type == device.type:
        return values
    return values.pin_memory().to(device, non_blocking=True)


def trained_positions(loss_mask: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of the trained tokens of concatenated sequences.

    Args:
        loss_mask: [T] bool, True on trained tokens.
        cu_seqlens: [B+1] int, starts of the sequences, then T.

    Returns:
        predict_from [N] int64, the position whose hidden state predicts the token, and token_index [N] int64, the
        position of the token. Both in packing order.

    Raises:
        ValueError: the first token of a sequence is trained, but no token before it predicts it.
    """
    starts = cu_seqlens[:-1][cu_seqlens[:-1] < cu_seqlens[1:]].long()  # an empty sequence has no token of its own
    bad = starts[loss_mask[starts]]
    if bad.numel():
        raise ValueError(
            f"loss_mask is True at position {bad[0]}, the first token of a sequence, which nothing predicts. "
            "Start each sequence with at least one prompt token."
        )
    token_index = loss_mask.nonzero()[:, 0]
    return token_index - 1, token_index


def trained_sequences(loss_mask: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """The sequence of each trained token, and the number of trained tokens of each sequence.

    Args:
        loss_mask: [T] bool.
        cu_seqlens: [B+1] int.

    Returns:
        sequence_index [N] int64 in 0..B-1, and lengths [B] int64, in trained tokens.
    """
    bounds = cu_seqlens.long()
    before = torch.cat([bounds.new_zeros(1), loss_mask.long().cumsum(0)])  # trained tokens left of each position
    lengths = before[bounds[1:]] - before[bounds[:-1]]
    return torch.searchsorted(bounds[1:], loss_mask.nonzero()[:, 0], right=True), lengths
