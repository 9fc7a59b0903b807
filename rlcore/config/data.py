"""Problems: where they come from, how they are put, in which order."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from rlcore.config.base import Frozen

# Parameters of apply_chat_template, and what a template gets with every prompt.
_NOT_TEMPLATE_VARIABLES = {
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "max_length",
    "messages", "padding", "processor_kwargs", "return_assistant_tokens_mask", "return_dict", "return_tensors",
    "tokenize", "tokenizer_kwargs", "tools", "truncation",
}  # fmt: skip


class CountdownConfig(Frozen):
    """The game that ``countdown@SPLIT`` draws: reach the target with the numbers, each used once, by + - * /."""

    numbers: tuple[int, int] = (3, 4)
    """Fewest and most numbers of a problem."""
    max_number: int = Field(99, ge=1)
    """Largest number of a game."""
    max_target: int = Field(99, ge=1)
    """Largest target of a game."""
    operations: tuple[Literal["+", "-", "*", "/"], ...] = ("+", "*", "-", "/")
    """Those that a game is drawn with; an answer may use all four."""

    @model_validator(mode="after")
    def _two_numbers_always_go_together(self) -> Self:
        if not {"+", "*"} & set(self.operations):
            raise ValueError(
                f"data.countdown.operations is {list(self.operations)}: 3 and 3 have no difference above 0, and 3 and "
                "2 no whole quotient. Add + or *."
            )
        return self


class CurriculumConfig(Frozen):
    """Problems whose measured pass rate says that there is nothing to learn rest for some epochs."""

    hardest: float = Field(0.0, ge=0, lt=1)
    """A pass rate at or below it rests."""
    easiest: float = Field(1.0, gt=0, le=1)
    """A pass rate at or above it rests."""
    rest_epochs: int = Field(2, ge=1)
    """Epochs that such a problem is left out of before it is measured again."""

    @model_validator(mode="after")
    def _bounds_in_order(self) -> Self:
        if self.hardest >= self.easiest:
            raise ValueError(
                f"data.curriculum.hardest ({self.hardest}) is not below data.curriculum.easiest ({self.easiest}): "
                "every problem would rest. Lower the first or raise the second."
            )
        return self


class DataConfig(Frozen):
    train: str = "synthetic-geometry@train"
    """A Hugging Face id with split (``hiyouga/geometry3k@train``), a local file or folder (parquet, jsonl), an
    fsspec URI, or ``NAME@{train,validation,test}`` with NAME one of synthetic-geometry, countdown, sums, drawn from
    ``synthetic_seed``."""
    validation: str = "synthetic-geometry@validation"
    """As ``train``, for evaluation."""
    problem_column: str = "problem"
    """Text, or chat messages. A dotted name is a path into nested columns, here and below."""
    answer_column: str = "answer"
    """What the reward compares with."""
    images_column: str = "images"
    """Lists of images: bytes, or paths beside the source. May be missing in a source of text."""
    videos_column: str = "videos"
    """Lists of frames; a ``<video>`` marker stands for one image per frame."""
    max_images: int = Field(8, ge=1)
    """Problems with more images (frames included) are rejected."""
    template: str = "math"
    """Prompt template: a name under rlcore/data/templates, or the path of a Jinja file that uses ``content``."""
    system_prompt: str | None = None
    """System message of problems that have none of their own. null: no message, and the model's chat template may put
    in a text of its own; "": an empty one, which keeps it from that."""
    chat_template_arguments: dict[str, bool | int | float | str] = {}
    """Variables of the model's chat template, such as ``{"enable_thinking": false}``. One that the template does not
    mention is an error."""
    min_pixels: int = Field(56 * 56, ge=1)
    """Smaller images are scaled up to it."""
    max_pixels: int = Field(1024 * 1024, ge=1)
    """Larger images are scaled down to it. Image tokens grow with it."""
    max_prompt_tokens: int = Field(2048, ge=1)
    """Problems with a longer prompt (image tokens included) are rejected with that reason, never cut."""
    synthetic_seed: int = 0
    """Seed of what is drawn."""
    synthetic_problems: int = Field(2048, ge=1)
    """Training problems that a drawn source has; validation and test have an eighth of it each."""
    countdown: CountdownConfig = CountdownConfig()
    shuffle_seed: int = 0
    """Seed of the order of problems."""
    curriculum: CurriculumConfig | None = None
    """null: every problem in every epoch."""

    @field_validator("chat_template_arguments")
    @classmethod
    def _arguments_are_the_templates(cls, arguments: dict[str, object]) -> dict[str, object]:
        if taken := sorted(_NOT_TEMPLATE_VARIABLES & arguments.keys()):
            raise ValueError(
                f"data.chat_template_arguments sets {', '.join(taken)}, which is given with every prompt or is no "
                "variable of a chat template. Allowed are variables of the template, enable_thinking among them."
            )
        return arguments

    @model_validator(mode="after")
    def _pixels_in_order(self) -> Self:
        if self.min_pixels > self.max_pixels:
            raise ValueError(
                f"data.min_pixels ({self.min_pixels}) is above data.max_pixels ({self.max_pixels}). "
                "Lower the first or raise the second."
            )
        return self
