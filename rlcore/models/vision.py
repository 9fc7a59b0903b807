"""What a vision tower derives from the sizes of its images, worked out on the CPU.

transformers does it on the device that the sizes lie on and reads numbers back, which waits for all that the device is
still at work on: the pass before. Handed over ready-made, nothing waits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.vision_utils import (
    get_vision_attention_seqlens,
    get_vision_position_ids,
    get_vision_window_index,
)

from rlcore.batch import moved


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
