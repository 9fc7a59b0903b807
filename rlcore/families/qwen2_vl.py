"""Qwen2-VL (arXiv:2409.12191) and Qwen2.5-VL (arXiv:2502.13923): images of any size as a grid of patches, and videos
as such a grid with a third axis."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from rlcore.families.protocol import Grid, ImageLayout, Videos
from rlcore.families.qwen2 import Qwen2, matrix_elements
from rlcore.flops import TowerShape
from rlcore.types import ImageRef, Ints

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor, nn

MAX_ASPECT_RATIO = 200  # the image processor raises above it
_TOWER = re.compile(r"(^|\.)visual\.")  # "visual." in the folders of older transformers


@dataclass(frozen=True, slots=True)
class PatchVideos:
    """Implements ``Videos``: ``temporal_patch_size`` frames, two in all published models, share a patch. The last frame
    is repeated to fill it."""

    processors: tuple[str, ...] = ("Qwen2VLProcessor", "Qwen2_5_VLProcessor")

    def token_id(self, processor: Any) -> int:
        return int(processor.video_token_id)

    def expansion(self, processor: Any, video: ImageRef) -> Sequence[int]:
        return [self.token_id(processor)] * sum(count for _, count in self.steps(processor, video))

    def steps(self, processor: Any, video: ImageRef) -> list[tuple[float, int]]:
        """Of each group of frames that share patches: the middle of its moments in seconds, and its tokens."""
        size, factor = processor.image_processor.temporal_patch_size, GridResizing(processor).factor
        count = (video.width // factor) * (video.height // factor)
        groups = [video.moments[first : first + size] for first in range(0, video.frames, size)]
        return [((group[0] + group[-1]) / 2, count) for group in groups]

    def read(self, image_processor: Any, frames: Sequence[Image.Image]) -> tuple[Tensor, Grid]:
        out = image_processor(images=list(frames), do_resize=False, return_tensors="pt")
        size, (_, rows, columns) = image_processor.temporal_patch_size, out["image_grid_thw"][0].tolist()
        area = image_processor.patch_size**2
        # the processor fills a patch with copies of its one frame
        single = out["pixel_values"].view(len(frames), rows * columns, -1, size, area)[:, :, :, 0]
        chosen = [min(frame, len(frames) - 1) for frame in range(math.ceil(len(frames) / size) * size)]
        groups = single[chosen].unflatten(0, (-1, size))  # [t, size, rows * columns, channels, area]
        return groups.permute(0, 2, 3, 1, 4).flatten(0, 1).flatten(1), (len(groups), rows, columns)

    def engine_options(self, image_options: Mapping[str, Any]) -> dict[str, Any]:
        return {"images_kwargs": dict(image_options), "videos_kwargs": {"do_resize": False, "do_sample_frames": False}}


@dataclass(frozen=True, slots=True)
class Qwen2VLImages:
    """Implements ``Images``."""

    processors: tuple[str, ...] = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorPil", "Qwen2VLImageProcessorFast")
    placeholders: tuple[str, ...] = (
        "<|vision_start|>",
        "<|vision_end|>",
        "<|vision_pad|>",
        "<|image_pad|>",
        "<|video_pad|>",
    )
    videos: Videos | None = PatchVideos()
    takes_tiles: bool = False
    both_ways: bool = False
    adapts_tower: bool = True

    def resizing(self, processor: Any) -> GridResizing:
        return GridResizing(processor)

    def layout(self, config: Any) -> GridLayout:
        vision = config.vision_config
        return GridLayout(
            image_token_id=config.image_token_id,
            merge_size=vision.spatial_merge_size,
            video_token_id=getattr(config, "video_token_id", None),
            frames_per_step=getattr(vision, "temporal_patch_size", 1),
            tokens_per_second=getattr(vision, "tokens_per_second", None),
        )

    def engine_options(self, image_processor: Any, min_pixels: int, max_pixels: int) -> dict[str, Any]:
        return {"size": _size(min_pixels, max_pixels)}

    def read(
        self, image_processor: Any, images: Sequence[Image.Image], min_pixels: int, max_pixels: int
    ) -> tuple[Tensor, list[Grid]]:
        out = image_processor(images=list(images), size=_size(min_pixels, max_pixels), return_tensors="pt")
        return out["pixel_values"], [(t, h, w) for t, h, w in out["image_grid_thw"].tolist()]

    def owns(self, tensor: str) -> bool:
        return _TOWER.search(tensor) is not None

    def tower(self, hf: Any) -> Any:
        return hf.model.visual

    def tower_blocks(self, tower: Any) -> Sequence[nn.Module]:
        return tower.blocks  # type: ignore[no-any-return]

    def tower_arguments(self, config: Any, grids: Tensor) -> dict[str, Any]:
        from transformers.vision_utils import (
            get_vision_attention_seqlens,
            get_vision_position_ids,
            get_vision_window_index,
        )

        bounds, longest = get_vision_attention_seqlens(grids, config)
        arguments = {
            "grid_thw": grids,
            "position_ids": get_vision_position_ids(grids, config.spatial_merge_size),
            "cu_seqlens": bounds,
            "max_seqlen": longest,
        }
        if getattr(config, "window_size", None):
            index, window_bounds = get_vision_window_index(
                grids, config.spatial_merge_size, config.window_size, config.patch_size
            )
            arguments |= {
                "window_index": index,
                "cu_window_seqlens": window_bounds,
                "max_window_seqlen": int(window_bounds.diff().max()),
            }
        return arguments

    def features(self, output: Any) -> Tensor:
        return output.pooler_output  # type: ignore[no-any-return]

    def blank(self, config: Any) -> tuple[tuple[int, ...], Grid]:
        side = config.spatial_merge_size
        return (side * side, _patch_width(config)), (1, side, side)

    def decoder_inputs(self, embeddings: Tensor, features: Tensor, index: Tensor, rows: Tensor) -> dict[str, Any]:
        return with_features(embeddings, features, index, rows)

    def plain_arguments(
        self, layout: ImageLayout, token_ids: Tensor, pixels: Tensor, grids: Tensor, images: Sequence[ImageRef] = ()
    ) -> dict[str, Any]:
        return plain_arguments(cast(GridLayout, layout), token_ids, pixels, grids, images)

    def shape(self, tower: Any, config: Any) -> TowerShape:
        width = _width(config)
        full = len(getattr(config, "fullatt_block_indexes", range(config.depth)))  # without windows all are
        return TowerShape(
            parameters=matrix_elements(tower.blocks) + _patch_width(config) * width,
            merger_parameters=matrix_elements(tower.merger),
            merged=config.spatial_merge_size**2,
            patch_size=config.patch_size,
            width=width,
            full_layers=full,
            window_layers=config.depth - full,
            window=(getattr(config, "window_size", 0) // config.patch_size) ** 2,
            trains=any(p.requires_grad for p in tower.parameters()),
        )

    def intermediate(self, config: Any) -> int:
        if hasattr(config, "intermediate_size"):
            return int(config.intermediate_size)
        return int(_width(config) * getattr(config, "mlp_ratio", 4))  # Qwen2-VL

    def head_counts_and_widths(self, config: Any) -> list[int]:
        vision = config.vision_config
        return [getattr(vision, name) for name in ("num_heads", "intermediate_size") if hasattr(vision, name)]


def plain_arguments(
    layout: GridLayout, token_ids: Tensor, pixels: Tensor, grids: Tensor, images: Sequence[ImageRef]
) -> dict[str, Any]:
    """``Images.plain_arguments``."""
    import torch

    image_id, *video_id = layout.feature_token_ids
    kinds = (token_ids == image_id).int()
    if video_id:
        kinds += 2 * (token_ids == video_id[0]).int()
    arguments: dict[str, Any] = {"mm_token_type_ids": kinds[None]}
    is_video = [image.is_video for image in images] or [False] * len(grids)
    parts = list(pixels.split([layout.num_inputs(grid) for grid in grids.tolist()]))  # type: ignore[no-untyped-call]
    for wanted, values, grid in (
        (False, "pixel_values", "image_grid_thw"),
        (True, "pixel_values_videos", "video_grid_thw"),
    ):
        chosen = [number for number, is_one in enumerate(is_video) if is_one is wanted]
        if chosen:
            arguments |= {values: torch.cat([parts[number] for number in chosen]), grid: grids[chosen]}
    videos = [image for image in images if image.is_video]
    if videos and layout.tokens_per_second is not None:
        arguments["second_per_grid_ts"] = torch.tensor([layout.frames_per_step * v.seconds_per_frame for v in videos])
    if videos and layout.outlasts(grids.tolist(), images):
        places = layout.positions(token_ids.numpy(), grids.tolist(), images)
        arguments["position_ids"] = torch.from_numpy(places)[:, None]
    return arguments


def with_features(embeddings: Tensor, features: Tensor, index: Tensor, rows: Tensor) -> dict[str, Any]:
    """``Images.decoder_inputs`` of families whose features are the input of the first decoder layer alone."""
    placed = features.index_select(0, rows).to(embeddings.dtype)  # [M, H]
    return {"inputs_embeds": embeddings.index_copy(0, index, placed)[None]}


def _width(config: Any) -> int:
    """Width of the tower's layers. In Qwen2-VL it is ``embed_dim``, and ``hidden_size`` is the decoder's width."""
    return int(getattr(config, "embed_dim", None) or config.hidden_size)


def _patch_width(config: Any) -> int:
    channels = getattr(config, "in_channels", None) or getattr(config, "in_chans", 3)
    return int(channels * config.temporal_patch_size * config.patch_size**2)


def _size(min_pixels: int, max_pixels: int) -> dict[str, int]:
    return {"shortest_edge": min_pixels, "longest_edge": max_pixels}  # areas in pixels, despite the names


@dataclass(frozen=True, slots=True)
class GridResizing:
    """Implements ``Resizing``: both sides become multiples of patch size x merge size."""

    processor: Any

    @property
    def factor(self) -> int:
        settings = self.processor.image_processor
        return int(settings.patch_size * settings.merge_size)

    def target_size(self, width: int, height: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
        return target_size(width, height, self.factor, min_pixels, max_pixels)

    def expansion(self, width: int, height: int) -> Sequence[int]:
        count = (width // self.factor) * (height // self.factor)
        return [int(self.processor.image_token_id)] * count

    @property
    def joins(self) -> Mapping[tuple[int, int], int]:
        return {}


def target_size(width: int, height: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Width and height that the image processor resizes to.

    Both sides become multiples of ``factor``. As far as the grid allows, the area is in [min_pixels, max_pixels] and
    the aspect ratio is unchanged.

    Raises:
        ValueError: a side below 1, or an aspect ratio above MAX_ASPECT_RATIO.
    """
    if min(width, height) < 1 or max(width, height) / min(width, height) > MAX_ASPECT_RATIO:
        raise ValueError(f"{width}x{height} has a side below 1 or an aspect ratio above {MAX_ASPECT_RATIO}")
    wide, high = round(width / factor) * factor, round(height / factor) * factor
    if wide * high > max_pixels:
        shrink = math.sqrt((height * width) / max_pixels)
        wide = max(factor, math.floor(width / shrink / factor) * factor)
        high = max(factor, math.floor(height / shrink / factor) * factor)
    elif wide * high < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        wide = math.ceil(width * grow / factor) * factor
        high = math.ceil(height * grow / factor) * factor
    return wide, high


