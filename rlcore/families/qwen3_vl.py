"""Qwen3-VL, dense (arXiv:2511.21631): features of several tower layers enter several decoder layers (deepstack).

Image sizes, placeholders and position ids are those of Qwen2-VL, with patches of 16 pixels. In a video the time of each
group of frames is text before its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rlcore.families.protocol import Videos
from rlcore.families.qwen2 import Qwen2, matrix_elements
from rlcore.families.qwen2_vl import GridLayout, PatchVideos, Qwen2VLImages
from rlcore.flops import TowerShape
from rlcore.types import ImageRef

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class TimedVideos(PatchVideos):
    """Implements ``Videos``. As transformers since 5.10 and vLLM write them: all of it between the two marks that the
    chat template has around a video."""

    processors: tuple[str, ...] = ("Qwen3VLProcessor",)

    def expansion(self, processor: Any, video: ImageRef) -> Sequence[int]:
        tokenizer = processor.tokenizer
        start, end = (tokenizer.convert_tokens_to_ids(f"<|vision_{side}|>") for side in ("start", "end"))
        tokens: list[int] = []
        for seconds, count in self.steps(processor, video):
            time = tokenizer.encode(f"<{seconds:.1f} seconds>", add_special_tokens=False)
            tokens += [*time, start, *[self.token_id(processor)] * count, end]
        return tokens


@dataclass(frozen=True, slots=True)
class Qwen3VLImages(Qwen2VLImages):
    """Implements ``Images``. A row of features is the input [H] of the first decoder layer, then one [H] for each of
    the layers after which deepstack adds one. DeepStack, arXiv:2406.04334."""

    videos: Videos | None = TimedVideos()

    def layout(self, config: Any) -> GridLayout:
        return replace(Qwen2VLImages.layout(self, config), steps_apart=True)

    def tower_arguments(self, config: Any, grids: Tensor) -> dict[str, Any]:
        from transformers.vision_utils import get_vision_interpolation_indices_and_weights

        # the learned positions form a square, which is resampled to the grid of each image
        index, weights = get_vision_interpolation_indices_and_weights(
            grids,
            num_grid_per_side=math.isqrt(config.num_position_embeddings),
            mode="bilinear",
            align_corners=True,
            spatial_merge_size=config.spatial_merge_size,
        )
        # not super(): a dataclass with slots is a copy of its class
        arguments = Qwen2VLImages.tower_arguments(self, config, grids)
        return arguments | {"interp_indices": index, "interp_weights": weights}

    def features(self, output: Any) -> Tensor:
        import torch

        return torch.cat([output.pooler_output, *output.deepstack_features], dim=-1)

    def decoder_inputs(self, embeddings: Tensor, features: Tensor, index: Tensor, rows: Tensor) -> dict[str, Any]:
        placed = features.index_select(0, rows).to(embeddings.dtype)  # [M, F]
        first, *later = placed.split(embeddings.shape[1], dim=1)  # type: ignore[no-untyped-call]
        is_image = index.new_zeros(len(embeddings)).index_fill(0, index, 1).bool()  # [T]; ``index`` ascends
        return {
            "inputs_embeds": embeddings.index_copy(0, index, first)[None],
            "visual_pos_masks": is_image[None],
            "deepstack_visual_embeds": later,  # of layers 0, 1, ...
        }

    def shape(self, tower: Any, config: Any) -> TowerShape:
        base = Qwen2VLImages.shape(self, tower, config)
        deepstack = matrix_elements(tower.deepstack_merger_list)
        return replace(base, merger_parameters=base.merger_parameters + deepstack)


FAMILY = Qwen2(decoder_path="model.language_model", images=Qwen3VLImages())
