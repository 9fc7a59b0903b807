"""Turns a problem into prompt tokens, and images into what the model takes.

P prompt tokens. vLLM takes a prompt with one placeholder per image (``unexpanded``), the trainer takes the expanded
prompt (``tokens``). Both are made here, so that they cannot differ.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlcore.config import DataConfig, ExperimentConfig
from rlcore.data.messages import MessageBuilder
from rlcore.data.pixels import IMAGE_MARKER, MARKERS, VIDEO_MARKER, frames_in, stable_target_size
from rlcore.data.placeholders import Placeholders
from rlcore.data.processor import load_processor
from rlcore.errors import ConfigError, DataError, ModelError
from rlcore.families import PLACEHOLDERS, images_of, videos_of
from rlcore.types import ImageRef, Ints, Message, Problem

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

    from rlcore.families.protocol import Grid, Resizing, Videos

_NO_IMAGES = "the model takes no images. Set model.path to a vision-language model."
_OPENED_THOUGHT = re.compile(r"<\s*think\s*>\s*\Z")


def load_prompts(config: ExperimentConfig, model: Path) -> PromptBuilder:
    """The prompts of an experiment for the model in this folder.

    Raises:
        ConfigError, ModelError: as ``load_processor`` and ``PromptBuilder``.
    """
    processor = load_processor(config.model.model_copy(update={"path": str(model), "revision": None}))
    return PromptBuilder(processor, config.data)


class PromptBuilder:
    """Prompts of one model, as ``data`` configures them.

    Args:
        processor: from ``load_processor``.

    Raises:
        ConfigError: the template does not exist, does not parse, or uses other variables than ``content``; or the chat
            template does not mention an argument.
        ModelError: the image processor is of no supported family; or its family has no input of its own for videos,
            and ``data.video_input`` asks for it.
    """

    def __init__(self, processor: Any, data: DataConfig) -> None:
        self.tokenizer = processor.tokenizer
        self._arguments = data.chat_template_arguments
        self._chat_template = str(processor.chat_template or processor.tokenizer.chat_template)
        if unknown := self.unmentioned(self._arguments):
            raise ConfigError(
                f"data.chat_template_arguments sets {', '.join(unknown)}, which the model's chat template does not "
                "mention. Remove it, or choose a model whose template uses it."
            )
        self._processor = processor
        self._messages = MessageBuilder(data)
        self._bounds = (data.min_pixels, data.max_pixels)
        self._images = images = None if processor.image_processor is None else images_of(processor.image_processor)
        self._resizing = None if images is None else images.resizing(processor)
        self._videos = videos_of(processor) if data.video_input == "native" else None
        self.placeholders = Placeholders(
            None if images is None else processor.image_token_id,
            None if self._videos is None else self._videos.token_id(processor),
            self._expansion,
            {} if self._resizing is None else self._resizing.joins,
        )
        self._special = {str(t): i for i, t in self.tokenizer.added_tokens_decoder.items() if t.special}

    @property
    def banned_token_ids(self) -> tuple[int, ...]:
        """Vision tokens, ascending. A completion with one of them would refer to an image that does not exist."""
        known = self.tokenizer.get_added_vocab()
        return tuple(sorted(known[text] for text in PLACEHOLDERS if text in known))

    @property
    def resizing(self) -> Resizing:
        """How the model's image processor resizes.

        Raises:
            ModelError: the model takes no images.
        """
        if self._resizing is None:
            raise ModelError(_NO_IMAGES)
        return self._resizing

    def target_size(self, width: int, height: int) -> tuple[int, int]:
        """Width and height of an image of this size after resizing.

        Raises:
            Unusable: the grid has no stable size within the bounds.
        """
        return stable_target_size(width, height, self.resizing, *self._bounds)

    def read(self, image: Image.Image, ref: ImageRef | None = None) -> tuple[Tensor, Grid]:
        """Pixels and grid of a resized image, or of the frames of a video, as the vision tower takes them.

        Args:
            ref: of the image. None: it is no video.

        Raises:
            ModelError: the model takes no images, or this dataset's videos are not the model's own input.
        """
        if self._images is None:
            raise ModelError(_NO_IMAGES)
        if ref is not None and ref.is_video:
            return self._own_videos.read(self._processor.image_processor, frames_in(image, ref))
        pixels, (grid,) = self._images.read(self._processor.image_processor, [image], *self._bounds)
        return pixels, grid

    @property
    def engine_options(self) -> dict[str, Any]:
        """vLLM's ``mm_processor_kwargs``.

        Raises:
            ModelError: the model takes no images.
        """
        if self._images is None:
            raise ModelError(_NO_IMAGES)
        options = self._images.engine_options(self._processor.image_processor, *self._bounds)
        return options if self._videos is None else self._videos.engine_options(options)

    def special_tokens_in(self, text: str) -> list[str]:
        """Special tokens that a text spells out. The tokenizer would treat them as real ones. Markers of images and
        videos, which are tokens of some models, never reach it."""
        return [token for token in self._special if token in text and token not in (IMAGE_MARKER, VIDEO_MARKER)]

    def unmentioned(self, arguments: Mapping[str, object]) -> list[str]:
        """The names that the model's chat template does not mention."""
        return [name for name in arguments if not re.search(rf"\b{re.escape(name)}\b", self._chat_template)]

    def chat_text(
        self,
        question: str,
        num_images: int,
        context: Sequence[Message] = (),
        source_name: str = "",
        arguments: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt as text, up to the start of the answer, with one placeholder per image or video.

        Args:
            num_images: images and videos.
            context: messages before the question. The prompt template wraps only the question.
            source_name: of the problem, in ``data.mixture``.
            arguments: the row's own variables of the chat template, before ``data.chat_template_arguments``.

        Raises:
            DataError: context and rendered question do not have ``num_images`` markers together.
        """
        messages = self._messages.messages(question, context, source_name)
        markers = sum(len(MARKERS.findall(message.text)) for message in messages)
        if markers != num_images:
            raise DataError(
                f"{markers} {IMAGE_MARKER} marker(s) for {num_images} image(s) in {question[:80]!r}. Write one marker "
                f"per image into the problem, or {VIDEO_MARKER} per video, and none into the template or "
                "data.system_prompt."
            )
        text = self._processor.apply_chat_template(
            [{"role": message.role, "content": self._content(message.text)} for message in messages],
            tokenize=False,
            add_generation_prompt=True,
            **{**self._arguments, **(arguments or {})},
        )
        return str(text)

    def _content(self, text: str) -> str | list[dict[str, str]]:
        if self._resizing is None:  # chat templates of language models take plain text
            return text
        return [
            {"type": piece.strip("<>")} if piece in (IMAGE_MARKER, VIDEO_MARKER) else {"type": "text", "text": piece}
            for piece in MARKERS.split(text)
            if piece
        ]

    def unexpanded_tokens(
        self,
        question: str,
        num_images: int,
        context: Sequence[Message] = (),
        source_name: str = "",
        arguments: Mapping[str, object] | None = None,
    ) -> Ints:
        """``chat_text`` as token ids, as vLLM takes them.

        Raises:
            DataError: as ``chat_text``, or the question spells out the model's image placeholder.
        """
        text = self.chat_text(question, num_images, context, source_name, arguments)
        # verbose=False: a prompt above the model's length is rejected later and needs no warning
        ids = self.tokenizer.encode(text, add_special_tokens=False, verbose=False)
        tokens = np.asarray(ids, dtype=np.int32)
        if (placeholders := self.placeholders.count(tokens)) != num_images:
            raise DataError(
                f"{placeholders} image placeholder(s) for {num_images} image(s) in {question[:80]!r}. "
                "Remove the model's special tokens from the problem."
            )
        return tokens

    def unexpanded(self, problem: Problem) -> Ints:
        """The prompt of a problem, as vLLM takes it."""
        return self.unexpanded_tokens(problem.question, len(problem.images), *_asked(problem))

    def text(self, problem: Problem) -> str:
        """``chat_text`` of a problem."""
        return self.chat_text(problem.question, len(problem.images), *_asked(problem))

    def tokens(self, problem: Problem) -> Ints:
        """[P] token ids with every image expanded, as the model sees them."""
        return self.placeholders.expand(self.unexpanded(problem), problem.images)

    def texts(self, completions: Sequence[Ints]) -> list[str]:
        """The text of each completion, without special tokens."""
        if self.tokenizer.clean_up_tokenization_spaces:
            return list(self.tokenizer.batch_decode([c.tolist() for c in completions], skip_special_tokens=True))
        # The Rust tokenizer decodes many in one call and releases the GIL.
        decode = partial(self.tokenizer.backend_tokenizer.decode_batch, skip_special_tokens=True)
        parts = [[c.tolist() for c in completions[i : i + 64]] for i in range(0, len(completions), 64)]
        with ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0)))) as pool:
            return [text for part in pool.map(decode, parts) for text in part]

    @property
    def _own_videos(self) -> Videos:
        if self._videos is None:
            raise ModelError('the dataset has videos in the model\'s own input. Set data.video_input to "native".')
        return self._videos

    def _expansion(self, image: ImageRef) -> Sequence[int]:
        if image.is_video:
            return self._own_videos.expansion(self._processor, image)
        return self.resizing.expansion(image.width, image.height)


def opens_thought(prompt: str) -> bool:
    """Whether a prompt ends with an opening think tag. Blanks after the tag do not matter."""
    return _OPENED_THOUGHT.search(prompt) is not None


def _asked(problem: Problem) -> tuple[tuple[Message, ...], str, Mapping[str, object]]:
    return problem.context, problem.source_name, problem.chat_template_arguments
