"""``problems.parquet``, the table of a prepared dataset, and ``report.json``, its statistics."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict

from rlcore.artifacts import SourceRows
from rlcore.errors import StorageError
from rlcore.types import ImageRef, Message, Problem

PROBLEMS = "problems.parquet"
IMAGES = "images"  # of a resized dataset: <hash of the original>.png

_BIN_TOKENS = 64


@dataclass(frozen=True, slots=True)
class PreparedRow:
    """A usable problem and the size of its prompt."""

    problem: Problem
    row: int  # index in the source, from 0
    prompt_tokens: int  # image tokens included
    image_tokens: int


class PromptStats(BaseModel):
    """Prompt tokens of one epoch, image tokens included."""

    model_config = ConfigDict(frozen=True)

    total: int
    max: int
    mean: float
    p50: float
    p95: float
    p99: float
    image_share: float  # image tokens / total
    histogram: dict[str, int]  # "0-63": problems with that many prompt tokens


class DatasetReport(BaseModel):
    """``report.json``. It is written last, so a folder with a report is complete."""

    model_config = ConfigDict(frozen=True)

    digest: str
    source: str
    columns: list[str]  # of the source
    problems: int
    rejected: dict[str, int]  # reason -> rows
    distinct_images: int
    image_sizes: dict[str, int]  # "252x196" after resizing -> distinct images
    prompts: PromptStats
    min_pixels: int  # the bounds that image sizes were computed with
    max_pixels: int
    sources: tuple[SourceRows, ...] = ()  # of a mixture


def load_rows(folder: Path) -> list[PreparedRow]:
    """Every problem of a prepared dataset, in source order.

    Raises:
        StorageError: the folder is not a prepared dataset, or its table is damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows = pq.read_table(folder / PROBLEMS).to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise StorageError(
            f"{folder} holds no readable {PROBLEMS}: {error}. Delete the folder and prepare it again."
        ) from error
    return [
        PreparedRow(
            problem=Problem(
                problem_id=row["problem_id"],
                question=row["question"],
                images=tuple(ImageRef(**image, file=_file(folder, image["sha256"])) for image in row["images"]),
                answer=row["answer"],
                source=row["source"],
                extra=json.loads(row["extra"]),
                context=tuple(Message(**message) for message in row["context"]),
                source_name=row.get("source_name", ""),  # only mixtures have the column
                # only datasets of rows with own arguments have these
                chat_template_arguments=json.loads(row.get("chat_template_arguments", "{}")),
                opens_thought=row.get("opens_thought"),
            ),
            row=row["row"],
            prompt_tokens=row["prompt_tokens"],
            image_tokens=row["image_tokens"],
        )
        for row in rows
    ]


def write_rows(folder: Path, rows: Sequence[PreparedRow]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    text, number = pa.string(), pa.int32()
    videos = any(image.is_video for row in rows for image in row.problem.images)
    of_videos = [("frames", number), ("seconds_per_frame", pa.float64())] if videos else []
    images = pa.list_(pa.struct([("sha256", text), ("width", number), ("height", number), *of_videos]))
    messages = pa.list_(pa.struct([("role", text), ("text", text)]))
    problems = [row.problem for row in rows]
    columns = {
        "problem_id": pa.array([p.problem_id for p in problems], text),
        "question": pa.array([p.question for p in problems], text),
        "answer": pa.array([p.answer for p in problems], text),
        "source": pa.array([p.source for p in problems], text),
        "images": pa.array([[_image(image) for image in p.images] for p in problems], images),
        "extra": pa.array([json.dumps(p.extra) for p in problems], text),
        "context": pa.array([[asdict(message) for message in p.context] for p in problems], messages),
        **({"source_name": pa.array([p.source_name for p in problems], text)} if _mixed(problems) else {}),
        **(_template_columns(problems) if any(p.chat_template_arguments for p in problems) else {}),
        "row": pa.array([row.row for row in rows], pa.int64()),
        "prompt_tokens": pa.array([row.prompt_tokens for row in rows], number),
        "image_tokens": pa.array([row.image_tokens for row in rows], number),
    }
    pq.write_table(pa.table(columns), folder / PROBLEMS, compression="zstd")


def _mixed(problems: Sequence[Problem]) -> bool:
    return any(problem.source_name for problem in problems)


def _template_columns(problems: Sequence[Problem]) -> dict[str, object]:
    import pyarrow as pa

    return {
        "chat_template_arguments": pa.array([json.dumps(dict(p.chat_template_arguments)) for p in problems]),
        "opens_thought": pa.array([p.opens_thought for p in problems], pa.bool_()),
    }


def _file(folder: Path, sha256: str) -> str | None:
    """The resized image. None: the images of this dataset have not been resized."""
    return str(folder / IMAGES / f"{sha256}.png") if (folder / IMAGES).is_dir() else None


def _image(image: ImageRef) -> dict[str, object]:
    return {name: getattr(image, name) for name in ("sha256", "width", "height", "frames", "seconds_per_frame")}


def prompt_stats(rows: Sequence[PreparedRow]) -> PromptStats:
    lengths = np.array([row.prompt_tokens for row in rows], dtype=np.int64)
    p50, p95, p99 = (float(value) for value in np.percentile(lengths, [50, 95, 99]))
    total = int(lengths.sum())
    bins = Counter((lengths // _BIN_TOKENS).tolist())
    return PromptStats(
        total=total,
        max=int(lengths.max()),
        mean=total / len(rows),
        p50=p50,
        p95=p95,
        p99=p99,
        image_share=sum(row.image_tokens for row in rows) / total,
        histogram={f"{b * _BIN_TOKENS}-{(b + 1) * _BIN_TOKENS - 1}": bins[b] for b in sorted(bins)},
    )


def load_problems(path: Path) -> list[Problem]:
    """The problems of a prepared dataset (raw or resized), in source order. Errors as ``load_rows``."""
    return [row.problem for row in load_rows(path)]
