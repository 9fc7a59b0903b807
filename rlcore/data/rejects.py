"""Rows of a source that cannot be used, each with a reason, stored with the dataset. No row is dropped silently."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self

from rlcore.errors import DataError


class Reason(StrEnum):
    """Why a row is rejected, as ``rejects.jsonl`` names it, and the most likely remedy."""

    remedy: str

    def __new__(cls, value: str, remedy: str) -> Self:
        reason = str.__new__(cls, value)
        reason._value_, reason.remedy = value, remedy
        return reason

    TEMPLATE_ARGUMENTS = (
        "chat_template_arguments",
        "write variables of the model's chat template into data.chat_template_arguments_column",
    )
    TOO_MANY_IMAGES = "too_many_images", "raise data.max_images, or lower data.video_frames"
    EMPTY_PROBLEM = "empty_problem", "set data.problem_column to the column that holds the question"
    EMPTY_ANSWER = "empty_answer", "set data.answer_column to the column that holds the answer"
    NOT_TEXT = "not_text", "set data.problem_column and data.answer_column to columns of text or numbers"
    SPECIAL_TOKEN = "special_token_in_text", "take the model's special tokens out of the problem text"
    MARKER_COUNT = (
        "image_marker_count",
        "set data.images_column, and write one <image> marker per image into the problem",
    )
    VIDEO_MARKER_COUNT = (
        "video_marker_count",
        "set data.videos_column, and write one <video> marker per video into the problem",
    )
    VIDEO_FORMAT = "video_format", "write each video as an MP4, Matroska or AVI file, or as a list of its frames"
    VIDEO_DAMAGED = "video_damaged", "fetch the source again; its video files do not decode"
    MODEL_WITHOUT_IMAGES = "model_without_images", "set model.path to a vision-language model"
    IMAGE_MISSING = "image_missing", "keep image files next to the source file, or embed their bytes"
    IMAGE_OUTSIDE = "image_outside", "point data.train at the folder that holds rows and images, or embed their bytes"
    IMAGE_FORMAT = "image_format", "convert the images to PNG or JPEG"
    IMAGE_ANIMATED = "image_animated", "extract one frame per image"
    IMAGE_TOO_LARGE = "image_too_large", "scale the originals down"
    IMAGE_DAMAGED = "image_damaged", "fetch the source again; its image files do not decode"
    IMAGE_SHAPE = "image_shape", "widen the range from data.min_pixels to data.max_pixels, or crop very long images"
    PROMPT_TOO_LONG = "prompt_too_long", "raise data.max_prompt_tokens, or lower data.max_pixels"


class Unusable(Exception):
    """A row or an image cannot be used; becomes a ``Reject``. Can be pickled, for the process pool."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Reject:
    """One line of ``rejects.jsonl``."""

    problem_id: str
    row: int  # index in the source, from 0
    reason: str
    detail: str


def write_rejects(path: Path, rejects: Iterable[Reject]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(reject), ensure_ascii=False) + "\n" for reject in rejects)


def read_rejects(path: Path) -> list[Reject]:
    with path.open(encoding="utf-8") as file:
        return [Reject(**json.loads(line)) for line in file]


def nothing_usable(source: str, rejects: Sequence[Reject], columns: Sequence[str] = ()) -> DataError:
    """The error for a dataset without any usable row: counts by reason, and the most likely remedy."""
    if not rejects:
        return DataError(f"{source} holds no rows. Point data.train and data.validation at a source with rows.")
    counts = Counter(reject.reason for reject in rejects).most_common()
    example = next(reject for reject in rejects if reject.reason == counts[0][0])
    names = f" Columns found: {', '.join(columns)}." if columns else ""
    return DataError(
        f"{source}: none of {len(rejects)} rows is usable: "
        f"{', '.join(f'{reason} {count}' for reason, count in counts)}. "
        f"First {example.reason}: row {example.row}, {example.detail}.{names} "
        f"Most likely remedy: {next(reason.remedy for reason in Reason if reason == counts[0][0])}."
    )
