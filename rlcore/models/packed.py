"""One forward pass over packed sequences, for every model family of ``rlcore.families``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlcore.algorithms.logprobs import linear_logprobs
from rlcore.algorithms.objective import PolicyTokens
from rlcore.batch import Microbatch
from rlcore.errors import ModelError
from rlcore.families import family_of
from rlcore.families.protocol import Images
from rlcore.flops import ModelShape
from rlcore.models.attention import use_packed_attention, use_tile_attention
from rlcore.models.lora import decoder_of, is_adapter, vision_tower
from rlcore.models.recurrence import use_packed_recurrence
from rlcore.models.replay import RouterReplay
from rlcore.models.sequence import SequenceGroup, gather_rows, gather_trained
from rlcore.models.vision import tower_arguments


class PackedModel(nn.Module):
    """Wraps a Hugging Face model as ``microbatch -> (log-probs, entropy, truncation_logprobs)`` of its trained tokens.

    The log-probs are those of the sampled distribution: logits, capped if the model has
    a cap, divided by ``temperature``, banned tokens left out.
    ``truncation_logprobs`` are the log of the mass that top-p and top-k keep. The vision tower runs once per distinct
    image of the microbatch. Without an image it runs on a blank one, because with sharded weights every rank takes part
    in every layer's collectives. It does not run if the images are embedded already. A frozen tower builds no graph.

    The ranks of a sequence group call it with their parts of one row, and each gets the values of the whole row.
    """

    def __init__(
        self,
        hf: Any,
        *,
        temperature: float,
        banned_token_ids: Sequence[int],
        top_p: float = 1.0,
        top_k: int = 0,
        sequence: SequenceGroup | None = None,
        images_embedded: bool = False,
        replays: bool = False,
    ) -> None:
        """
        Args:
            replays: use the experts that the samples' routes name.
        """
        super().__init__()
        self.hf = hf
        self.sequence, self.images_embedded = sequence, images_embedded
        self.temperature, self.top_p, self.top_k = temperature, top_p, top_k
        use_packed_attention(hf)
        family = family_of(hf.config)
        if family.recurrence is not None:
            use_packed_recurrence(family.recurrence, decoder_of(hf))
        self.replay = RouterReplay(hf) if replays else None
        if hf.lm_head.bias is not None:
            raise ModelError(f"{type(hf).__name__} has a bias in its LM head; allowed are models without one.")
        self.images = family.images
        self.image_layout = None if self.images is None else self.images.layout(hf.config)
        self.decoder, tower = decoder_of(hf), vision_tower(hf)
        if self.images is not None and tower is not None and self.images.takes_tiles:
            use_tile_attention(tower)
        self.tower_trains = tower is not None and any(p.requires_grad for p in tower.parameters())
        self.shape = model_shape(hf)
        self.logit_cap = family.caps(hf.config).logits
        self.banned: Tensor
        self.register_buffer("banned", torch.tensor(list(banned_token_ids), dtype=torch.int64), persistent=False)

    def forward(self, batch: Microbatch, raw: bool = False, with_entropy: bool = True) -> PolicyTokens:
        """In nats: log-probs [N] float32, differentiable; entropy [N] (0 without it) and truncation_logprobs [N],
        detached.

        Args:
            raw: the model's own distribution instead: temperature 1, nothing banned.
        """
        inputs = self._inputs(batch)
        if self.replay is not None:
            self.replay.begin(batch.routes)
        # the first block's input is like the others', no view and with a gradient: one compiled graph serves all blocks
        embeddings = inputs["inputs_embeds"].clone()
        inputs["inputs_embeds"] = embeddings.requires_grad_() if torch.is_grad_enabled() else embeddings
        out = self.decoder(
            **inputs,
            position_ids=batch.position_ids[..., None, :],  # [A, 1, T] or [1, T]
            attention_mask=None,
            use_cache=False,
            segments=batch.segments,
            sequence=self.sequence,
        )
        values: tuple[Tensor, ...] = linear_logprobs(
            out.last_hidden_state[0].index_select(0, batch.predict_from),  # [N, H]
            self.hf.lm_head.weight,
            batch.targets,
            temperature=1.0 if raw else self.temperature,
            cap=self.logit_cap,
            banned=None if raw else self.banned,
            top_p=1.0 if raw else self.top_p,
            top_k=0 if raw else self.top_k,
            with_entropy=with_entropy,
        )
        if self.replay is not None:
            values = (*values, self.replay.differing(batch.predict_from))
        if batch.share is not None and self.sequence is not None:
            values = gather_trained(values, batch.share, self.sequence)
        return PolicyTokens(*values)

    def _inputs(self, batch: Microbatch) -> dict[str, Any]:
        """Token embeddings, and the features of images."""
        embeddings = self.hf.get_input_embeddings()(batch.token_ids)  # [T, H]
        if self.images is None:
            return {"inputs_embeds": embeddings[None]}
        features = batch.image_features
        if not self.images_embedded:
            features = self._features(self.images, batch, embeddings)  # [R, F]
            if batch.share is not None and batch.share.most_features and self.sequence is not None:
                features = gather_rows(features, batch.share.most_features, self.sequence)
            elif batch.pixel_values is None:  # features of a blank image
                embeddings, features = embeddings + 0.0 * features.sum(), None
        if features is None:
            return {"inputs_embeds": embeddings[None]}
        return self.images.decoder_inputs(embeddings, features, batch.image_index, batch.image_rows)

    def _features(self, images: Images, batch: Microbatch, embeddings: Tensor) -> Tensor:
        """Features of the row's images, or of a blank one if it has none."""
        tower = images.tower(self.hf)
        if batch.pixel_values is None or batch.image_grid_thw is None:
            shape, grid = images.blank(tower.config)
            pixels, grids = embeddings.new_zeros(shape), torch.tensor([grid])
        else:
            pixels, grids = batch.pixel_values.to(embeddings.dtype), batch.image_grid_thw
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.tower_trains):
            return images.features(tower(pixels, **tower_arguments(images, tower.config, grids, pixels.device)))


def model_shape(hf: Any) -> ModelShape:
    """The sizes that determine the FLOPs of a pass. Only matrices count."""
    family, text = family_of(hf.config), hf.config.get_text_config()
    decoder, tower = decoder_of(hf), vision_tower(hf)
    recurrence = family.recurrence
    states = [] if recurrence is None else [recurrence.state_elements(layer) for layer in recurrence.layers(decoder)]
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return ModelShape(
        parameters=sum(family.active_elements(layer) for layer in decoder.layers),
        head_parameters=hf.lm_head.weight.numel(),
        layers=len(decoder.layers),
        width=text.num_attention_heads * head_size,
        weights_train=any(p.requires_grad and not is_adapter(name) for name, p in decoder.named_parameters()),
        tower=None if family.images is None or tower is None else family.images.shape(tower, tower.config),
        windows=tuple(mask.window for mask in family.masks(hf.config) if mask.window is not None),
        recurrent_layers=len(states),
        state_elements=sum(states),
    )
