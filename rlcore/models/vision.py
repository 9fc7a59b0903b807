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

from rlcore.batch import ImageFeatures, moved
from rlcore.families.protocol import Images
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
        images: Images,
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
        self._tower, self._images, self._read, self._device, self._dtype = tower, images, read, device, dtype
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
        arguments = tower_arguments(self._images, self._tower.config, torch.tensor([image.grid_thw]), self._device)
        weights = {name: weight.to(self._dtype) for name, weight in self._tower.named_parameters()}
        pixels = moved(image.pixel_values.to(self._dtype), self._device)
        return self._images.features(functional_call(self._tower, weights, (pixels,), arguments))


def tower_arguments(images: Images, config: Any, grids: Tensor, device: torch.device) -> dict[str, Any]:
    """``Images.tower_arguments`` with their tensors on ``device``."""
    arguments = images.tower_arguments(config, grids)
    return {name: moved(value, device) if isinstance(value, Tensor) else value for name, value in arguments.items()}
