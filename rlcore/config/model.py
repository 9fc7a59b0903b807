"""The policy, and what of it trains."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from rlcore.config.base import Frozen


class TinyModelConfig(Frozen):
    """The embedded default policy: a few million parameters, warm-started on synthetic problems."""

    seed: int = 0
    """Of the first weights and of the warm start."""
    task: Literal["geometry", "sums", "countdown"] = "geometry"
    """What the warm start teaches. geometry: a vision-language model that begins to read drawn pictures; sums,
    countdown: a text model that begins to add numbers ("#### 42") or to find expressions."""
    warm_start_steps: int = Field(600, ge=0)
    """Supervised steps at most; the warm start ends by itself once the format is certain and the reading begins. 0
    leaves the weights random."""


class LoraConfig(Frozen):
    """Adapters on every linear layer of the language model: W x + (alpha / rank) B A x. LoRA, arXiv:2106.09685."""

    rank: int = Field(64, ge=1, le=512)
    """At most what vLLM serves."""
    alpha: float = Field(64.0, gt=0)
    """Scale of the adapters, divided by rank."""
    vision_tower: bool = False
    """Adapters in the vision tower as well."""


class ModelConfig(Frozen):
    path: str = "tiny"
    """``tiny``, a Hugging Face id, or a folder with config.json and safetensors."""
    revision: str | None = None
    """Commit, branch or tag of a Hugging Face id. null: its main branch."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    tiny: TinyModelConfig = TinyModelConfig()
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of forward and backward. auto: bfloat16 on CUDA, float32 on CPU. Master weights are float32 unless
    training.optimizer is adamw_bf16."""
    gradient_checkpointing: Literal["none", "selective", "full"] = "full"
    """What the backward pass computes again instead of keeping. full: every block from its input, for a third more
    work; selective: all but the outputs of matrix products and attention, for little more work; none: nothing, or, in
    compiled blocks, what the compiler finds cheaper to compute than to keep. The gradient stays the same."""
    freeze_vision_tower: bool = False
    """The vision tower is not trained."""
    lora: LoraConfig | None = None
    """Train low-rank adapters and leave the weights as they are; the reference policy is then the same model with its
    adapters off. null trains all weights."""

    @field_validator("path")
    @classmethod
    def _without_tilde(cls, path: str) -> str:
        """Expanded where the experiment is read, so that every process and every key means the same folder."""
        return str(Path(path).expanduser()) if path.startswith("~") else path

    @model_validator(mode="after")
    def _frozen_and_adapted_exclude_each_other(self) -> Self:
        if self.freeze_vision_tower and self.lora is not None and self.lora.vision_tower:
            raise ValueError(
                "model.freeze_vision_tower is true and model.lora.vision_tower puts adapters into it. Set one to false."
            )
        return self
