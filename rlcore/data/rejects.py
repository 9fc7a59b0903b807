"""Rows of a source that cannot be used, each with a reason, stored with the dataset. No row is dropped silently."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from rlcore.errors import DataError


class Reason(StrEnum):
    TOO_MANY_IMAGES = "too_many_images"
    EMPTY_PROBLEM = "empty_problem"
    EMPTY_ANSWER = "empty_answer"
    NOT_TEXT = "not_text"
    SPECIAL_TOKEN = "special_token_in_text"
    MARKER_COUNT = "image_marker_count"
    VIDEO_MARKER_COUNT = "video_marker_count"
    VIDEO_FORMAT = "video_format"
    MODEL_WITHOUT_IMAGES = "model_without_images"
    IMAGE_MISSING = "image_missing"
    IMAGE_OUTSIDE = "image_outside"
    IMAGE_FORMAT = "image_format"
    IMAGE_ANIMATED = "image_animated"
    IMAGE_TOO_LARGE = "image_too_large"
    IMAGE_DAMAGED = "image_damaged"
    IMAGE_SHAPE = "image_shape"
    PROMPT_TOO_LONG = "prompt_too_long"


_REMEDIES = {
    Reason.TOO_MANY_IMAGES: "raise data.max_images, or keep fewer frames of each video",
    Reason.EMPTY_PROBLEM: "set data.problem_column to the column that holds the question",
    Reason.EMPTY_ANSWER: "set data.answer_column to the column that holds the answer",
    Reason.NOT_TEXT: "set data.problem_column and data.answer_column to columns of text or numbers",
    Reason.SPECIAL_TOKEN: "take the model's special tokens out of the problem text",
    Reason.MARKER_COUNT: "set data.images_column, and write one <image> marker per image into the problem",
    Reason.VIDEO_MARKER_COUNT: "set data.videos_column, and write one <video> marker per video into the problem",
    Reason.VIDEO_FORMAT: "write each video as a list of its frames, each an image",
    Reason.MODEL_WITHOUT_IMAGES: "set model.path to a vision-language model",
    Reason.IMAGE_MISSING: "keep image files beside the source file, or embed their bytes",
    Reason.IMAGE_OUTSIDE: "point data.train at the folder that holds rows and images, or embed their bytes",
    Reason.IMAGE_FORMAT: "convert the images to PNG or JPEG",
    Reason.IMAGE_ANIMATED: "extract one frame per image",
    Reason.IMAGE_TOO_LARGE: "scale the originals down",
    Reason.IMAGE_DAMAGED: "fetch the source again; its image files do not decode",
    Reason.IMAGE_SHAPE: "widen the range from data.min_pixels to data.max_pixels, or crop very long images",
    Reason.PROMPT_TOO_LONG: "raise data.max_prompt_tokens, or lower data.max_pixels",
}


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
        f"Most likely remedy: {_REMEDIES[Reason(counts[0][0])]}."
    )
