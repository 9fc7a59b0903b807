"""What a vision tower derives from the sizes of its images, worked out on the CPU; and a tower that does not train.

transformers does it on the device that the sizes lie on and reads numbers back, which waits for all that the device is
still at work on: the pass before. Handed over ready-made, nothing waits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers.vision_utils import (
    get_vision_attention_seqlens,
    get_vision_position_ids,
    get_vision_window_index,
)

from rlcore.batch import ImageFeatures, moved
from rlcore.types import ImageRef

_KEPT_BYTES = 2 << 30  # of features: 512 images of 1,000 tokens of a 7B model


class FrozenTower:
    """Images as a tower that does not train embeds them, each once for as long as it is among the last ones.

    The tower is whole on every rank, so that ranks need not meet for it. Images go through it one by one: what is made
    of one then depends on nothing but itself, whichever microbatch asks first and whatever was kept before a restart.
    """

    def __init__(
        self,
        tower: nn.Module,
        read: Callable[[ImageRef], ImageFeatures],
        *,
        device: torch.device,
        dtype: torch.dtype,
        kept_bytes: int = _KEPT_BYTES,
    ) -> None:
        """
        Args:
            tower: on ``device``; computed in ``dtype``, whatever dtype its weights are kept in.
        """
        self._tower, self._read, self._device, self._dtype = tower, read, device, dtype
        self._kept: OrderedDict[ImageRef, ImageFeatures] = OrderedDict()
        self._room = kept_bytes

    def of(self, image: ImageRef) -> ImageFeatures:
        """The image with its ``embedded``; raises what reading it raises."""
        if image in self._kept:
            self._kept.move_to_end(image)
            return self._kept[image]
        raw = self._read(image)
        embedded = self._embed(raw)
        self._kept[image] = found = replace(raw, pixel_values=raw.pixel_values[:0], embedded=embedded)
        self._room -= embedded.nbytes
        while self._room < 0 and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._room += 0 if oldest.embedded is None else oldest.embedded.nbytes
        return found

    @torch.no_grad()
    def _embed(self, image: ImageFeatures) -> Tensor:
        grid = torch.tensor([image.grid_thw])
        inputs = tower_inputs(self._tower.config, grid, self._device)
        weights = {name: weight.to(self._dtype) for name, weight in self._tower.named_parameters()}
        pixels = moved(image.pixel_values.to(self._dtype), self._device)
        arguments = {"grid_thw": moved(grid, self._device), **inputs}
        return functional_call(self._tower, weights, (pixels,), arguments).pooler_output  # type: ignore[no-any-return]


def tower_inputs(config: Any, grid_thw: Tensor, device: torch.device) -> dict[str, Any]:
    """Keyword arguments of a tower's forward: positions, and the bounds of images and of windows where it has these.

    Args:
        config: of the vision tower, with packed attention set.
        grid_thw: [I, 3] int64 on the CPU.
    """
    bounds, longest = get_vision_attention_seqlens(grid_thw, config)
    found = {
        "position_ids": moved(get_vision_position_ids(grid_thw, config.spatial_merge_size), device),
        "cu_seqlens": moved(bounds, device),
        "max_seqlen": longest,
    }
    if getattr(config, "window_size", None):
        index, window_bounds = get_vision_window_index(
            grid_thw, config.spatial_merge_size, config.window_size, config.patch_size
        )
        found |= {
            "window_index": moved(index, device),
            "cu_window_seqlens": moved(window_bounds, device),
            "max_window_seqlen": int(window_bounds.diff().max()),
        }
    return found
