"""Completions of a merged model by transformers' own ``generate``, with the prompts and images of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from transformers import GenerationConfig

from rlcore.config import ModelConfig
from rlcore.data.pixels import IMAGE_MARKER, load_rgb, resized
from rlcore.data.processor import load_processor
from rlcore.data.prompts import PromptBuilder
from rlcore.data.rejects import Unusable
from rlcore.errors import DataError, ModelError
from rlcore.families import family_of
from rlcore.inference.stored import StoredModel
from rlcore.models.loading import load_hf_config, load_hf_model
from rlcore.types import ImageRef, Ints, Message


@dataclass(frozen=True, slots=True)
class Question:
    """A problem without its answer."""

    text: str  # with one "<image>" marker per image; without any marker the images come first
    images: tuple[bytes, ...] = ()  # files, those of the context first
    context: tuple[Message, ...] = ()
    source_name: str = ""  # in ``data.mixture``
    chat_template_arguments: Mapping[str, object] = field(default_factory=dict)  # the row's own


@dataclass(frozen=True, slots=True)
class Choice:
    """How tokens are chosen."""

    temperature: float = 0.0  # 0: the likeliest token each time
    top_p: float = 1.0
    max_tokens: int | None = None  # None: that of training
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Written:
    """A completion."""

    text: str  # without special tokens
    finish_reason: Literal["stop", "length"]
    num_tokens: int


class Generator:
    """A model and its prompts. One question at a time: nothing is padded, so the numbers are those of the question
    alone."""

    def __init__(self, stored: StoredModel, folder: Path, dtype: str = "auto") -> None:
        """
        Args:
            dtype: torch's name. auto: that of the folder's config.json.

        Raises:
            ModelError: the folder or the dtype cannot be used.
        """
        trusted = stored.trust_remote_code
        self._stored = stored
        processor = load_processor(ModelConfig(path=str(folder), trust_remote_code=trusted))
        self._prompts = PromptBuilder(processor, stored.data)
        wanted, on_gpu = _dtype(folder, dtype, trusted), torch.cuda.is_available()
        model: Any = load_hf_model(folder, wanted, trusted, spread_over_gpus=on_gpu)
        self._model = model
        own = model.generation_config.eos_token_id
        tokens = own if isinstance(own, list) else [own]
        self._ends = sorted({token for token in (*tokens, self._prompts.tokenizer.eos_token_id) if token is not None})

    def complete(self, question: Question, choice: Choice) -> Written:
        """
        Raises:
            DataError: the images do not fit the question or the model, or the prompt is longer than in training.
        """
        opened = [self._fitting(data) for data in question.images]
        text = question.text
        if opened and not any(IMAGE_MARKER in part for part in (text, *(m.text for m in question.context))):
            text = IMAGE_MARKER * len(opened) + text
        bare = self._prompts.unexpanded_tokens(
            text, len(opened), question.context, question.source_name, question.chat_template_arguments
        )
        tokens = self._prompts.placeholders.expand(bare, [ImageRef("", *image.size) for image in opened])
        most = self._stored.data.max_prompt_tokens
        if len(tokens) > most:
            raise DataError(
                f"the prompt of {text[:80]!r} has {len(tokens)} tokens, and training used at most {most} "
                "(data.max_prompt_tokens). Shorten the question, or give smaller images."
            )
        written = self._generate(tokens, opened, choice)
        return Written(
            text=self._prompts.texts([written])[0],
            finish_reason="stop" if len(written) and int(written[-1]) in self._ends else "length",
            num_tokens=len(written),
        )

    def _fitting(self, data: bytes) -> Image.Image:
        try:
            image = load_rgb(data)
            return resized(image, self._prompts.target_size(*image.size))
        except Unusable as unusable:
            raise DataError(f"an image cannot be used: {unusable.detail}. Give another file.") from None

    @torch.no_grad()
    def _generate(self, tokens: Ints, images: Sequence[Image.Image], choice: Choice) -> Ints:
        device = self._model.get_input_embeddings().weight.device
        prompt = torch.tensor(tokens.astype(np.int64))
        inputs = {"input_ids": prompt[None], "attention_mask": torch.ones_like(prompt[None])}
        if images:
            inputs |= self._pictures(prompt, images)
        # in place of the folder's own, whose defaults (a repetition penalty, say) neither training nor evaluation uses
        self._model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=choice.temperature > 0,
            temperature=choice.temperature or None,
            top_p=choice.top_p if choice.temperature > 0 else None,
            top_k=0 if choice.temperature > 0 else None,
            max_new_tokens=self._stored.max_completion_tokens if choice.max_tokens is None else choice.max_tokens,
            eos_token_id=self._ends,
            pad_token_id=self._ends[0],
            suppress_tokens=list(self._prompts.banned_token_ids) or None,
        )
        torch.manual_seed(choice.seed)
        output = self._model.generate(**{name: value.to(device) for name, value in inputs.items()})
        written: Ints = output[0, len(prompt) :].cpu().numpy().astype(np.int32)
        return written

    def _pictures(self, prompt: torch.Tensor, images: Sequence[Image.Image]) -> dict[str, Any]:
        family = family_of(self._model.config).images
        assert family is not None  # PromptBuilder refuses images of a text model
        read = [self._prompts.read(image) for image in images]
        pixels, grids = torch.cat([pixels for pixels, _ in read]), torch.tensor([grid for _, grid in read])
        named = family.plain_arguments(family.layout(self._model.config), prompt, pixels, grids)
        return {name: v.to(self._model.dtype) if v.is_floating_point() else v for name, v in named.items()}


def _dtype(folder: Path, name: str, trust_remote_code: bool) -> torch.dtype:
    """
    Raises:
        ModelError: torch has no such dtype.
    """
    wanted = getattr(load_hf_config(folder, trust_remote_code), "dtype", None) if name == "auto" else name
    dtype = getattr(torch, wanted, None) if isinstance(wanted, str) else wanted or torch.float32
    if not isinstance(dtype, torch.dtype):
        raise ModelError(f"dtype is {name!r}. Allowed: auto, float32, bfloat16, float16.")
    return dtype
