"""Original images -> images on the patch grid: ``python -m rlcore.jobs.resize SPEC.json``.

Each distinct image is resized once, before training, to the size that its prompt was counted with.
The trainer's and the sampler's processor then find nothing left to resize.
"""

from __future__ import annotations

import hashlib
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path

from rlcore.artifacts import DatasetRef
from rlcore.data.pixels import load_rgb, read_header, resized
from rlcore.data.prepare.folder import (
    ORIGINALS,
    REJECTS,
    existing_dataset,
    finish_folder,
    load_report,
    progress,
    resized_folder,
)
from rlcore.data.rejects import Reject, Unusable, nothing_usable, read_rejects
from rlcore.data.table import IMAGES, PreparedRow, load_rows
from rlcore.errors import ConfigError, RlflowError, StorageError
from rlcore.files import building
from rlcore.jobs import job_main
from rlcore.specs import ResizeSpec
from rlcore.types import ImageRef

# Lossless at any level. On Geometry3K 2.7 ms an image where the default takes 3.7, for a tenth more bytes.
_PNG_LEVEL = 1
_CHUNK = 16  # images handed to a worker at a time


def resize(spec: ResizeSpec) -> DatasetRef:
    """Resize every distinct image of a prepared dataset, or return the folder that is there already.

    Writes ``DIGEST`` under ``spec.datasets_dir``: problems.parquet, images/, report.json, and rejects.jsonl
    (those of the dataset before, and problems whose image does not decode).

    Raises:
        DataError: no problem is left.
        ConfigError: the dataset was prepared with other pixel bounds than ``spec.data`` has.
        StorageError: an original is missing or changed, no space, or an existing folder with parts missing.
        RlflowError: a worker process died.
    """
    raw, final = Path(spec.dataset.path), resized_folder(spec)
    if found := existing_dataset(final):
        return found
    rows, before = load_rows(raw), load_report(raw)
    if (before.min_pixels, before.max_pixels) != (spec.data.min_pixels, spec.data.max_pixels):
        raise ConfigError(
            f"{raw} was prepared for {before.min_pixels} to {before.max_pixels} pixels, data.min_pixels and "
            f"data.max_pixels are now {spec.data.min_pixels} and {spec.data.max_pixels}. Prepare it again."
        )
    with building(final) as aside:
        (aside / IMAGES).mkdir()
        failures = _resize_all(rows, raw / ORIGINALS, aside / IMAGES, spec.processes)
        kept, new_rejects = _sort(rows, failures)
        rejects = [*read_rejects(raw / REJECTS), *new_rejects]
        if not kept:
            raise nothing_usable(spec.dataset.source, rejects)
        _drop_orphans(aside / IMAGES, kept)
        return finish_folder(
            aside,
            final,
            source=spec.dataset.source,
            columns=before.columns,
            data=spec.data,
            rows=kept,
            rejects=rejects,
        )


def _resize_all(rows: Sequence[PreparedRow], originals: Path, images: Path, processes: int) -> dict[str, Unusable]:
    """Resize each distinct image once; returns the failures by hash."""
    refs = {ref.sha256: ref for row in rows for ref in row.problem.images}
    outcomes = _map(partial(_resize_one, originals, images), list(refs.values()), processes)
    shown = progress(outcomes, "resizing images", len(refs))
    return {sha256: failure for sha256, failure in zip(refs, shown, strict=True) if failure}


def _map(
    resize_one: Callable[[ImageRef], Unusable | None], refs: Sequence[ImageRef], processes: int
) -> Iterator[Unusable | None]:
    if processes == 1 or len(refs) <= _CHUNK:
        yield from map(resize_one, refs)
        return
    # spawn: a forked child would inherit locks of threads that it does not have
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        try:
            yield from pool.map(resize_one, refs, chunksize=_CHUNK)
        except BrokenProcessPool as error:
            raise RlflowError(
                f"one of {processes} resizing processes died, most likely killed for memory. "
                "Give the task more memory or fewer processes, and run again."
            ) from error


def _resize_one(originals: Path, images: Path, ref: ImageRef) -> Unusable | None:
    original, target = originals / ref.sha256, images / f"{ref.sha256}.png"
    try:
        content = original.read_bytes()
    except FileNotFoundError:
        content = b""
    if hashlib.sha256(content).hexdigest() != ref.sha256:
        raise StorageError(f"{original} is missing or changed. Delete the dataset folder and prepare it again.")
    size = ref.file_size
    try:
        header = read_header(content)
        image = load_rgb(content)  # also where the file is kept as it is: it has to decode
    except Unusable as unusable:
        return unusable
    if header.ready and image.size == size:
        target.write_bytes(content)
    else:
        resized(image, size).save(target, format="PNG", compress_level=_PNG_LEVEL)
    return None


def _sort(rows: Sequence[PreparedRow], failures: dict[str, Unusable]) -> tuple[list[PreparedRow], list[Reject]]:
    """Problems whose images are all there, and a reject for each other one."""
    kept, rejects = [], []
    for row in rows:
        failed = next((failures[ref.sha256] for ref in row.problem.images if ref.sha256 in failures), None)
        if failed is None:
            kept.append(row)
        else:
            rejects.append(Reject(row.problem.problem_id, row.row, failed.reason, failed.detail))
    return kept, rejects


def _drop_orphans(images: Path, kept: Sequence[PreparedRow]) -> None:
    """Remove images that only rejected problems used."""
    used = {f"{ref.sha256}.png" for row in kept for ref in row.problem.images}
    for path in images.iterdir():
        if path.name not in used:
            path.unlink()


if __name__ == "__main__":
    job_main(resize, ResizeSpec)
