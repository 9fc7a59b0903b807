"""Qwen2-VL (arXiv:2409.12191) and Qwen2.5-VL (arXiv:2502.13923): images of any size as a grid of patches."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rlcore.families.protocol import Grid, ImageLayout
from rlcore.families.qwen2 import Qwen2, matrix_elements
from rlcore.flops import TowerShape
from rlcore.types import Ints

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor, nn

MAX_ASPECT_RATIO = 200  # the image processor raises above it
_TOWER = re.compile(r"(^|\.)visual\.")  # "visual." in the folders of older transformers


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
    takes_tiles: bool = False
    both_ways: bool = False
    adapts_tower: bool = True

    def resizing(self, processor: Any) -> GridResizing:
        return GridResizing(processor)

    def layout(self, config: Any) -> GridLayout:
        return GridLayout(image_token_id=config.image_token_id, merge_size=config.vision_config.spatial_merge_size)

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

    def plain_arguments(self, layout: ImageLayout, token_ids: Tensor, pixels: Tensor, grids: Tensor) -> dict[str, Any]:
        is_image = (token_ids == layout.image_token_id).int()
        return {"pixel_values": pixels, "image_grid_thw": grids, "mm_token_type_ids": is_image[None]}

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
class GridLayout:
    """Implements ``ImageLayout``: one token per square of ``merge_size`` x ``merge_size`` patches."""

    image_token_id: int
    merge_size: int
    both_ways: bool = False

    def num_rows(self, grid: Grid) -> int:
        return self.num_inputs(grid) // self.merge_size**2

    def num_inputs(self, grid: Grid) -> int:
        return math.prod(grid)

    def positions(self, token_ids: Ints, grids: Sequence[Grid]) -> npt.NDArray[np.int64]:
        """[3, L] time, height and width.

        Text advances all three by one per token. An image at position p has p on the time axis and p + (row, column) of
        the merged grid on the others. The text after it continues from p + max(rows, columns).
        Source: Qwen2-VL, arXiv:2409.12191, section 2.1.
        """
        is_image = token_ids == self.image_token_id
        positions = np.empty((3, len(token_ids)), np.int64)
        start, position = 0, 0
        for grid in grids:
            rows, columns = grid[1] // self.merge_size, grid[2] // self.merge_size
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


IMAGES = Qwen2VLImages()
FAMILY = Qwen2(decoder_path="model.language_model", images=IMAGES)
