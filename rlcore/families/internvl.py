"""InternVL3 and InternVL3.5 in transformers' format (arXiv:2504.10479, arXiv:2508.18265): images cut into tiles.

An image becomes a grid of square tiles of one size, and if it has several, one more tile with the whole image. Every
tile becomes the same number of tokens. The decoder is a Qwen2 or a Qwen3, with positions that count tokens. A video is
a list of images here: the family's own video input is not used.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rlcore.errors import ModelError
from rlcore.families.protocol import Grid, ImageLayout
from rlcore.families.qwen2 import Qwen2, matrix_elements
from rlcore.families.qwen2_vl import with_features
from rlcore.flops import TowerShape
from rlcore.types import ImageRef, Ints

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor, nn

_TOWER = re.compile(r"(^|\.)(vision_tower|multi_modal_projector)\.")
_DECODERS = ("qwen2", "qwen3")
_AROUND = ("<img>", "</img>")  # before and after an image's tokens
# Fields of the tower, and the value for which vLLM computes the same as transformers.
_LAST_LAYER: dict[str, object] = {"vision_feature_layer": -1, "vision_feature_select_strategy": "default"}


@dataclass(frozen=True, slots=True)
class InternVL(Qwen2):
    """Implements ``Family``."""

    def require_plain(self, config: Any) -> None:
        Qwen2.require_plain(self, config)  # not super(): a dataclass with slots is a copy of its class
        if (decoder := config.text_config.model_type) not in _DECODERS:
            raise ModelError(
                f"{config.model_type} has a decoder of type {decoder}. Allowed are {' and '.join(_DECODERS)}: adapters "
                "and FLOPs of other decoders are not known here."
            )
        for field, allowed in _LAST_LAYER.items():
            if (value := getattr(config, field)) != allowed:
                raise ModelError(
                    f"{config.model_type} sets {field} to {value!r}, which vLLM ignores: it would sample from a "
                    f"different model. Allowed is {allowed!r}."
                )


@dataclass(frozen=True, slots=True)
class TileImages:
    """The part of ``Images`` that is the same for all towers that take tiles."""

    def tower_arguments(self, config: Any, grids: Tensor) -> dict[str, Any]:
        return {}

    def features(self, output: Any) -> Tensor:
        return output.flatten(0, 1)  # type: ignore[no-any-return]

    def blank(self, config: Any) -> tuple[tuple[int, ...], Grid]:
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        return (1, config.num_channels, height, width), (1, height, width)

    def decoder_inputs(self, embeddings: Tensor, features: Tensor, index: Tensor, rows: Tensor) -> dict[str, Any]:
        return with_features(embeddings, features, index, rows)


@dataclass(frozen=True, slots=True)
class InternVLImages(TileImages):
    """Implements ``Images``. The grid of an image is its tiles, and the rows and columns of pixels of a tile."""

    processors: tuple[str, ...] = ("GotOcr2ImageProcessor", "GotOcr2ImageProcessorPil")
    placeholders: tuple[str, ...] = (*_AROUND, "<IMG_CONTEXT>", "<video>")
    videos: None = None
    takes_tiles: bool = True
    both_ways: bool = False
    adapts_tower: bool = False  # vLLM 0.32 has plain linear layers there

    def resizing(self, processor: Any) -> TileResizing:
        return TileResizing(processor)

    def layout(self, config: Any) -> TileLayout:
        patches = math.prod(_patches(config.vision_config))
        return TileLayout(config.image_token_id, tokens_of_tile=int(patches * config.downsample_ratio**2))

    def engine_options(self, image_processor: Any, min_pixels: int, max_pixels: int) -> dict[str, Any]:
        return _options(image_processor, min_pixels, max_pixels)

    def read(
        self, image_processor: Any, images: Sequence[Image.Image], min_pixels: int, max_pixels: int
    ) -> tuple[Tensor, list[Grid]]:
        options = _options(image_processor, min_pixels, max_pixels)
        out = image_processor(images=list(images), return_tensors="pt", **options)
        height, width = out["pixel_values"].shape[-2:]
        return out["pixel_values"], [(int(tiles), height, width) for tiles in out["num_patches"]]

    def owns(self, tensor: str) -> bool:
        return _TOWER.search(tensor) is not None

    def tower(self, hf: Any) -> Any:
        from rlcore.families.towers import Tower

        parts = {name: getattr(hf.model, name) for name in ("vision_tower", "multi_modal_projector")}
        return Tower(parts, lambda pixels: hf.model.get_image_features(pixels).pooler_output)

    def tower_blocks(self, tower: Any) -> Sequence[nn.Module]:
        return tower.vision_tower.encoder.layer  # type: ignore[no-any-return]

    def plain_arguments(
        self, layout: ImageLayout, token_ids: Tensor, pixels: Tensor, grids: Tensor, images: Sequence[ImageRef] = ()
    ) -> dict[str, Any]:
        return {"pixel_values": pixels}

    def shape(self, tower: Any, config: Any) -> TowerShape:
        pixels = config.num_channels * math.prod(config.patch_size)
        return TowerShape(
            parameters=matrix_elements(tower.vision_tower.encoder) + pixels * config.hidden_size,
            merger_parameters=matrix_elements(tower.multi_modal_projector),
            merged=tower.multi_modal_projector.linear_1.in_features // config.hidden_size,
            patch_size=config.patch_size[0],
            width=config.hidden_size,
            full_layers=0,
            window_layers=config.num_hidden_layers,
            window=math.prod(_patches(config)),
            trains=any(p.requires_grad for p in tower.parameters()),
            overview=True,
        )

    def intermediate(self, config: Any) -> int:
        return int(config.intermediate_size)

    def head_counts_and_widths(self, config: Any) -> list[int]:
        return [config.vision_config.intermediate_size]  # every rank computes the tower's attention whole


def _patches(config: Any) -> tuple[int, int]:
    """Rows and columns of a tile."""
    (height, width), (of_rows, of_columns) = config.image_size, config.patch_size
    return height // of_rows, width // of_columns


@dataclass(frozen=True, slots=True)
class TileResizing:
    """Implements ``Resizing``: both sides become multiples of a tile's.

    The bounds on pixels are bounds on the number of tiles. The image processor's own bounds hold as well.
    """

    processor: Any

    @property
    def factor(self) -> int:
        """Pixels per side of a tile."""
        return _side(self.processor.image_processor)

    def target_size(self, width: int, height: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
        fewest, most = _tiles(self.processor.image_processor, min_pixels, max_pixels)
        columns, rows = tile_grid(width, height, self.factor, fewest, most)
        return columns * self.factor, rows * self.factor

    def expansion(self, width: int, height: int) -> Sequence[int]:
        tiles = (width // self.factor) * (height // self.factor)
        count = int(self.processor.image_seq_length) * (tiles + (tiles > 1))
        start, end = self.processor.tokenizer.convert_tokens_to_ids(list(_AROUND))
        return [start, *[self.processor.image_token_id] * count, end]

    @property
    def joins(self) -> Mapping[tuple[int, int], int]:
        return {}


def _side(image_processor: Any) -> int:
    return int(image_processor.size["height"])


def _tiles(image_processor: Any, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """The fewest and the most tiles of an image, without the tile of the whole image."""
    area = _side(image_processor) ** 2
    fewest = max(image_processor.min_patches, -(-min_pixels // area))
    return fewest, min(image_processor.max_patches, max_pixels // area)


def _options(image_processor: Any, min_pixels: int, max_pixels: int) -> dict[str, Any]:
    fewest, most = _tiles(image_processor, min_pixels, max_pixels)
    return {"crop_to_patches": True, "min_patches": fewest, "max_patches": most}


def tile_grid(width: int, height: int, side: int, fewest: int, most: int) -> tuple[int, int]:
    """Columns and rows of tiles that an image of ``width`` x ``height`` pixels is stretched to.

    The grid with the closest aspect ratio. Of several, the largest that is less than twice the image's area, else the
    smallest. Source: InternVL 1.5, arXiv:2404.16821, section 3.3.

    Args:
        side: pixels per side of a tile.
        fewest, most: tiles of the grid.

    Raises:
        ValueError: an image without area, or no number of tiles is allowed.
    """
    if min(width, height) < 1:
        raise ValueError(f"{width}x{height} has a side below 1")
    if most < max(1, fewest):
        raise ValueError(
            f"at least {max(1, fewest)} and at most {most} tiles of {side}x{side} pixels are allowed, which leaves none"
        )
    best, distance = (1, 1), math.inf
    for columns, rows in _grids(fewest, most):
        apart = abs(width / height - columns / rows)
        if apart < distance or (apart == distance and 2 * width * height > columns * rows * side**2):
            best, distance = (columns, rows), apart
    return best


@cache
def _grids(fewest: int, most: int) -> list[tuple[int, int]]:
    """By their number of tiles, then by their columns."""
    sides = range(1, most + 1)
    grids = [(columns, rows) for columns in sides for rows in sides if fewest <= columns * rows <= most]
    return sorted(grids, key=math.prod)


@dataclass(frozen=True, slots=True)
class TileLayout:
    """Implements ``ImageLayout``: each tile has the same number of tokens, at positions that count tokens."""

    image_token_id: int
    tokens_of_tile: int
    both_ways: bool = False

    @property
    def feature_token_ids(self) -> tuple[int, ...]:
        return (self.image_token_id,)

    def num_rows(self, grid: Grid) -> int:
        return grid[0] * self.tokens_of_tile

    def num_inputs(self, grid: Grid) -> int:
        return grid[0]

    def positions(
        self, token_ids: Ints, grids: Sequence[Grid], images: Sequence[ImageRef] = ()
    ) -> npt.NDArray[np.int64]:
        found, expected = int((token_ids == self.image_token_id).sum()), sum(map(self.num_rows, grids))
        if found != expected:
            raise ValueError(f"{found} image tokens, and the {len(grids)} images of the sequence have {expected}")
        return np.arange(len(token_ids))


FAMILY = InternVL(decoder_path="model.language_model", images=InternVLImages())
