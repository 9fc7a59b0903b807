"""One forward pass over packed sequences, for any Hugging Face causal model with or without a vision tower."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlcore.algorithms.logprobs import linear_logprobs
from rlcore.batch import Microbatch, VisionLayout, moved
from rlcore.errors import ModelError
from rlcore.flops import ModelShape, TowerShape
from rlcore.models.attention import use_packed_attention
from rlcore.models.lora import is_adapter, language_model, vision_tower
from rlcore.models.sequence import SequenceGroup, gathered, of_all_trained
from rlcore.models.vision import tower_inputs


class PackedModel(nn.Module):
    """Wraps a Hugging Face model as ``microbatch -> (log-probs, entropy, log kept)`` of its trained tokens.

    The log-probs are those of the distribution that is sampled: logits divided by ``temperature``, banned tokens
    left out. Of top-p and top-k only what they keep is told, ``log_kept``. The vision tower runs once per distinct
    image of the microbatch, and on a blank image when there is none, because with sharded weights every rank has to
    take part in every layer's collectives; not at all if the images come embedded. A tower that does not train runs
    without a graph.

    With a sequence group its ranks call it with their shares of one row, and each gets the values of the whole.
    """

    def __init__(
        self,
        hf: nn.Module,
        *,
        temperature: float,
        banned_token_ids: Sequence[int],
        top_p: float = 1.0,
        top_k: int = 0,
        sequence: SequenceGroup | None = None,
        images_embedded: bool = False,
    ) -> None:
        super().__init__()
        self.hf = hf
        self.sequence, self.images_embedded = sequence, images_embedded
        self.temperature, self.top_p, self.top_k = temperature, top_p, top_k
        use_packed_attention(hf)
        if hf.lm_head.bias is not None:
            raise ModelError(f"{type(hf).__name__} has a bias in its LM head; allowed are models without one.")
        self.vision_layout = vision_layout(hf.config)
        self.decoder = language_model(hf)
        tower = vision_tower(hf)
        self.tower_trains = tower is not None and any(p.requires_grad for p in tower.parameters())
        self.shape = model_shape(hf)
        self.register_buffer("banned", torch.tensor(list(banned_token_ids), dtype=torch.int64), persistent=False)

    def forward(self, batch: Microbatch, raw: bool = False, with_entropy: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs [N] float32, differentiable; entropy [N] (0 without it) and log_kept [N], detached; in nats.

        Args:
            raw: the model's own distribution instead: temperature 1, nothing banned.
        """
        embeddings = self.hf.get_input_embeddings()(batch.token_ids)  # [T, H]
        if self.vision_layout is not None and not self.images_embedded:
            embeddings = self._with_images(embeddings, batch, self.vision_layout)
        elif batch.image_features is not None:
            embeddings = _placed(embeddings, batch.image_features, batch)
        out = self.decoder(
            inputs_embeds=embeddings[None],
            position_ids=batch.position_ids[..., None, :],  # [3, 1, T] or [1, T]
            attention_mask=None,
            use_cache=False,
            segments=batch.segments,
            sequence=self.sequence,
        )
        found = linear_logprobs(
            out.last_hidden_state[0].index_select(0, batch.predict_from),  # [N, H]
            self.hf.lm_head.weight,
            batch.targets,
            temperature=1.0 if raw else self.temperature,
            banned=None if raw else self.banned,
            top_p=1.0 if raw else self.top_p,
            top_k=0 if raw else self.top_k,
            with_entropy=with_entropy,
        )
        if batch.share is None or self.sequence is None:
            return found
        logprobs, entropy, kept = of_all_trained(found, batch.share, self.sequence)
        return logprobs, entropy, kept

    def _with_images(self, embeddings: Tensor, batch: Microbatch, layout: VisionLayout) -> Tensor:
        if batch.pixel_values is not None:
            features = self._features(batch.pixel_values.to(embeddings.dtype), batch.image_grid_thw)  # [R, H]
        else:
            side = layout.merge_size
            pixels = embeddings.new_zeros(side * side, _patch_width(self.hf.config.vision_config))
            features = self._features(pixels, torch.tensor([[1, side, side]]))
        if batch.share is not None and batch.share.most_features and self.sequence is not None:
            features = gathered(features, batch.share.most_features, self.sequence)
        elif batch.pixel_values is None:
            return embeddings + 0.0 * features.sum()
        return _placed(embeddings, features, batch)

    def _features(self, pixels: Tensor, grid: Tensor) -> Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.tower_trains):
            inputs = tower_inputs(self.hf.config.vision_config, grid, pixels.device)
            return self.hf.model.visual(pixels, grid_thw=moved(grid, pixels.device), **inputs).pooler_output


def _placed(embeddings: Tensor, features: Tensor, batch: Microbatch) -> Tensor:
    rows = features.index_select(0, batch.image_rows).to(embeddings.dtype)  # [M, H]
    return embeddings.index_copy(0, batch.image_index, rows)


def vision_layout(config: object) -> VisionLayout | None:
    """Where the model of this configuration puts images; None for a text model."""
    vision = getattr(config, "vision_config", None)
    if vision is None:
        return None
    return VisionLayout(image_token_id=config.image_token_id, merge_size=vision.spatial_merge_size)  # type: ignore[attr-defined]


def model_shape(hf: nn.Module) -> ModelShape:
    """What there is to compute. Only matrices count: a token meets each of their elements once."""
    decoder, text, tower = language_model(hf), hf.config.get_text_config(), vision_tower(hf)
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return ModelShape(
        parameters=_matrix_elements(decoder.layers),
        head_parameters=hf.lm_head.weight.numel(),
        layers=len(decoder.layers),
        width=text.num_attention_heads * head_size,
        weights_train=any(p.requires_grad and not is_adapter(name) for name, p in decoder.named_parameters()),
        tower=None if tower is None else _tower_shape(tower, hf.config.vision_config),
    )


def tower_width(vision: Any) -> int:
    """Of the tower's layers. Qwen2-VL calls it ``embed_dim``, and the decoder's width ``hidden_size``."""
    return int(getattr(vision, "embed_dim", None) or vision.hidden_size)


def _tower_shape(tower: nn.Module, vision: Any) -> TowerShape:
    width = tower_width(vision)
    full = len(getattr(vision, "fullatt_block_indexes", range(vision.depth)))  # without windows all are
    return TowerShape(
        parameters=_matrix_elements(tower.blocks) + _patch_width(vision) * width,
        merger_parameters=_matrix_elements(tower.merger),
        merged=vision.spatial_merge_size**2,
        patch_size=vision.patch_size,
        width=width,
        full_layers=full,
        window_layers=vision.depth - full,
        window=(getattr(vision, "window_size", 0) // vision.patch_size) ** 2,
        trains=any(p.requires_grad for p in tower.parameters()),
    )


def _matrix_elements(part: nn.Module) -> int:
    return sum(p.numel() for p in part.parameters() if p.dim() == 2)


def transformer_blocks(hf: nn.Module) -> list[nn.Module]:
    """The units of sharding, compilation and activation checkpointing in the order they run: vision blocks, decoder
    layers."""
    tower = vision_tower(hf)
    return [*(tower.blocks if tower is not None else []), *language_model(hf).layers]


def _patch_width(vision: Any) -> int:
    channels = getattr(vision, "in_channels", None) or getattr(vision, "in_chans", 3)
    return int(channels * vision.temporal_patch_size * vision.patch_size**2)
