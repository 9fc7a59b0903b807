"""Idefics3, SmolVLM and SmolVLM2 (arXiv:2408.12637, arXiv:2504.05299): images cut into tiles that are named one by one.

An image is stretched until its longer side has the same number of pixels as every other image's, and then to a grid of
square tiles. Each tile, and the whole image as the last one, becomes the same number of tokens behind a marker that
names its row and column; a line break ends each row. The decoder is a Llama, with positions that count tokens. A video
is a list of images here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlcore.errors import ModelError
from rlcore.families.internvl import TileImages, TileLayout
from rlcore.families.protocol import Grid, ImageLayout
from rlcore.families.qwen2 import Qwen2, matrix_elements
from rlcore.flops import TowerShape
from rlcore.types import ImageRef

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor, nn

_TOWER = re.compile(r"(^|\.)(vision_model|connector)\.")
_LONGEST = 4096  # pixels per side that the image processor allows


@dataclass(frozen=True, slots=True)
class Idefics3(Qwen2):
    """Implements ``Family``."""

    def require_plain(self, config: Any) -> None:
        Qwen2.require_plain(self, config)  # not super(): a dataclass with slots is a copy of its class
        if (decoder := config.text_config.model_type) != "llama":
            raise ModelError(
                f"{config.model_type} has a decoder of type {decoder}. Allowed is llama: vLLM computes a Llama with "
                "any type."
            )
        tied, tied_in_engine = config.tie_word_embeddings, config.text_config.tie_word_embeddings
        if tied != tied_in_engine:
            raise ModelError(
                f"{config.model_type} sets tie_word_embeddings to {tied}, and in text_config to {tied_in_engine}. "
                "transformers reads the first, vLLM the second: set both to the same value in config.json."
            )


@dataclass(frozen=True, slots=True)
class Idefics3Images(TileImages):
    """Implements ``Images``. The grid of an image is its tiles, and the rows and columns of pixels of a tile."""

    processors: tuple[str, ...] = (
        "Idefics3ImageProcessor",
        "Idefics3ImageProcessorPil",
        "SmolVLMImageProcessor",
        "SmolVLMImageProcessorPil",
    )
    placeholders: tuple[str, ...] = ("<image>", "<fake_token_around_image>", "<global-img>")
    videos: None = None
    takes_tiles: bool = True
    both_ways: bool = False
    adapts_tower: bool = True

    def resizing(self, processor: Any) -> NamedTileResizing:
        return NamedTileResizing(processor)

    def layout(self, config: Any) -> ImageLayout:
        return TileLayout(
            config.image_token_id, tokens_of_tile=_patches(config.vision_config) // config.scale_factor**2
        )

    def engine_options(self, image_processor: Any, min_pixels: int, max_pixels: int) -> dict[str, Any]:
        return _options(image_processor, max_pixels)

    def read(
        self, image_processor: Any, images: Sequence[Image.Image], min_pixels: int, max_pixels: int
    ) -> tuple[Tensor, list[Grid]]:
        options = _options(image_processor, max_pixels) | {"return_row_col_info": True}
        out = image_processor(images=[list(images)], return_tensors="pt", **options)
        (pixels,), (rows,), (columns,) = out["pixel_values"], out["rows"], out["cols"]
        height, width = pixels.shape[-2:]
        return pixels, [(r * c + 1, height, width) for r, c in zip(rows, columns, strict=True)]

    def owns(self, tensor: str) -> bool:
        return _TOWER.search(tensor) is not None

    def tower(self, hf: Any) -> Any:
        from rlcore.families.towers import Tower

        vision, connector = hf.model.vision_model, hf.model.connector
        # not get_image_features, which takes a tile of zeros for padding and leaves it out
        return Tower(
            {"vision_model": vision, "connector": connector},
            lambda pixels: connector(vision(pixel_values=pixels).last_hidden_state),
        )

    def tower_blocks(self, tower: Any) -> Sequence[nn.Module]:
        return tower.vision_model.encoder.layers  # type: ignore[no-any-return]

    def plain_arguments(
        self, layout: ImageLayout, token_ids: Tensor, pixels: Tensor, grids: Tensor, images: Sequence[ImageRef] = ()
    ) -> dict[str, Any]:
        return {"pixel_values": pixels[None]}

    def shape(self, tower: Any, config: Any) -> TowerShape:
        pixels = config.num_channels * config.patch_size**2
        return TowerShape(
            parameters=matrix_elements(tower.vision_model.encoder) + pixels * config.hidden_size,
            merger_parameters=matrix_elements(tower.connector),
            merged=tower.connector.scale_factor**2,
            patch_size=config.patch_size,
            width=config.hidden_size,
            full_layers=0,
            window_layers=config.num_hidden_layers,
            window=_patches(config),
            trains=any(p.requires_grad for p in tower.parameters()),
            overview=True,
        )

    def intermediate(self, config: Any) -> int:
        return int(config.intermediate_size)

    def head_counts_and_widths(self, config: Any) -> list[int]:
        return [config.vision_config.num_attention_heads, config.vision_config.intermediate_size]


def _patches(config: Any) -> int:
    """Of a tile."""
    return int(config.image_size // config.patch_size) ** 2


@dataclass(frozen=True, slots=True)
class NamedTileResizing:
    """Implements ``Resizing``: the longer side becomes the same for all images, and both become multiples of a tile's.

    The largest number of pixels bounds the longer side: a square of that side has no more. The image processor's own
    bound holds as well. There is no lower bound, because the longer side is always that large.
    """

    processor: Any

    @property
    def factor(self) -> int:
        """Pixels per side of a tile."""
        return _side(self.processor.image_processor)

    def target_size(self, width: int, height: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
        longest = _longest(self.processor.image_processor, max_pixels)
        return tile_grid(width, height, self.factor, longest)

    def expansion(self, width: int, height: int) -> Sequence[int]:
        rows, columns = height // self.factor, width // self.factor
        if rows * columns == 1:
            rows = columns = 0  # the processor's way to say that the whole image is the only tile
        text = self.processor.replace_image_token({"rows": [[rows]], "cols": [[columns]]}, 0)
        return self.processor.tokenizer.encode(text, add_special_tokens=False)  # type: ignore[no-any-return]

    @property
    def joins(self) -> Mapping[tuple[int, int], int]:
        return {}


def _side(image_processor: Any) -> int:
    return int(image_processor.max_image_size["longest_edge"])


def _longest(image_processor: Any, max_pixels: int) -> int:
    """Pixels of the longer side of every image."""
    side = _side(image_processor)
    most = min(int(image_processor.size["longest_edge"]), _LONGEST, math.isqrt(max_pixels))
    if most < side:
        raise ValueError(f"at most {max_pixels} pixels are allowed, and one tile has {side}x{side}")
    return most // side * side


def _options(image_processor: Any, max_pixels: int) -> dict[str, Any]:
    return {"size": {"longest_edge": _longest(image_processor, max_pixels)}, "do_image_splitting": True}


def tile_grid(width: int, height: int, side: int, longest: int) -> tuple[int, int]:
    """Width and height that an image is stretched to.

    The longer side becomes ``longest`` at the same aspect ratio. The shorter one is then rounded up to a multiple of
    ``side``.

    Args:
        side: pixels per side of a tile.
        longest: a multiple of ``side``.

    Raises:
        ValueError: an image without area.
    """
    if min(width, height) < 1:
        raise ValueError(f"{width}x{height} has a side below 1")
    ratio = width / height
    shorter = int(longest / ratio) if width >= height else int(longest * ratio)
    shorter = max(1, shorter + shorter % 2)  # the image processor makes it even
    rounded = -(-shorter // side) * side
    return (longest, rounded) if width >= height else (rounded, longest)


FAMILY = Idefics3(decoder_path="model.text_model", images=Idefics3Images())
