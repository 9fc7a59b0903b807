"""Turns a question into tokens: prompt template, chat template, image placeholders.

P prompt tokens. vLLM takes a prompt with one placeholder per image (``unexpanded``) and expands it itself; the trainer
needs the expanded prompt (``tokens``). Both are made here, so that they cannot differ.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import jinja2
import jinja2.meta
import jinja2.sandbox
import numpy as np
import numpy.typing as npt

from rlcore.config import DataConfig, ExperimentConfig, ModelConfig
from rlcore.data.pixels import IMAGE_MARKER, MARKERS, VIDEO_MARKER, frames_in, stable_target_size
from rlcore.errors import ConfigError, DataError, ModelError
from rlcore.families import PLACEHOLDERS, images_of, videos_of
from rlcore.process import make_transformers_lean
from rlcore.types import ImageRef, Ints, Message, Problem

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

    from rlcore.families.protocol import Grid, Resizing, Videos

_NO_IMAGES = "the model takes no images. Set model.path to a vision-language model."
_OPENED_THOUGHT = re.compile(r"<\s*think\s*>\s*\Z")
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


class TextProcessor:
    """The processor of a language model: a tokenizer, and no images."""

    image_processor = None

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.chat_template = tokenizer.chat_template

    def apply_chat_template(self, conversation: Sequence[Any], **options: Any) -> str:
        return str(self.tokenizer.apply_chat_template(conversation, **options))


def load_processor(model: ModelConfig) -> Any:
    """The model's processor (``image_processor``, ``tokenizer``); a ``TextProcessor`` for a language model.

    Raises:
        ModelError: no such folder or hub id, files that do not load, or no chat template.
    """
    if model.path == "tiny":
        from rlcore.data import tiny

        geometry = model.tiny.task == "geometry"
        return tiny.build_processor(model.tiny.family) if geometry else TextProcessor(tiny.build_text_tokenizer())
    make_transformers_lean()
    from transformers import AutoProcessor, AutoTokenizer, PreTrainedTokenizerBase

    folder = Path(model.path)
    local = folder.is_dir()
    if not local and (folder.is_absolute() or model.path[0] in ".~" or model.path.count("/") != 1):
        raise ModelError(
            f"model.path {model.path!r}: no such folder. Allowed: tiny, a Hugging Face id (owner/name), "
            "or a folder with config.json, tokenizer and safetensors."
        )
    # A language model's folder has no processor config. For a hub id AutoProcessor finds out.
    text_only = local and not any((folder / name).is_file() for name in _PROCESSOR_FILES)
    try:
        loaded = (AutoTokenizer if text_only else AutoProcessor).from_pretrained(
            str(folder) if local else model.path,
            revision=model.revision or "main",
            trust_remote_code=model.trust_remote_code,
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(
            f"model.path {model.path!r}: its tokenizer or processor does not load: {error}. "
            f"A model folder needs tokenizer.json and, for images, a processor config. {_listing(folder)}"
        ) from error
    processor = TextProcessor(loaded) if isinstance(loaded, PreTrainedTokenizerBase) else loaded
    if not (processor.chat_template or processor.tokenizer.chat_template):
        raise ModelError(
            f"model.path {model.path!r} has no chat template. {_listing(folder)}"
            "Add a chat_template.jinja, or set model.path to an instruction-tuned model."
        )
    return processor


def load_prompts(config: ExperimentConfig, model: Path) -> PromptBuilder:
    """The prompts of an experiment for the model in this folder.

    Raises:
        ConfigError, ModelError: as ``load_processor`` and ``PromptBuilder``.
    """
    processor = load_processor(config.model.model_copy(update={"path": str(model), "revision": None}))
    return PromptBuilder(processor, config.data)


class MessageBuilder:
    """The messages of a problem, as ``data`` configures them.

    Raises:
        ConfigError: the template does not exist, does not parse, or uses other variables than ``content``.
    """

    def __init__(self, data: DataConfig) -> None:
        self._template = _compile(data.template)
        self._of_source = {name: _compile(own.template) for name, own in data.sources("train").items()}
        self._system_prompt = data.system_prompt

    def messages(self, question: str, context: Sequence[Message] = (), source_name: str = "") -> list[Message]:
        """Context and question, with one marker per image. The template, which a source of a mixture may have of its
        own, wraps only the question."""
        template = self._of_source.get(source_name, self._template)
        messages = [*context, Message("user", template.render(content=question))]
        if self._system_prompt is not None and messages[0].role != "system":
            messages.insert(0, Message("system", self._system_prompt))
        return messages


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
        self._joins = {} if self._resizing is None else self._resizing.joins
        self._videos = videos_of(processor) if data.video_input == "native" else None
        self._expansions: dict[tuple[int, int, int, float], Ints] = {}
        self.image_token_id: int | None = None if images is None else processor.image_token_id
        """Id of the image placeholder; None if the model takes no images."""
        self.video_token_id = None if self._videos is None else self._videos.token_id(processor)
        """Id of the placeholder of a video; None: videos are images here."""
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

    def image_tokens(self, width: int, height: int) -> int:
        """Number of tokens of a resized image, with those around and between its features."""
        return self.tokens_of(ImageRef("", width, height))

    def tokens_of(self, ref: ImageRef) -> int:
        """``image_tokens`` of an image or a video."""
        return len(self._expansion(ref))

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
        if (placeholders := int(self._is_placeholder(tokens).sum())) != num_images:
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
        return self.expand(self.unexpanded(problem), problem.images)

    def texts(self, completions: Sequence[Ints]) -> list[str]:
        """The text of each completion, without special tokens."""
        if self.tokenizer.clean_up_tokenization_spaces:
            return list(self.tokenizer.batch_decode([c.tolist() for c in completions], skip_special_tokens=True))
        # The Rust tokenizer decodes many in one call and releases the GIL.
        decode = partial(self.tokenizer.backend_tokenizer.decode_batch, skip_special_tokens=True)
        parts = [[c.tolist() for c in completions[i : i + 64]] for i in range(0, len(completions), 64)]
        with ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0)))) as pool:
            return [text for part in pool.map(decode, parts) for text in part]

    def expand(self, tokens: Ints, images: Sequence[ImageRef]) -> Ints:
        """Replace the placeholder of each image and video with the tokens that the model's processor writes for it,
        joined with their neighbours as the tokenizer joins them.

        Raises:
            DataError: an image stands where the prompt has a video, or the reverse.
        """
        places = np.flatnonzero(self._is_placeholder(tokens))
        parts, start = [], 0
        for place, image in zip(places, images, strict=True):
            if tokens[place] != self._placeholder(image):
                raise DataError(f"image {image.sha256} stands at a placeholder of the other kind. Prepare it again.")
            parts += [tokens[start:place], self._expansion(image)]
            start = place + 1
        expanded: Ints = np.concatenate([*parts, tokens[start:]]).astype(np.int32)
        if parts and self._joins:
            expanded = np.asarray(joined(expanded.tolist(), self._joins), dtype=np.int32)
        return expanded

    def collapse(self, tokens: Sequence[int], images: Sequence[ImageRef]) -> list[int]:
        """The reverse of ``expand``: one placeholder per image, as vLLM takes prompts.

        Raises:
            DataError: the tokens of an image are not among those that follow the image before it.
        """
        collapsed: list[int] = []
        rest = np.asarray(tokens, dtype=np.int32)
        for image in images:
            left, rest = self._around(rest, self._expansion(image))
            collapsed += [*left.tolist(), self._placeholder(image)]
        return [*collapsed, *rest.tolist()]

    def _around(self, tokens: Ints, expansion: Ints) -> tuple[Ints, Ints]:
        """The tokens before and after those of the first image."""
        if not self._joins:
            first = _find(tokens, expansion)
            return tokens[:first], tokens[first + len(expansion) :]
        first = _find(tokens, expansion[1:-1])
        last = first + len(expansion) - 2
        start, end = int(expansion[0]), int(expansion[-1])
        before = {together: left for (left, right), together in self._joins.items() if right == start}
        after = {together: right for (left, right), together in self._joins.items() if left == end}
        left = [*tokens[: first - 1], *_left_of(int(tokens[first - 1]), start, before)]
        right = [*_left_of(int(tokens[last]), end, after), *tokens[last + 1 :]]
        return np.asarray(left, np.int32), np.asarray(right, np.int32)

    @property
    def _own_videos(self) -> Videos:
        if self._videos is None:
            raise ModelError('the dataset has videos in the model\'s own input. Set data.video_input to "native".')
        return self._videos

    def _placeholder(self, image: ImageRef) -> int:
        return cast(int, self.video_token_id if image.is_video else self.image_token_id)

    def _expansion(self, image: ImageRef) -> Ints:
        shape = (image.width, image.height, image.frames, image.seconds_per_frame)
        if shape not in self._expansions:
            if image.is_video:
                tokens = self._own_videos.expansion(self._processor, image)
            else:
                tokens = self.resizing.expansion(image.width, image.height)
            self._expansions[shape] = np.asarray(tokens, dtype=np.int32)
        return self._expansions[shape]

    def _is_placeholder(self, tokens: Ints) -> npt.NDArray[np.bool_]:
        return np.isin(tokens, [token for token in (self.image_token_id, self.video_token_id) if token is not None])


def opens_thought(prompt: str) -> bool:
    """Whether a prompt ends with an opening think tag. Blanks after the tag do not matter."""
    return _OPENED_THOUGHT.search(prompt) is not None


def _asked(problem: Problem) -> tuple[tuple[Message, ...], str, Mapping[str, object]]:
    return problem.context, problem.source_name, problem.chat_template_arguments


def joined(tokens: Sequence[int], joins: Mapping[tuple[int, int], int]) -> list[int]:
    """The tokens with each pair of ``joins`` replaced, one pair after the other over the whole sequence."""
    found = list(tokens)
    for pair, together in joins.items():
        merged: list[int] = []
        place = 0
        while place < len(found):
            matches = tuple(found[place : place + 2]) == pair
            merged.append(together if matches else found[place])
            place += 2 if matches else 1
        found = merged
    return found


def _left_of(token: int, own: int, others: Mapping[int, int]) -> list[int]:
    """What is left of a token without the ``own`` token of the image next to it.

    Args:
        others: by a token that joins two: the one that is not the image's.

    Raises:
        DataError: the token is neither the image's nor one that joins it with another.
    """
    if token != own and token not in others:
        raise DataError(f"token {token} is where an image has {own}. Prepare the dataset again with this model.")
    return [] if token == own else [others[token]]


def _find(tokens: Ints, part: Ints) -> int:
    """The first place of ``part`` in ``tokens``."""
    for first in np.flatnonzero(tokens == part[0]):
        if np.array_equal(tokens[first : first + len(part)], part):
            return int(first)
    raise DataError(
        f"the {len(part)} tokens of an image are not in the sequence, at most in another order. Prepare the dataset "
        "again with this model."
    )


def _compile(name_or_path: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined)
    text = template_text(name_or_path)
    try:
        variables = jinja2.meta.find_undeclared_variables(environment.parse(text))
        template = environment.from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"data.template {name_or_path!r} line {error.lineno}: {error.message}. Fix the template."
        ) from None
    if variables != {"content"}:
        raise ConfigError(
            f"data.template {name_or_path!r} uses {', '.join(sorted(variables)) or 'no variable'}. "
            "A template must use content, the problem's text, and no other variable."
        )
    return template


def _listing(folder: Path) -> str:
    if not folder.is_dir():
        return ""
    return f"Found: {', '.join(sorted(file.name for file in folder.iterdir())[:12]) or 'an empty folder'}. "


TEMPLATES = Path(__file__).parent / "templates"


def template_text(name_or_path: str) -> str:
    """Text of a prompt template: a name under ``templates``, or the path of a file.

    Raises:
        ConfigError: no such template; lists the known names.
    """
    known = {path.stem: path for path in sorted(TEMPLATES.glob("*.jinja"))}
    path = known.get(name_or_path, Path(name_or_path).expanduser())
    if not path.is_file():
        raise ConfigError(
            f"data.template {name_or_path!r} is neither a known template nor a file. "
            f"Allowed: {', '.join(known)}, or the path of a Jinja file that uses content."
        )
    return path.read_text(encoding="utf-8")
