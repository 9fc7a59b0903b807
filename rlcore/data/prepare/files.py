"""Local data files: those that belong to a source, and their unchanged rows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from rlcore.errors import DataError

BATCH_ROWS = 64  # a batch with its images fits in memory many times over

VIDEO_SUFFIXES = (".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi")

_SUFFIXES = (".parquet", ".jsonl", ".json")
_SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test",),
}
_POINT = "Point data.train or data.validation at"

Row = Mapping[str, Any]  # one value per column, with the source's types


@dataclass(frozen=True, slots=True)
class Table:
    """One file, or one split of a hub dataset."""

    name: str
    columns: tuple[str, ...]
    num_rows: int | None  # None: unknown before the last row
    rows: Iterator[Row]
    base: Path  # image paths are relative to this folder


def source_files(path: Path, split: str) -> list[Path]:
    """The data files of a local source, in order: the file itself, or those of a folder.

    Of a folder, only the files of its best format count (parquet, then jsonl, then json). If file or folder names name
    splits, only those of ``split`` are used, so that no test split is trained on by mistake. A split of another name
    than train, validation and test, such as testmini, is known by that name.

    Raises:
        DataError: no such path, no data file, or none of this split; lists what exists.
    """
    if path.is_file() and path.suffix in _SUFFIXES:
        return [path]
    if not path.is_dir():
        found = f"has the suffix {path.suffix!r}" if path.exists() else "does not exist"
        raise DataError(f"{path} {found}. {_POINT} a {', '.join(_SUFFIXES)} file or a folder of them.")
    every = sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES and file.is_file())
    by_format = [[file for file in every if file.suffix == suffix] for suffix in _SUFFIXES]
    files = next((group for group in by_format if group), [])
    if not files:
        raise DataError(f"{path} holds no {', '.join(_SUFFIXES)} file. {_POINT} a folder that does.")
    splits = {file: _split_of(file.relative_to(path), split) for file in files}
    if not any(splits.values()):
        return files
    wanted = [file for file in files if splits[file] == split]
    if not wanted:
        names = ", ".join(str(file.relative_to(path)) for file in files[:8])
        raise DataError(f"{path} has no file of the split {split!r}; found {names}. {_POINT} one of these files.")
    return wanted


def open_file(path: Path) -> Table:
    """Columns and rows of one data file. Parquet and jsonl files are read in pieces.

    Raises:
        DataError: the file does not parse (now, or while its rows are read).
    """
    if path.suffix == ".parquet":
        return _open_parquet(path)
    rows = _json_lines(path) if path.suffix == ".jsonl" else _json_array(path)
    first = list(islice(rows, 1000))  # single rows may lack a column
    columns = tuple(dict.fromkeys(key for row in first for key in row))
    return Table(str(path), columns, None, chain(first, rows), path.parent)


def image_files(path: Path, column: str) -> list[Path]:
    """The distinct image files that a column of images or videos names by path, in order."""
    if path.suffix == ".parquet":
        values = _parquet_images_by_path(path, column)
    else:
        values = (cell(row, column) for row in open_file(path).rows)
    images = chain.from_iterable(images_of(value, path.parent) for value in values)
    return list(dict.fromkeys(image for image in images if isinstance(image, Path)))


def cell(row: Row, column: str) -> object:
    """The value of a column, or None. A dotted name that is not a column is a path into nested objects."""
    if column in row:
        return row[column]
    value: object = row
    for part in column.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def videos_of(value: object, base: Path) -> Iterator[tuple[bytes | Path | None, ...] | bytes | Path | None]:
    """The videos of one cell: each the frames of a list, or a file as ``images_of`` finds it. None: neither."""
    if value is None:
        return
    for video in value if isinstance(value, list) else [value]:
        if isinstance(video, list):
            yield tuple(images_of(video, base))
        else:
            yield next(images_of(video, base), None)


def images_of(value: object, base: Path) -> Iterator[bytes | Path | None]:
    """The images of one cell: encoded bytes, a file relative to ``base``, or None for anything else.

    A cell is bytes, a path, {bytes, path}, or a list of these. A cell of None has no images.
    """
    if value is None:
        return
    if isinstance(value, list):
        for item in value:
            # None in a list stands for a missing image.
            yield from (None,) if item is None else images_of(item, base)
    elif isinstance(value, bytes):
        yield value
    elif isinstance(value, str):
        yield base / value if value else None
    elif isinstance(value, dict) and (content := value.get("bytes") or value.get("path")):
        yield from images_of(content, base)
    else:
        yield None


def _split_of(relative: Path, wanted: str) -> str | None:
    words = re.split(r"[^a-z]+", str(relative.with_suffix("")).lower())
    known = _SPLIT_WORDS if wanted in _SPLIT_WORDS else {**_SPLIT_WORDS, wanted: (wanted.lower(),)}
    return next((split for word in words for split, names in known.items() if word in names), None)


def _open_parquet(path: Path) -> Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a readable parquet file: {error}. Download or write it again.") from error
    columns = tuple(file.schema_arrow.names)
    return Table(str(path), columns, file.metadata.num_rows, _parquet_rows(path, file), path.parent)


def _parquet_rows(path: Path, file: Any) -> Iterator[Row]:
    import pyarrow as pa

    try:
        for batch in file.iter_batches(BATCH_ROWS):
            yield from batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is damaged: {error}. Download or write it again.") from error


def _parquet_images_by_path(path: Path, column: str) -> Iterator[object]:
    import pyarrow.parquet as pq

    _open_parquet(path)  # raises if it is not readable
    file = pq.ParquetFile(path)
    leaves = {
        leaf.path: number
        for number, leaf in enumerate(file.schema.column(i) for i in range(len(file.schema)))
        if leaf.path == column or leaf.path.startswith(f"{column}.")
    }
    texts = [name for name, number in leaves.items() if file.schema.column(number).logical_type.type == "STRING"]
    # An image whose bytes are in the file is hashed with the file, so its path does not matter.
    contents = [f"{name.removesuffix('path')}bytes" for name in texts if name.endswith(".path")]
    contents = [name for name in contents if name in leaves]
    if not texts or (contents and all(_has_no_nulls(file, leaves[name]) for name in contents)):
        return
    for batch in file.iter_batches(BATCH_ROWS, columns=[*texts, *contents]):
        yield from (cell(row, column) for row in batch.to_pylist())


def _has_no_nulls(file: Any, leaf: int) -> bool:
    """From the file's statistics, so that no image is read; False if they are missing."""
    groups = (file.metadata.row_group(number).column(leaf) for number in range(file.metadata.num_row_groups))
    return all(group.is_stats_set and group.statistics.null_count == 0 for group in groups)


def _json_lines(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path} line {number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DataError(f"{where} is not JSON: {error}. Fix or remove the line.") from None
            if not isinstance(row, dict):
                found = type(row).__name__
                raise DataError(f"{where} holds {found}, not an object. Write {{column: value}} on each line.")
            yield row


def _json_array(path: Path) -> Iterator[Row]:
    try:
        rows = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(
            f"{path} is not JSON: {error}. A .json file holds one array, a .jsonl file one object per line."
        ) from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DataError(
            f"{path} is not an array of objects. Write [{{column: value}}, ...], or .jsonl with one per line."
        )
    yield from rows
