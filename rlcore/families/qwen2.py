"""Text families whose differences from Qwen2 are inside transformers' modules.

They have embeddings, a stack of ``layers`` with causal attention, and an LM head without bias or scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlcore.errors import ModelError
from rlcore.families.protocol import Caps, Experts, Images, LayerMask, Recurrence

if TYPE_CHECKING:
    from torch import Tensor, nn

SCORE_CAP, LOGIT_CAP = "attn_logit_softcapping", "final_logit_softcapping"

# Fields that change logits or attention scores, and their values that change nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    LOGIT_CAP: (None,),  # Gemma 2
    SCORE_CAP: (None,),
    "logits_soft_cap": (None,),  # RecurrentGemma
    "logit_scale": (None, 1.0),  # Cohere
    "logits_scaling": (None, 1.0),  # Granite
    "lm_head_multiplier": (None, 1.0),  # Falcon-H1
    "use_bidirectional_attention": (None, False),  # EmbeddingGemma
}


@dataclass(frozen=True, slots=True)
class Qwen2:
    """Implements ``Family``."""

    decoder_path: str = "model"
    images: Images | None = None
    adapted: tuple[str, ...] | None = None
    experts: Experts | None = None
    recurrence: Recurrence | None = None
    computed: tuple[str, ...] = ()  # caps that the trainer, transformers and vLLM compute

    def decoder(self, hf: Any) -> Any:
        return hf.get_submodule(self.decoder_path)

    def require_plain(self, config: Any) -> None:
        text = config.get_text_config()
        for field, neutral in _NEUTRAL.items():
            value = getattr(text, field, getattr(config, field, None))
            if value not in neutral and field not in self.computed:
                raise ModelError(
                    f"{config.model_type} sets {field} to {value}, which the packed attention and the LM head do not "
                    f"compute: training would use a different model. Allowed is {' or '.join(map(str, neutral))}, or "
                    "a model without that field."
                )

    def masks(self, config: Any) -> list[LayerMask]:
        text = config.get_text_config()
        window = getattr(text, "sliding_window", None)
        usual = "full_attention" if window is None else "sliding_attention"
        kinds = getattr(text, "layer_types", None) or [usual] * text.num_hidden_layers
        return [LayerMask(kind, window if kind == "sliding_attention" else None) for kind in kinds]

    def caps(self, config: Any) -> Caps:
        text = config.get_text_config()
        return Caps(scores=getattr(text, SCORE_CAP, None), logits=getattr(text, LOGIT_CAP, None))

    def feed_forward_widths(self, config: Any) -> list[int]:
        return [config.get_text_config().intermediate_size]

    def active_elements(self, layer: nn.Module) -> int:
        return matrix_elements(layer)

    def published_name(self, name: str) -> str:
        return name

    def as_published(self, name: str, value: Tensor) -> Tensor:
        return value


def matrix_elements(part: nn.Module) -> int:
    """Elements of all matrices. A token is multiplied with each once."""
    return sum(p.numel() for p in part.parameters() if p.dim() == 2)


FAMILY = Qwen2()
GEMMA2 = Qwen2(computed=(SCORE_CAP, LOGIT_CAP))
GEMMA3 = Qwen2(computed=(LOGIT_CAP,))  # transformers and vLLM ignore a cap of scores
