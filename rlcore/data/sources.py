"""Rows of a dataset as it comes: local files, the Hugging Face hub, or problems drawn on the spot."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, cast

from rlcore.config import DataConfig
from rlcore.data.files import BATCH_ROWS, Row, Table, images_of, open_file, source_files
from rlcore.errors import DataError, ServerError
from rlcore.job import PrepareSpec

SYNTHETIC = "synthetic-geometry"
_ID_COLUMNS = ("problem_id", "id")


@dataclass(frozen=True, slots=True)
class SourceRow:
    """One row of a source, columns sorted out, nothing checked yet."""

    index: int  # in the source, from 0
    row_id: str | None  # None: the source has no id column, or no id in this row
    problem: object
    answer: object
    images: tuple[bytes | Path | None, ...]  # encoded bytes or a file; None: neither was found
    extra: Mapping[str, object]  # every other column, JSON values


@dataclass(frozen=True, slots=True)
class Source:
    columns: tuple[str, ...]
    num_rows: int | None  # None: not known before the end
    rows: Iterator[SourceRow]


def open_source(spec: PrepareSpec, scratch: Path) -> Source:
    """Rows of the source that ``spec`` names, read batch by batch.

    Args:
        scratch: an empty folder for drawn problems; has to live as long as the rows are read.

    Raises:
        DataError: no such file, folder, split or hub id, a file that does not parse, or a missing column.
        ServerError: the hub cannot be reached.
    """
    name, split = parse_source(spec.source, spec.split)
    if spec.source_path is not None:
        tables = [open_file(path) for path in source_files(spec.source_path, split)]
    elif name == SYNTHETIC:
        tables = [open_file(_draw(scratch, split, spec.data))]
    else:
        tables = [_open_hub(name, split)]
    for table in tables:
        _check_columns(table, spec.data)
    counts = [table.num_rows for table in tables]
    rows = chain.from_iterable(((table.base, row) for row in table.rows) for table in tables)
    return Source(
        columns=tuple(dict.fromkeys(column for table in tables for column in table.columns)),
        num_rows=None if None in counts else sum(count for count in counts if count),
        rows=(_source_row(index, row, base, spec.data) for index, (base, row) in enumerate(rows)),
    )


def parse_source(source: str, split: str) -> tuple[str, str]:
    """``name@split`` taken apart; without @split (or where @ is part of a path) the split is ``split``."""
    name, _, words = source.rpartition("@")
    return (name, words) if name and "/" not in words and "." not in words else (source, split)


def _draw(scratch: Path, split: str, data: DataConfig) -> Path:
    from rlcore.data.synthetic import PublicSplit, write_synthetic

    count = data.synthetic_problems if split == "train" else max(1, data.synthetic_problems // 8)
    return write_synthetic(scratch, cast(PublicSplit, split), count, data.synthetic_seed)


def _open_hub(name: str, split: str) -> Table:
    import datasets

    try:
        dataset = datasets.load_dataset(name, split=split)
    except ConnectionError as error:
        raise ServerError(
            f"the Hugging Face hub cannot be reached for {name}@{split}: {error}. "
            "Check the network, or name a local file in data.train and data.validation."
        ) from error
    except (OSError, ValueError) as error:
        raise DataError(
            f"{name}@{split} cannot be loaded: {error}. data.train and data.validation take a hub id "
            f"with its split (owner/name@train), {SYNTHETIC}@train, or a local file or folder."
        ) from error
    return Table(f"{name}@{split}", tuple(dataset.column_names), len(dataset), _arrow_rows(dataset), Path())


def _arrow_rows(dataset: Any) -> Iterator[Row]:
    # In arrow form images stay the bytes they are; any other form decodes them, slowly and without a guard.
    for table in dataset.with_format("arrow").iter(BATCH_ROWS):
        yield from table.to_pylist()


def _check_columns(table: Table, data: DataConfig) -> None:
    wanted = {"data.problem_column": data.problem_column, "data.answer_column": data.answer_column}
    missing = {key: column for key, column in wanted.items() if column not in table.columns}
    if missing and table.columns:  # an empty file has no columns, and says so as a dataset without rows
        raise DataError(
            f"{table.name} lacks the column(s) {', '.join(map(repr, missing.values()))}. "
            f"Columns found: {', '.join(table.columns)}. Set {' and '.join(missing)} to one of them "
            f"(images come from data.images_column, now {data.images_column!r})."
        )


def _source_row(index: int, row: Row, base: Path, data: DataConfig) -> SourceRow:
    id_column = next((name for name in _ID_COLUMNS if row.get(name) not in (None, "")), None)
    used = {data.problem_column, data.answer_column, data.images_column, id_column}
    return SourceRow(
        index=index,
        row_id=str(row[id_column]) if id_column else None,
        problem=row.get(data.problem_column),
        answer=row.get(data.answer_column),
        images=tuple(images_of(row.get(data.images_column), base)),
        extra={name: _json_value(value) for name, value in row.items() if name not in used},
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
