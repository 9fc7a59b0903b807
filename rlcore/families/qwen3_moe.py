"""Families whose layers have experts: a router sends each token to a few of them. This one reads text.

Adapters reach attention only, because transformers keeps the weights of all experts of a layer in one tensor, which is
no linear layer. The auxiliary loss that balances the load of the experts is not computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlcore.families.qwen2 import Qwen2, matrix_elements

if TYPE_CHECKING:
    from torch import Tensor, nn

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True, slots=True)
class Qwen3Moe(Qwen2):
    """Implements ``Family``."""

    def feed_forward_widths(self, config: Any) -> list[int]:
        text = config.get_text_config()
        shared = getattr(text, "shared_expert_intermediate_size", 0)  # of an expert that every token uses
        return [text.moe_intermediate_size] * text.num_experts_per_tok + ([shared] if shared else [])

    def active_elements(self, layer: nn.Module) -> int:
        feed_forward: Any = layer.mlp
        if not hasattr(feed_forward, "experts"):  # a layer of ``mlp_only_layers``
            return matrix_elements(layer)
        router = feed_forward.gate
        stacked: int = sum(p.numel() for p in feed_forward.experts.parameters())  # [experts, out, in]
        return matrix_elements(layer) + stacked * int(router.top_k) // int(router.num_experts)


@dataclass(frozen=True, slots=True)
class SoftmaxExperts:
    """Implements ``Experts``: the k largest values of a softmax over all experts."""

    def routers(self, decoder: Any) -> list[Any]:
        return [layer.mlp.gate for layer in decoder.layers if hasattr(layer.mlp, "experts")]

    def weights(self, router: Any, logits: Tensor, experts: Tensor) -> Tensor:
        weights = logits.float().softmax(-1).gather(1, experts)
        if getattr(router, "norm_topk_prob", True):  # Qwen3-VL always does it
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(logits.dtype)


FAMILY = Qwen3Moe(adapted=ATTENTION, experts=SoftmaxExperts())
