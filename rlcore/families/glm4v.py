"""GLM-4.1V (arXiv:2507.01006): images of any size as a grid of patches, at the positions that Qwen2-VL gives them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rlcore.errors import ModelError
from rlcore.families.protocol import Grid
from rlcore.families.qwen2 import Qwen2
from rlcore.families.qwen2_vl import GridResizing, Qwen2VLImages
from rlcore.flops import TowerShape

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

_EPSILON = 1e-5


@dataclass(frozen=True, slots=True)
class Glm4v(Qwen2):
    """Implements ``Family``."""

    def require_plain(self, config: Any) -> None:
        Qwen2.require_plain(self, config)  # not super(): a dataclass with slots is a copy of its class
        if (epsilon := config.vision_config.rms_norm_eps) != _EPSILON:
            raise ModelError(
                f"{config.model_type} sets rms_norm_eps of vision_config to {epsilon}, which vLLM ignores: it would "
                f"sample from a different model. Allowed is {_EPSILON}."
            )
        if getattr(config.text_config, "attention_bias", False) is not True:
            raise ModelError(
                f"{config.model_type} does not set attention_bias of text_config to true. transformers always adds "
                "biases to queries, keys and values. vLLM adds them only if attention_bias is true, so it would sample "
                "from a different model. Set it to true in config.json."
            )


@dataclass(frozen=True, slots=True)
class Glm4vImages(Qwen2VLImages):
    """Implements ``Images``. The image processor counts the pixels of all frames of a patch, which are equal."""

    processors: tuple[str, ...] = ("Glm4vImageProcessor", "Glm4vImageProcessorPil")
    placeholders: tuple[str, ...] = (
        "<|begin_of_image|>",
        "<|end_of_image|>",
        "<|image|>",
        "<|begin_of_video|>",
        "<|end_of_video|>",
        "<|video|>",
    )
    videos: None = None
    adapts_tower: bool = False  # vLLM 0.32 does not find those of the tower's gates

    def resizing(self, processor: Any) -> GridResizing:
        return EnlargingGridResizing(processor)

    def engine_options(self, image_processor: Any, min_pixels: int, max_pixels: int) -> dict[str, Any]:
        frames = image_processor.temporal_patch_size
        return Qwen2VLImages.engine_options(self, image_processor, frames * min_pixels, frames * max_pixels)

    def read(
        self, image_processor: Any, images: Sequence[Image.Image], min_pixels: int, max_pixels: int
    ) -> tuple[Tensor, list[Grid]]:
        frames = image_processor.temporal_patch_size
        return Qwen2VLImages.read(self, image_processor, images, frames * min_pixels, frames * max_pixels)

    def shape(self, tower: Any, config: Any) -> TowerShape:
        base = Qwen2VLImages.shape(self, tower, config)
        return replace(base, merger_parameters=base.merger_parameters + tower.downsample.weight.numel())


@dataclass(frozen=True, slots=True)
class EnlargingGridResizing(GridResizing):
    """Implements ``Resizing``: an image with a side below one square is enlarged first."""

    def target_size(self, width: int, height: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
        if 0 < min(width, height) < self.factor:
            scale = max(self.factor / height, self.factor / width)
            width, height = int(width * scale), int(height * scale)
        return GridResizing.target_size(self, width, height, min_pixels, max_pixels)


FAMILY = Glm4v(decoder_path="model.language_model", images=Glm4vImages())
