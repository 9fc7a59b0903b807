"""Problems: their source, prompts and order."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from rlcore.config.base import Frozen
from rlcore.config.reward import MathReward, RewardConfig

# Parameters of apply_chat_template, and variables that every template gets.
NOT_TEMPLATE_VARIABLES = {
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "max_length",
    "messages", "padding", "processor_kwargs", "return_assistant_tokens_mask", "return_dict", "return_tensors",
    "tokenize", "tokenizer_kwargs", "tools", "truncation",
}  # fmt: skip


class CountdownConfig(Frozen):
    """The game ``countdown@SPLIT``: reach the target with the numbers, each used once, by + - * /."""

    numbers: tuple[int, int] = (3, 4)
    """Fewest and most numbers of a game."""
    max_number: int = Field(99, ge=1)
    """Largest number of a game."""
    max_target: int = Field(99, ge=1)
    """Largest target of a game."""
    operations: tuple[Literal["+", "-", "*", "/"], ...] = ("+", "*", "-", "/")
    """Operations that games are generated with. An answer may use all four."""

    @model_validator(mode="after")
    def _check_operations(self) -> Self:
        if not {"+", "*"} & set(self.operations):
            raise ValueError(
                f"data.countdown.operations is {list(self.operations)}: for some numbers, such as 3 and 3 or 3 and 2, "
                "these give no whole number above 0. Add + or *."
            )
        return self


class CurriculumConfig(Frozen):
    """Skips problems for some epochs if the policy solves them almost always or almost never."""

    hardest: float = Field(0.0, ge=0, lt=1)
    """Problems with a pass rate at or below it are skipped."""
    easiest: float = Field(1.0, gt=0, le=1)
    """Problems with a pass rate at or above it are skipped."""
    rest_epochs: int = Field(2, ge=1)
    """Epochs for which such a problem is skipped. After these it is trained on, and so measured, again."""

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.hardest >= self.easiest:
            raise ValueError(
                f"data.curriculum.hardest ({self.hardest}) is not below data.curriculum.easiest ({self.easiest}): "
                "every problem would be skipped. Lower the first or raise the second."
            )
        return self


class LayoutConfig(Frozen):
    """How a published benchmark spreads a problem over columns. Images that the text does not mention come first."""

    problem: str | None = None
    """Jinja text that makes the problem from the row's columns: ``{{ question }} (Unit: {{ unit }})``. null: the text
    of ``problem_column``."""
    system_prompt: str | None = None
    """Jinja text that makes the system message from the row's columns, in place of ``data.system_prompt``. A row whose
    problem has a system message keeps that. null: none."""
    id_column: str | None = None
    """Column of the problem's name. null: problem_id or id."""
    image_columns: tuple[str, ...] = ()
    """Columns with one image each, in place of ``images_column``. ``<image 2>`` in a text stands for the second."""
    choices_column: str | None = None
    """Column of the choices: a list, or the text of a list. They are added to the problem with the letters A, B, ...,
    and graders find them as ``choices``."""
    choice_given_as: Literal["letter", "text"] = "letter"
    """What ``answer_column`` holds for a problem with choices: the letter, or the text of the right choice."""