@dataclass(frozen=True, slots=True)
class _Block:
    """Neighbouring feature tokens, in merged patches."""

    times: npt.NDArray[np.int64]  # of its steps, from 0
    rows: int
    columns: int

    @property
    def extent(self) -> int:
        """Positions that the block takes: the largest on an axis, plus one."""
        return max(self.rows, self.columns, int(self.times[-1]) + 1)


@dataclass(frozen=True, slots=True)
class GridLayout:
    """Implements ``ImageLayout``: one token per square of ``merge_size`` x ``merge_size`` patches."""

    image_token_id: int
    merge_size: int
    both_ways: bool = False
    video_token_id: int | None = None
    frames_per_step: int = 1  # frames of a video that share patches
    tokens_per_second: float | None = None  # positions on the time axis; None: one for each step
    steps_apart: bool = False  # text stands between the steps of a video, each of which is placed like an image

    @property
    def feature_token_ids(self) -> tuple[int, ...]:
        return (self.image_token_id,) if self.video_token_id is None else (self.image_token_id, self.video_token_id)

    def num_rows(self, grid: Grid) -> int:
        return self.num_inputs(grid) // self.merge_size**2

    def num_inputs(self, grid: Grid) -> int:
        return math.prod(grid)

    def positions(
        self, token_ids: Ints, grids: Sequence[Grid], images: Sequence[ImageRef] = ()
    ) -> npt.NDArray[np.int64]:
        """[3, L] time, height and width.

        Text advances all three by one per token. An image at position p has p on the time axis and p + (row, column) of
        the merged grid on the others. A video also advances on the time axis. The text after either continues from
        one more than the largest position. Source: Qwen2-VL, arXiv:2409.12191, section 2.1.

        transformers 5.19 lets the text after a video continue from p + max(rows, columns), inside the time of a long
        video. vLLM and transformers 5.2 do as it is done here, as the models were trained.
        """
        is_feature = np.isin(token_ids, self.feature_token_ids)
        positions = np.empty((3, len(token_ids)), np.int64)
        start, position = 0, 0
        for block in self._blocks(grids, images):
            count = len(block.times) * block.rows * block.columns
            remaining = np.flatnonzero(is_feature[start:])
            first = start + int(remaining[0]) if len(remaining) else len(token_ids)
            end = first + count
            if end > len(token_ids) or not is_feature[first:end].all():
                rows, columns = block.rows, block.columns
                raise ValueError(f"an image of {rows}x{columns} tokens does not fit the image tokens at {first}")
            positions[:, start:first] = np.arange(position, position + first - start)
            position += first - start
            positions[0, first:end] = position + np.repeat(block.times, block.rows * block.columns)
            positions[1, first:end] = position + np.tile(
                np.repeat(np.arange(block.rows), block.columns), len(block.times)
            )
            positions[2, first:end] = position + np.tile(np.arange(block.columns), len(block.times) * block.rows)
            position += block.extent
            start = end
        if is_feature[start:].any():
            raise ValueError(f"{int(is_feature[start:].sum())} image tokens are left over after {len(grids)} images")
        positions[:, start:] = np.arange(position, position + len(token_ids) - start)
        return positions

    def outlasts(self, grids: Sequence[Grid], images: Sequence[ImageRef]) -> bool:
        """Whether a video takes more positions on the time axis than on the others."""
        return any(block.extent > max(block.rows, block.columns) for block in self._blocks(grids, images))

    def _blocks(self, grids: Sequence[Grid], images: Sequence[ImageRef]) -> Iterator[_Block]:
        for number, (steps, rows, columns) in enumerate(grids):
            each = 1.0
            if images and images[number].is_video and self.tokens_per_second is not None:
                each = self.tokens_per_second * self.frames_per_step * images[number].seconds_per_frame
            times = (np.arange(steps) * each).astype(np.int64)
            for part in np.split(times * 0, steps) if self.steps_apart else [times]:
                yield _Block(part, rows // self.merge_size, columns // self.merge_size)


IMAGES = Qwen2VLImages()
FAMILY = Qwen2(decoder_path="model.language_model", images=IMAGES)
