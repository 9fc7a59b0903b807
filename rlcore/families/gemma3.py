"""Gemma 3 with pictures (arXiv:2503.19786): images of one size, whose tokens attend to each other in both directions.

An image is stretched to a square and becomes the same number of tokens as every other, between two markers and line
breaks. The text model is that of ``gemma3_text``, with positions that count tokens. A video is a list of images here.
Crops of large images (pan and scan) are not used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlcore.errors import ModelError
from rlcore.families.internvl import TileImages, TileLayout
from rlcore.families.protocol import Grid, ImageLayout
from rlcore.families.qwen2 import LOGIT_CAP, Qwen2, matrix_elements
from rlcore.flops import TowerShape
from rlcore.types import ImageRef

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor, nn

_TOWER = re.compile(r"(^|\.)(vision_tower|multi_modal_projector)\.")
_IN_TOWER = re.compile(r"(^|\.)vision_tower\.(?!vision_model\.)")
_WHOLE = {"do_pan_and_scan": False}


@dataclass(frozen=True, slots=True)
class Gemma3(Qwen2):
    """Implements ``Family``."""

    def require_plain(self, config: Any) -> None:
        Qwen2.require_plain(self, config)  # not super(): a dataclass with slots is a copy of its class
        tied, tied_in_engine = config.tie_word_embeddings, config.text_config.tie_word_embeddings
        if tied != tied_in_engine:
            raise ModelError(
                f"{config.model_type} sets tie_word_embeddings to {tied}, and in text_config to {tied_in_engine}. "
                "transformers reads the first, vLLM the second: set both to the same value in config.json."
            )
        if getattr(config.vision_config, "vision_use_head", True):
            raise ModelError(
                f"{config.model_type} does not set vision_use_head of vision_config to false: its tower would have a "
                "head that takes no part in the features. Set it to false in config.json."
            )
        window, tokens = config.text_config.sliding_window, config.mm_tokens_per_image
        if window is not None and window < tokens:
            raise ModelError(
                f"{config.model_type} has a sliding window of {window} tokens, and a picture has {tokens}: vLLM and "
                f"transformers mask such a picture differently. Allowed is a window of {tokens} or more."
            )

    def published_name(self, name: str) -> str:
        """transformers 5.19 leaves out a part of the name, vLLM 0.32 and published files have it."""
        return _IN_TOWER.sub(r"\1vision_tower.vision_model.", name)


@dataclass(frozen=True, slots=True)
class Gemma3Images(TileImages):
    """Implements ``Images``. An image is one tile; its grid is 1, and the tile's rows and columns of pixels."""

    processors: tuple[str, ...] = ("Gemma3ImageProcessor", "Gemma3ImageProcessorPil")
    placeholders: tuple[str, ...] = ("<start_of_image>", "<end_of_image>", "<image_soft_token>")
    videos: None = None
    takes_tiles: bool = True
    both_ways: bool = True
    adapts_tower: bool = False  # vLLM's names of the tower's layers differ from transformers'

    def resizing(self, processor: Any) -> SquareResizing:
        return SquareResizing(processor)

    def layout(self, config: Any) -> ImageLayout:
        return TileLayout(config.image_token_id, tokens_of_tile=config.mm_tokens_per_image, both_ways=self.both_ways)

    def engine_options(self, image_processor: Any, min_pixels: int, max_pixels: int) -> dict[str, Any]:
        return dict(_WHOLE)

    def read(
        self, image_processor: Any, images: Sequence[Image.Image], min_pixels: int, max_pixels: int
    ) -> tuple[Tensor, list[Grid]]:
        pixels = image_processor(images=list(images), return_tensors="pt", **_WHOLE)["pixel_values"]
        height, width = pixels.shape[-2:]
        return pixels, [(1, height, width)] * len(images)

    def owns(self, tensor: str) -> bool:
        return _TOWER.search(tensor) is not None

    def tower(self, hf: Any) -> Any:
        from rlcore.families.towers import Tower

        parts = {name: getattr(hf.model, name) for name in ("vision_tower", "multi_modal_projector")}
        return Tower(parts, lambda pixels: hf.model.get_image_features(pixels).pooler_output)

    def tower_blocks(self, tower: Any) -> Sequence[nn.Module]:
        return tower.vision_tower.encoder.layers  # type: ignore[no-any-return]

    def plain_arguments(
        self, layout: ImageLayout, token_ids: Tensor, pixels: Tensor, grids: Tensor, images: Sequence[ImageRef] = ()
    ) -> dict[str, Any]:
        (image_id,) = layout.feature_token_ids
        return {"pixel_values": pixels, "token_type_ids": (token_ids == image_id).long()[None]}

    def shape(self, tower: Any, config: Any) -> TowerShape:
        pixels = config.num_channels * config.patch_size**2
        return TowerShape(
            parameters=matrix_elements(tower.vision_tower.encoder) + pixels * config.hidden_size,
            merger_parameters=matrix_elements(tower.multi_modal_projector),
            merged=tower.multi_modal_projector.kernel_size**2,
            patch_size=config.patch_size,
            width=config.hidden_size,
            full_layers=config.num_hidden_layers,
            window_layers=0,
            window=0,
            trains=any(p.requires_grad for p in tower.parameters()),
        )

    def intermediate(self, config: Any) -> int:
        return int(config.intermediate_size)

    def head_counts_and_widths(self, config: Any) -> list[int]:
        return [config.vision_config.num_attention_heads, config.vision_config.intermediate_size]


@dataclass(frozen=True, slots=True)
class SquareResizing:
    """Implements ``Resizing``: every image becomes a square of the same size, whatever its shape."""

    processor: Any

    @property
    def factor(self) -> int:
        """Pixels per side of every image."""
        return int(self.processor.image_processor.size["height"])

    def target_size(self, width: int, height: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
        if min(width, height) < 1:
            raise ValueError(f"{width}x{height} has a side below 1")
        if self.factor**2 > max_pixels:
            raise ValueError(
                f"at most {max_pixels} pixels are allowed, and every image has {self.factor}x{self.factor}"
            )
        return self.factor, self.factor

    def expansion(self, width: int, height: int) -> Sequence[int]:
        text = self.processor.full_image_sequence
        return self.processor.tokenizer.encode(text, add_special_tokens=False)  # type: ignore[no-any-return]

    @property
    def joins(self) -> Mapping[tuple[int, int], int]:
        """Of line breaks, as vLLM joins them."""
        one, two, three, four = (self._token("\n" * count) for count in range(1, 5))
        return {(one, two): three, (two, one): three, (two, two): four}

    def _token(self, text: str) -> int:
        (token,) = self.processor.tokenizer.encode(text, add_special_tokens=False)
        return int(token)


FAMILY = Gemma3(decoder_path="model.language_model", images=Gemma3Images(), computed=(LOGIT_CAP,))
