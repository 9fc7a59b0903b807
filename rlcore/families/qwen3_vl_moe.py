"""Qwen3-VL with experts (arXiv:2511.21631): the tower and inputs of Qwen3-VL, and the decoder layers of Qwen3-MoE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlcore.families.qwen3_moe import ATTENTION, Qwen3Moe, SoftmaxExperts
from rlcore.families.qwen3_vl import FAMILY as DENSE

if TYPE_CHECKING:
    from torch import Tensor

TOWER = ("qkv", "proj", "linear_fc1", "linear_fc2")  # no linear layer of the decoder has one of these names
_TRANSPOSED = (".experts.gate_up_proj", ".experts.down_proj")


@dataclass(frozen=True, slots=True)
class Qwen3VLMoe(Qwen3Moe):
    """Implements ``Family``."""

    def as_published(self, name: str, value: Tensor) -> Tensor:
        return value.transpose(1, 2) if name.endswith(_TRANSPOSED) else value  # [experts, in, out]


FAMILY = Qwen3VLMoe(
    decoder_path=DENSE.decoder_path, images=DENSE.images, adapted=ATTENTION + TOWER, experts=SoftmaxExperts()
)
