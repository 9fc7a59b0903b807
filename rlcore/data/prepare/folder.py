"""The folder of a prepared dataset: what is in it, and how it comes into being whole or not at all."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from rlcore.artifacts import DatasetRef
from rlcore.config import DataConfig
from rlcore.data.rejects import Reject, write_rejects
from rlcore.data.table import IMAGES, PROBLEMS, DatasetReport, PreparedRow, prompt_stats, write_rows
from rlcore.errors import StorageError

ORIGINALS = "raw_images"  # of a dataset before resizing: files as they came, named by their hash
REJECTS = "rejects.jsonl"

_REPORT = "report.json"

T = TypeVar("T")


def load_report(folder: Path) -> DatasetReport:
    """What ``report.json`` says.

    Raises:
        StorageError: it is missing or damaged.
    """
    try:
        return DatasetReport.model_validate_json((folder / _REPORT).read_bytes())
    except (OSError, ValueError) as error:
        raise StorageError(f"{folder / _REPORT} is unreadable: {error}. Delete the folder and run again.") from error


def finish_folder(
    aside: Path,
    final: Path,
    *,
    digest: str,
    source: str,
    columns: Sequence[str],
    data: DataConfig,
    rows: Sequence[PreparedRow],
    rejects: Sequence[Reject],
) -> DatasetRef:
    """Write table, rejects and report into ``aside``, where the images are already.

    The reference returned points at ``final``.
    """
    write_rows(aside, rows)
    write_rejects(aside / REJECTS, rejects)
    images = {image.sha256: image for row in rows for image in row.problem.images}
    sizes = Counter(f"{image.width}x{image.height}" for image in images.values())
    report = DatasetReport(
        digest=digest,
        source=source,
        columns=list(columns),
        problems=len(rows),
        rejected=dict(Counter(reject.reason for reject in rejects).most_common()),
        distinct_images=len(images),
        image_sizes=dict(sizes.most_common()),
        prompts=prompt_stats(rows),
        min_pixels=data.min_pixels,
        max_pixels=data.max_pixels,
    )
    (aside / _REPORT).write_text(report.model_dump_json(indent=1))
    return _ref(final, report)


def existing_dataset(final: Path) -> DatasetRef | None:
    """The finished dataset at ``final``, or None where there is none.

    Raises:
        StorageError: the folder is there but parts of it are missing.
    """
    if not final.exists():
        return None
    parts = [final / name for name in (PROBLEMS, REJECTS, _REPORT)]
    if all(part.is_file() for part in parts):
        report = load_report(final)
        images = sum(1 for name in (ORIGINALS, IMAGES) if (final / name).is_dir() for _ in (final / name).iterdir())
        if images == report.distinct_images:
            return _ref(final, report)
    raise StorageError(f"{final} is not complete: files are missing. Delete the folder and run again.")


def progress(items: Iterable[T], text: str, total: int | None) -> Iterator[T]:
    """The items, with a progress bar on stderr where that is a terminal."""
    if not sys.stderr.isatty():
        yield from items
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(items, text, total=total, console=Console(stderr=True), transient=True)


def _ref(folder: Path, report: DatasetReport) -> DatasetRef:
    return DatasetRef(
        path=str(folder),
        digest=report.digest,
        source=report.source,
        num_problems=report.problems,
        num_rejected=sum(report.rejected.values()),
        num_images=report.distinct_images,
        max_prompt_tokens=report.prompts.max,
    )
