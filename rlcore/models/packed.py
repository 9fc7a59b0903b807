"""One forward pass over packed sequences, for any Hugging Face causal model with or without a vision tower."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rlcore.algorithms.logprobs import chunked_logprobs, trained_positions
from rlcore.batch import Microbatch, VisionLayout
from rlcore.models.attention import use_packed_attention
from rlcore.models.lora import language_model, vision_tower

LOGIT_CHUNK = 2048  # trained tokens whose [chunk, vocabulary] logits are alive at once


class PackedModel(nn.Module):
    """Wraps a Hugging Face model as ``microbatch -> (log-probs, entropy, log kept)`` of its trained tokens.

    The log-probs are those of the distribution that is sampled: logits divided by ``temperature``, banned tokens
    left out. Of top-p and top-k only what they keep is told, ``log_kept``. The vision tower runs once per distinct
    image of the microbatch, and on a blank image when there is none, because with sharded weights every rank has to
    take part in every layer's collectives. A tower that does not train runs without a graph.
    """

    def __init__(
        self,
        hf: nn.Module,
        *,
        temperature: float,
        banned_token_ids: Sequence[int],
        top_p: float = 1.0,
        top_k: int = 0,
    ) -> None:
        super().__init__()
        self.hf = hf
        self.temperature, self.top_p, self.top_k = temperature, top_p, top_k
        use_packed_attention(hf)
        config = hf.config
        self.vision_layout = vision_layout(config)
        self.decoder = language_model(hf)
        tower = vision_tower(hf)
        self.tower_trains = tower is not None and any(p.requires_grad for p in tower.parameters())
        self.register_buffer("banned", torch.tensor(list(banned_token_ids), dtype=torch.int64), persistent=False)

    def forward(self, batch: Microbatch, raw: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs [N] float32, differentiable; entropy [N] and log_kept [N] float32, detached; in nats.

        Args:
            raw: the model's own distribution instead: temperature 1, nothing banned.
        """
        embeddings = self.hf.get_input_embeddings()(batch.token_ids)  # [T, H]
        if self.vision_layout is not None:
            embeddings = self._with_images(embeddings, batch, self.vision_layout)
        out = self.decoder(
            inputs_embeds=embeddings[None],
            position_ids=batch.position_ids[..., None, :],  # [3, 1, T] or [1, T]
            attention_mask=None,
            use_cache=False,
            cu_seq_lens_q=batch.cu_seqlens,
            max_length_q=batch.max_seqlen,
        )
        predict_from, token_index = trained_positions(batch.loss_mask, batch.cu_seqlens)
        hidden = out.last_hidden_state[0].index_select(0, predict_from)  # [N, H]
        return chunked_logprobs(
            hidden,
            self.hf.lm_head if raw else self._logits,
            batch.token_ids[token_index],
            temperature=1.0 if raw else self.temperature,
            chunk_size=LOGIT_CHUNK,
            top_p=1.0 if raw else self.top_p,
            top_k=0 if raw else self.top_k,
        )

    def _logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.hf.lm_head(hidden)
        return logits.index_fill(-1, self.banned, float("-inf")) if len(self.banned) else logits

    def _with_images(self, embeddings: Tensor, batch: Microbatch, layout: VisionLayout) -> Tensor:
        if batch.pixel_values is None:
            side = layout.merge_size
            pixels = embeddings.new_zeros(side * side, _patch_width(self.hf.config.vision_config))
            grid = torch.tensor([[1, side, side]], device=embeddings.device)
            return embeddings + 0.0 * self._features(pixels, grid).sum()
        features = self._features(batch.pixel_values.to(embeddings.dtype), batch.image_grid_thw)  # [R, H]
        where = (batch.token_ids == layout.image_token_id).nonzero()[:, 0]
        return embeddings.index_copy(0, where, features.index_select(0, batch.image_rows).to(embeddings.dtype))

    def _features(self, pixels: Tensor, grid: Tensor) -> Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.tower_trains):
            return self.hf.model.visual(pixels, grid_thw=grid).pooler_output


def vision_layout(config: object) -> VisionLayout | None:
    """Where the model of this configuration puts images; None for a text model."""
    vision = getattr(config, "vision_config", None)
    if vision is None:
        return None
    return VisionLayout(image_token_id=config.image_token_id, merge_size=vision.spatial_merge_size)  # type: ignore[attr-defined]


def transformer_blocks(hf: nn.Module) -> list[nn.Module]:
    """The units of sharding and of activation checkpointing: decoder layers and vision blocks."""
    tower = vision_tower(hf)
    return [*language_model(hf).layers, *(tower.blocks if tower is not None else [])]


def _patch_width(vision: object) -> int:
    channels = getattr(vision, "in_channels", None) or getattr(vision, "in_chans", 3)
    return int(channels * vision.temporal_patch_size * vision.patch_size**2)  # type: ignore[attr-defined]
