"""A vision tower and its projector as one module. Unlike the other files of this package it needs torch, so methods
import it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn


class Tower(nn.Module):
    """The vision tower and the projector of a model that has them next to each other. They stay the model's own
    modules, so weights and adapters keep their names."""

    def __init__(self, parts: Mapping[str, Any], features: Callable[[Tensor], Tensor]) -> None:
        """
        Args:
            parts: by their names in the model; the vision tower, whose configuration is the tower's, first.
            features: calls them: pixels -> [tiles, tokens of a tile, H].
        """
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self.config = next(iter(parts.values())).config
        self._features = features

    def forward(self, pixels: Tensor) -> Tensor:
        return self._features(pixels)
