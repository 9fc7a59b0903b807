"""Rows of a dataset before preparation: from local files, the Hugging Face hub, or a synthetic source, and the forms
in which they write texts and images."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar, cast

from rlcore.config import DataConfig
from rlcore.config.data import NOT_TEMPLATE_VARIABLES
from rlcore.data.pixels import IMAGE_MARKER, MARKERS, VIDEO_MARKER
from rlcore.data.prepare.files import BATCH_ROWS, Row, Table, cell, images_of, open_file, source_files, videos_of
from rlcore.data.prepare.layout import columns_of, lay_out
from rlcore.data.rejects import Reason, Unusable
from rlcore.data.synthetic.sources import SYNTHETIC_SOURCES, write_synthetic
from rlcore.errors import DataError, ServerError
from rlcore.specs import PrepareSpec
from rlcore.types import Message, Role

T = TypeVar("T")
ImageCell = bytes | Path | None  # encoded bytes or a file; None: anything else

_ID_COLUMNS = ("problem_id", "id")


@dataclass(frozen=True, slots=True)
class SourceRow:
    """One row of a source, by its configured columns. Nothing is checked yet."""

    index: int  # in the source, from 0
    row_id: str | None  # None: no id column, or no id in this row
    problem: object
    answer: object
    images: tuple[ImageCell, ...]
    videos: tuple[tuple[ImageCell, ...] | ImageCell, ...]  # the frames, or a file of them; None: neither
    extra: Mapping[str, object]  # every other column, JSON values
    template_arguments: object = None  # the row's own, of the chat template

    @property
    def num_images(self) -> int:
        """Images and listed frames of videos. How many a file has is known once it is read."""
        return len(self.images) + sum(len(video) for video in self.videos if isinstance(video, tuple))


@dataclass(frozen=True, slots=True)
class Source:
    columns: tuple[str, ...]
    num_rows: int | None  # None: unknown before the last row
    rows: Iterator[SourceRow]
    folders: tuple[Path, ...]  # image files are read only below these


def open_source(spec: PrepareSpec, scratch: Path) -> Source:
    """Rows of the source that ``spec`` names, read in batches.

    Args:
        scratch: an empty folder for synthetic problems. Keep it until all rows are read.

    Raises:
        DataError: no such file, folder, split or hub id, a file that does not parse, or a missing column.
        ServerError: the hub cannot be reached.
    """
    name, split = parse_source(spec.source, spec.split)
    if spec.source_path is not None:
        tables = [open_file(path) for path in source_files(spec.source_path, split)]
        folders = _folders(spec.source_path)
    elif name in SYNTHETIC_SOURCES:
        tables = [open_file(write_synthetic(scratch, name, split, spec.data))]
        folders = (scratch,)
    else:
        import datasets
        from huggingface_hub import constants

        tables = [_open_hub(name, split)]
        folders = (Path(datasets.config.HF_DATASETS_CACHE), Path(constants.HF_HUB_CACHE))
    for table in tables:
        _check_columns(table, spec.data)
    counts = [table.num_rows for table in tables]
    rows = chain.from_iterable(((table.base, row) for row in table.rows) for table in tables)
    return Source(
        columns=tuple(dict.fromkeys(column for table in tables for column in table.columns)),
        num_rows=None if None in counts else sum(count for count in counts if count),
        rows=(_source_row(index, row, base, spec.data) for index, (base, row) in enumerate(rows)),
        folders=folders,
    )


def parse_source(source: str, split: str) -> tuple[str, str]:
    """Name and split of ``name@split``. Without @split, or if @ is part of a path, the split is ``split``."""
    name, _, words = source.rpartition("@")
    return (name, words) if name and "/" not in words and "." not in words else (source, split)


def _folders(path: Path) -> tuple[Path, ...]:
    """Folders that may hold the images of a local source: its own, and for a snapshot in the Hugging Face cache the
    folder that the snapshot's links point to."""
    folder = path if path.is_dir() else path.parent
    blobs = folder.parent.parent / "blobs"
    return (folder, blobs) if folder.parent.name == "snapshots" and blobs.is_dir() else (folder,)


