"""A vision tower and its projector as one module. Unlike the other files of this package it needs torch, so methods
import it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class Tower(nn.Module):
    """``vision_tower`` and ``multi_modal_projector`` of a model that has them next to each other. They stay the model's
    own modules, so weights and adapters keep their names."""

    def __init__(self, model: Any) -> None:
        """
        Args:
            model: with ``get_image_features``, which calls both.
        """
        super().__init__()
        self.vision_tower, self.multi_modal_projector = model.vision_tower, model.multi_modal_projector
        self.config = model.vision_tower.config
        self._image_features = model.get_image_features

    def forward(self, pixels: Tensor) -> Any:
        """transformers' output, whose ``pooler_output`` are the features [tiles, tokens of a tile, H]."""
        return self._image_features(pixels)
