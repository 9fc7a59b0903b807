"""Qwen3.5, dense and with experts: most decoder layers have a recurrent state (gated delta net) in place of attention.

The tower and position ids are those of Qwen3-VL, without deepstack. The layers for multi-token prediction in the
published files are left out, as transformers does. Adapters reach attention and feed-forward layers only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlcore.families.protocol import RecurrentInputs
from rlcore.families.qwen2 import Qwen2
from rlcore.families.qwen2_vl import Qwen2VLImages
from rlcore.families.qwen3_moe import ATTENTION, Qwen3Moe, SoftmaxExperts
from rlcore.families.qwen3_vl import Qwen3VLImages
from rlcore.families.qwen3_vl_moe import TOWER

if TYPE_CHECKING:
    from torch import Tensor

_FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Qwen35Images(Qwen3VLImages):
    """Implements ``Images``."""

    def features(self, output: Any) -> Tensor:
        return output.pooler_output  # type: ignore[no-any-return]

    decoder_inputs = Qwen2VLImages.decoder_inputs
    shape = Qwen2VLImages.shape


@dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    """Implements ``Recurrence``."""

    def layers(self, decoder: Any) -> list[Any]:
        return [layer.linear_attn for layer in decoder.layers if hasattr(layer, "linear_attn")]

    def state_elements(self, layer: Any) -> int:
        return int(layer.num_v_heads * layer.head_k_dim * layer.head_v_dim)

    def inputs(self, layer: Any, hidden: Tensor) -> RecurrentInputs:
        return RecurrentInputs(
            mixed=layer.in_proj_qkv(hidden),
            gate=layer.in_proj_z(hidden),
            write=layer.in_proj_b(hidden),
            decay=layer.in_proj_a(hidden),
        )


TEXT = Qwen2(adapted=ATTENTION + _FEED_FORWARD, recurrence=GatedDeltaNet())
FAMILY = Qwen2(
    decoder_path="model.language_model",
    images=Qwen35Images(),
    adapted=ATTENTION + _FEED_FORWARD + TOWER,
    recurrence=GatedDeltaNet(),
)
MOE_TEXT = Qwen3Moe(adapted=ATTENTION, experts=SoftmaxExperts(), recurrence=GatedDeltaNet())
MOE = Qwen3Moe(
    decoder_path="model.language_model",
    images=FAMILY.images,
    adapted=ATTENTION + TOWER,
    experts=SoftmaxExperts(),
    recurrence=GatedDeltaNet(),
)