def _open_hub(name: str, split: str) -> Table:
    import datasets

    repository, _, subset = name.partition(":")
    try:
        dataset = datasets.load_dataset(repository, subset or None, split=split)
    except ConnectionError as error:
        raise ServerError(
            f"the Hugging Face hub cannot be reached for {name}@{split}: {error}. "
            "Check the network, or name a local file in data.train and data.validation."
        ) from error
    except (OSError, ValueError) as error:
        raise DataError(
            f"{name}@{split} cannot be loaded: {error}. data.train and data.validation take a hub id "
            f"with its split (owner/name@train, or owner/name:subset@train), "
            f"a synthetic source ({', '.join(SYNTHETIC_SOURCES)}), or a local file or folder."
        ) from error
    return Table(f"{name}@{split}", tuple(dataset.column_names), len(dataset), _arrow_rows(dataset), Path())


def _arrow_rows(dataset: Any) -> Iterator[Row]:
    # The arrow format leaves images encoded. Other formats decode them, slowly and without our checks.
    for table in dataset.with_format("arrow").iter(BATCH_ROWS):
        yield from table.to_pylist()


def _check_columns(table: Table, data: DataConfig) -> None:
    wanted = {"data.problem_column": data.problem_column, "data.answer_column": data.answer_column}
    if data.layout is not None:
        wanted = {"data.answer_column": data.answer_column, **columns_of(data)}
    if (own := data.chat_template_arguments_column) is not None:
        wanted["data.chat_template_arguments_column"] = own
    missing = {key: name for key, name in wanted.items() if not {name, name.partition(".")[0]} & set(table.columns)}
    if missing and table.columns:  # an empty file has no columns; it is reported as a dataset without rows
        raise DataError(
            f"{table.name} lacks the column(s) {', '.join(map(repr, missing.values()))}. "
            f"Columns found: {', '.join(table.columns)}. Set {' and '.join(missing)} to one of them "
            f"(images come from data.images_column, now {data.images_column!r})."
        )


def _source_row(index: int, row: Row, base: Path, data: DataConfig) -> SourceRow:
    row = lay_out(row, data)
    own = data.layout.id_column if data.layout is not None else None
    id_column = next((name for name in ((own,) if own else _ID_COLUMNS) if row.get(name) not in (None, "")), None)
    arguments = data.chat_template_arguments_column
    used = {data.problem_column, data.answer_column, data.images_column, data.videos_column, id_column, arguments}
    return SourceRow(
        index=index,
        row_id=str(row[id_column]) if id_column else None,
        problem=cell(row, data.problem_column),
        answer=cell(row, data.answer_column),
        images=tuple(images_of(cell(row, data.images_column), base)),
        videos=tuple(videos_of(cell(row, data.videos_column), base)),
        extra={name: _json_value(value) for name, value in row.items() if name not in used},
        template_arguments=None if arguments is None else cell(row, arguments),
    )


def _json_value(value: object) -> object:
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None  # JSON has no NaN and no infinity
    if isinstance(value, list | tuple):
        return [_json_value(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _json_value(item) for key, item in value.items()}
    return f"<{len(value)} bytes>" if isinstance(value, bytes) else str(value)  # dates, decimals


def plain_text(value: object, what: str, empty: Reason) -> str:
    """The text of a cell. Numbers become text.

    Raises:
        Unusable: ``empty``, or NOT_TEXT.
    """
    if isinstance(value, int | float | Decimal) and not isinstance(value, bool):
        return str(value)
    if value is None or (isinstance(value, str) and not value.strip()):
        raise Unusable(empty, f"the {what} is {value!r}")
    if not isinstance(value, str):
        raise Unusable(Reason.NOT_TEXT, f"the {what} is {type(value).__name__}: {str(value)[:80]}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise Unusable(Reason.NOT_TEXT, f"the {what} has an unpaired surrogate: {error.reason}") from None
    return value


def template_arguments(value: object) -> dict[str, bool | int | float | str]:
    """The variables of the chat template that a cell sets: a mapping, or its JSON text. null sets nothing, because in
    parquet each row has the names of all rows.

    Raises:
        Unusable: TEMPLATE_ARGUMENTS.
    """
    given = value
    if isinstance(value, str):
        try:
            given = json.loads(value) if value.strip() else None
        except ValueError as error:
            raise Unusable(Reason.TEMPLATE_ARGUMENTS, f"{value[:80]!r} is not JSON: {error}") from None
    if given is None:
        return {}
    if not isinstance(given, dict) or not all(isinstance(name, str) for name in given):
        raise Unusable(Reason.TEMPLATE_ARGUMENTS, f"{str(given)[:80]} is no mapping of names")
    arguments = {name: item for name, item in given.items() if item is not None}
    if odd := [name for name, item in arguments.items() if not _is_scalar(item)]:
        raise Unusable(Reason.TEMPLATE_ARGUMENTS, f"{', '.join(odd)} is no text, number, true or false")
    if taken := sorted(NOT_TEMPLATE_VARIABLES & arguments.keys()):
        raise Unusable(Reason.TEMPLATE_ARGUMENTS, f"{', '.join(taken)} is set by rlflow, or no variable of a template")
    return arguments


def _is_scalar(value: object) -> bool:
    return isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))