class SourceConfig(Frozen):
    """One source of a mixture. What it leaves null is as for a single source."""

    source: str
    """As ``data.train``."""
    weight: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Of the sampled problems, weight / the sum of all weights are from this source."""
    validation: str | None = None
    """As ``data.validation``: problems of the same kind. If any source names some, these are the run's validation
    problems, in place of ``data.validation``."""
    template: str | None = None
    """In place of ``data.template``."""
    problem_column: str | None = None
    """In place of ``data.problem_column``."""
    answer_column: str | None = None
    """In place of ``data.answer_column``."""
    images_column: str | None = None
    """In place of ``data.images_column``."""
    layout: LayoutConfig | None = None
    """In place of ``data.layout``."""
    chat_template_arguments_column: str | None = None
    """In place of ``data.chat_template_arguments_column``."""
    reward: RewardConfig | None = None
    """In place of ``reward``, except ``max_ungraded_share``, which counts the completions of all sources together."""


_SOURCE_NAME = r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}"
_OF_SOURCE = (
    "template", "problem_column", "answer_column", "images_column", "layout", "chat_template_arguments_column",
)  # fmt: skip


class DataConfig(Frozen):
    train: str = "synthetic-geometry@train"
    """A Hugging Face id with split (``hiyouga/geometry3k@train``), a local file or folder (parquet, jsonl), an fsspec
    URI, or a synthetic source: synthetic-geometry, countdown or sums, with @train, @validation or @test."""
    validation: str = "synthetic-geometry@validation"
    """As ``train``, for evaluation."""
    mixture: dict[str, SourceConfig] = {}
    """Several sources by name, in place of ``train``: ``{geo: {source: hiyouga/geometry3k@train, weight: 2}, sums:
    {source: sums@train}}``. Empty: the single source ``train``."""
    problem_column: str = "problem"
    """Column of the problem: text, or chat messages. A dotted name, here and below, is a path into nested columns."""
    answer_column: str = "answer"
    """Column of the reference answer."""
    images_column: str = "images"
    """Column of lists of images: bytes, or paths relative to the source. May be missing for text."""
    videos_column: str = "videos"
    """Column of videos: each a file (bytes, or a path as for images) or a list of frames, which are taken to be
    1 / ``video_fps`` seconds apart."""
    video_input: Literal["frames", "native"] = "frames"
    """How the model sees a video. frames: as one image per frame. native: in its family's own input, which merges
    neighbouring frames and knows their times; a family without one is refused."""
    video_fps: float = Field(2.0, gt=0)
    """Frames that are taken from a second of a video file."""
    video_frames: int = Field(8, ge=1)
    """Most frames that are taken from a video file, spread evenly over a longer one."""
    layout: LayoutConfig | None = None
    """Further columns, of a published benchmark. null: the problem is in the columns above."""
    max_images: int = Field(8, ge=1)
    """Problems with more images are rejected. A video counts as one for each of its frames, or as one if
    ``video_input`` is native."""
    template: str = "math"
    """Prompt template: a name under rlcore/data/templates, or the path of a Jinja file that uses ``content``."""
    system_prompt: str | None = None
    """System message for problems without one. null: none, and the model's chat template may add its default; "": an
    empty one, which prevents the default."""
    chat_template_arguments: dict[str, bool | int | float | str] = {}
    """Variables of the model's chat template, such as ``{"enable_thinking": false}``. A variable that the template does
    not mention is an error."""
    chat_template_arguments_column: str | None = None
    """Column of the row's own ``chat_template_arguments``: a mapping, or its JSON text. They come before those of the
    setting. A row that sets a variable which the template does not mention is rejected. null: none."""
    min_pixels: int = Field(56 * 56, ge=1)
    """Smaller images are scaled up to this number of pixels. A model that cuts images into tiles of one size, such as
    448 x 448 pixels, takes at least as many tiles as hold this number."""
    max_pixels: int = Field(1024 * 1024, ge=1)
    """Larger images, and frames, are scaled down to this number of pixels. The number of image tokens grows with it.
    Tiles: at most as many as fit into this number, and at most the image processor's own ``max_patches``."""
    max_prompt_tokens: int = Field(2048, ge=1)
    """Problems with a longer prompt, including image tokens, are rejected, never cut."""
    synthetic_seed: int = 0
    """Seed of the synthetic sources."""
    synthetic_problems: int = Field(2048, ge=1)
    """Training problems of a synthetic source. Validation and test have an eighth as many each."""
    countdown: CountdownConfig = CountdownConfig()
    shuffle_seed: int = 0
    """Seed of the order of the problems."""
    curriculum: CurriculumConfig | None = None
    """null: train on every problem in every epoch."""

    @field_validator("chat_template_arguments")
    @classmethod
    def _check_template_arguments(cls, arguments: dict[str, object]) -> dict[str, object]:
        if taken := sorted(NOT_TEMPLATE_VARIABLES & arguments.keys()):
            raise ValueError(
                f"data.chat_template_arguments sets {', '.join(taken)}, which rlflow sets itself or which is no "
                "variable of a chat template. Allowed are variables of the template, such as enable_thinking."
            )
        return arguments

    @model_validator(mode="after")
    def _check_pixels(self) -> Self:
        if self.min_pixels > self.max_pixels:
            raise ValueError(
                f"data.min_pixels ({self.min_pixels}) is above data.max_pixels ({self.max_pixels}). "
                "Lower the first or raise the second."
            )
        return self

    @model_validator(mode="after")
    def _check_mixture(self) -> Self:
        if broken := list(_broken_mixture_rules(self.mixture)):
            raise ValueError("\n- ".join(broken))
        return self

    def sources(self, split: Literal["train", "validation"]) -> dict[str, DataConfig]:
        """The settings of each source of the mixture that has problems for ``split``, by name, in the order of names.
        Empty: the split has a single source."""
        names = [name for name in sorted(self.mixture) if split == "train" or self.mixture[name].validation]
        return {name: self.of_source(name) for name in names}

    def of_source(self, name: str) -> DataConfig:
        """The settings of one source of the mixture, as if it were the only one."""
        source = self.mixture[name]
        own = {key: value for key in _OF_SOURCE if (value := getattr(source, key)) is not None}
        validation = source.validation or self.validation
        return self.model_copy(update={"train": source.source, "validation": validation, "mixture": {}, **own})


def _broken_mixture_rules(mixture: Mapping[str, SourceConfig]) -> Iterator[str]:
    if wrong := [name for name in mixture if not re.fullmatch(_SOURCE_NAME, name)]:
        yield (
            f"data.mixture has the names {wrong}, which become parts of problem ids and of metrics. Allowed are up to "
            "40 letters, digits, _ and -, beginning with a letter or a digit."
        )
    unweighted = [(name, source.model_copy(update={"weight": 1.0})) for name, source in sorted(mixture.items())]
    for place, (name, source) in enumerate(unweighted):
        if twin := next((other for other, same in unweighted[:place] if same == source), None):
            yield (
                f"data.mixture.{twin} and data.mixture.{name} are the same source with the same settings. Keep one of "
                "them, with the sum of both weights."
            )
    default = MathReward().max_ungraded_share
    for name, source in mixture.items():
        if source.reward is not None and source.reward.max_ungraded_share != default:
            yield (
                f"data.mixture.{name}.reward.max_ungraded_share is set, and the share counts the completions of all "
                "sources together. Set reward.max_ungraded_share instead."
            )