def conversation(value: object) -> tuple[Message, ...]:
    """The messages of a cell, the question last.

    A cell is text, or a chat: an optional system message, then turns of user and assistant. Images and videos inside a
    message become markers.

    Raises:
        Unusable: EMPTY_PROBLEM; NOT_TEXT, also for turns in another order.
    """
    if not _is_chat(value):
        return (Message("user", plain_text(value, "problem", Reason.EMPTY_PROBLEM)),)
    roles = [str(message["role"]) for message in value]  # type: ignore[attr-defined]
    system = roles[:1] == ["system"]
    turns = roles[system:]
    if len(turns) % 2 == 0 or turns != [("user", "assistant")[i % 2] for i in range(len(turns))]:
        raise Unusable(
            Reason.NOT_TEXT,
            f"the problem is a conversation of {', '.join(roles)}; allowed are an optional system message and then "
            "turns of user and assistant that begin and end with the user",
        )
    return tuple(_message(message) for message in value)  # type: ignore[attr-defined]


def place_images(
    texts: Sequence[str], images: Sequence[T], videos: Sequence[tuple[T, ...] | T]
) -> tuple[list[str], list[T]]:
    """Replace the marker of each video that is a list of frames by one image marker per frame, and return the texts and
    all images and videos in marker order.

    Raises:
        Unusable: MARKER_COUNT or VIDEO_MARKER_COUNT, if the numbers of markers and images (or videos) differ.
    """
    for marker, given, reason in (
        (IMAGE_MARKER, len(images), Reason.MARKER_COUNT),
        (VIDEO_MARKER, len(videos), Reason.VIDEO_MARKER_COUNT),
    ):
        if (markers := sum(text.count(marker) for text in texts)) != given:
            raise Unusable(reason, f"{markers} {marker} marker(s) for {given} {marker.strip('<>')}(s)")
    next_image, next_video = iter(images), iter(videos)
    results: list[str] = []
    placed: list[T] = []
    for text in texts:
        pieces: list[str] = []
        for piece in MARKERS.split(text):
            if piece == VIDEO_MARKER:
                video = next(next_video)
                frames = video if isinstance(video, tuple) else (video,)
                pieces.append(IMAGE_MARKER * len(frames) if isinstance(video, tuple) else VIDEO_MARKER)
                placed += frames
            else:
                pieces.append(piece)
                placed += [next(next_image)] if piece == IMAGE_MARKER else []
        results.append("".join(pieces))
    return results, placed


def _is_chat(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in value)
    )


def _message(message: dict[str, object]) -> Message:
    role, content = cast(Role, message["role"]), message["content"]
    if isinstance(content, list):
        content = "".join(chain.from_iterable(_part_text(part, role) for part in content))
    if role == "system" and content == "":
        return Message(role, "")  # an empty message keeps a chat template from adding its default system text
    return Message(role, plain_text(content, "problem", Reason.EMPTY_PROBLEM))


def _part_text(part: object, role: Role) -> Iterator[str]:
    if isinstance(part, str):
        yield part
    elif isinstance(part, dict) and part.get("type") in ("image", "video"):
        yield f"<{part['type']}>"
    elif isinstance(part, dict) and isinstance(part.get("text"), str):
        yield part["text"]
    else:
        raise Unusable(Reason.NOT_TEXT, f"a part of the {role}'s message is {str(part)[:80]}")
