"""The folder of a prepared dataset: its name, a hash of everything that decides its content, and its files.

Without torch and transformers, so that a Prefect task can compute the key for its cache.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from rlcore.artifacts import DatasetRef, SourceRows
from rlcore.config import DataConfig, ModelConfig
from rlcore.data.messages import template_text
from rlcore.data.prepare.files import VIDEO_SUFFIXES, image_files, source_files
from rlcore.data.prepare.sources import parse_source
from rlcore.data.rejects import Reject, write_rejects
from rlcore.data.synthetic.sources import COUNTDOWN, SYNTHETIC_SOURCES
from rlcore.data.table import IMAGES, PROBLEMS, DatasetReport, PreparedRow, prompt_stats, write_rows
from rlcore.errors import StorageError
from rlcore.files import file_hash
from rlcore.specs import MixSpec, PrepareSpec, ResizeSpec
from rlcore.types import ImageRef

ORIGINALS = "raw_images"  # of a dataset before resizing: the original files, named by their hash
REJECTS = "rejects.jsonl"

_REPORT = "report.json"

# Raise one of these when the same inputs give another folder: the rules of prepare, resize or mix have changed.
PREPARE_VERSION = 3
RESIZE_VERSION = 1
MIX_VERSION = 1

_DATA = Path(__file__).parents[1]
PROMPT_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "merges.txt",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json",
    "preprocessor_config.json", "processor_config.json",
)  # fmt: skip

T = TypeVar("T")


def dataset_key(spec: PrepareSpec) -> str:
    """Digest of everything that decides what ``prepare`` makes: the source's content and the settings.

    A source or model on a hub counts by its name and revision, because its content is not on this machine. Image files
    that a source names by path count by path, size and modification time.
    """
    data, content = spec.data, _source_content(spec)
    settings = {
        "version": PREPARE_VERSION,
        "source": spec.source,
        "content": content,
        "columns": [data.problem_column, data.answer_column, data.images_column, data.videos_column],
        "max_images": data.max_images,
        "template": template_text(data.template),
        "system_prompt": data.system_prompt,
        "chat_template_arguments": data.chat_template_arguments,
        "pixels": [data.min_pixels, data.max_pixels],
        "max_prompt_tokens": data.max_prompt_tokens,
        "model": _model_content(spec.model),
    }
    # datasets that were prepared before these settings existed keep their name
    if data.layout is not None:
        unset = {"system_prompt"} if data.layout.system_prompt is None else None
        settings["layout"] = data.layout.model_dump(mode="json", exclude=unset)
    if data.chat_template_arguments_column is not None:
        settings["chat_template_arguments_column"] = data.chat_template_arguments_column
    # whether the bytes of a source have videos is not known before they are read
    usual = DataConfig()
    videos = [data.video_fps, data.video_frames]
    if videos != [usual.video_fps, usual.video_frames] or _names_videos(content):
        settings["videos"] = videos
    if data.video_input != usual.video_input:
        settings["video_input"] = data.video_input
    return _digest(settings)


def _names_videos(content: Sequence[object]) -> bool:
    """Whether a part of ``_source_content`` is a video file."""
    return any(isinstance(part, list) and str(part[0]).lower().endswith(VIDEO_SUFFIXES) for part in content)


def resized_key(spec: ResizeSpec) -> str:
    """Digest of what ``resize`` makes. The target sizes are part of the dataset that it reads."""
    return _digest({"version": RESIZE_VERSION, "dataset": spec.dataset.digest})


def prepared_folder(spec: PrepareSpec) -> Path:
    """The folder that ``prepare`` writes."""
    return spec.datasets_dir / f"raw-{dataset_key(spec)}"


def resized_folder(spec: ResizeSpec) -> Path:
    """The folder that ``resize`` writes."""
    return spec.datasets_dir / resized_key(spec)


def mixed_key(spec: MixSpec) -> str:
    """Digest of what ``mix`` makes: the names and datasets of its sources."""
    return _digest({"version": MIX_VERSION, "parts": {name: part.digest for name, part in spec.parts.items()}})


def mixed_folder(spec: MixSpec) -> Path:
    """The folder that ``mix`` writes."""
    return spec.datasets_dir / mixed_key(spec)


def _digest(settings: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def _source_content(spec: PrepareSpec) -> list[object]:
    name, split = parse_source(spec.source, spec.split)
    if spec.source_path is not None:
        files = source_files(spec.source_path, split)
        columns = (spec.data.images_column, spec.data.videos_column)
        root = spec.source_path if spec.source_path.is_dir() else spec.source_path.parent
        outside = (image for file in files for column in columns for image in image_files(file, column))
        return [[file.name, file_hash(file)] for file in files] + [list(_stamp(image, root)) for image in outside]
    if name in SYNTHETIC_SOURCES:
        data = spec.data
        code = [
            file_hash(_DATA / "synthetic" / file) for file in ("sources.py", "__init__.py", SYNTHETIC_SOURCES[name])
        ]
        game = data.countdown.model_dump(mode="json") if name == COUNTDOWN else None
        return [*code, name, split, data.synthetic_problems, data.synthetic_seed, game]
    return [name, split]


def _model_content(model: ModelConfig) -> object:
    if model.path == "tiny":  # its tokenizer is code
        return [model.tiny.task, model.tiny.family, file_hash(_DATA / "tiny.py")]
    folder = Path(model.path)
    if folder.is_dir():
        return [[name, file_hash(folder / name)] for name in PROMPT_FILES if (folder / name).is_file()]
    return [model.path, model.revision]


def _stamp(path: Path, root: Path) -> Iterator[str | int]:
    yield str(path.relative_to(root) if path.is_relative_to(root) else path)
    if path.is_file():
        status = path.stat()
        yield from (status.st_size, status.st_mtime_ns)


def load_report(folder: Path) -> DatasetReport:
    """Read ``report.json``.

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
    source: str,
    columns: Sequence[str],
    data: DataConfig,
    rows: Sequence[PreparedRow],
    rejects: Sequence[Reject],
    sources: tuple[SourceRows, ...] = (),
) -> DatasetRef:
    """Write table, rejects and report into ``aside``, which already holds the images and will be ``final``."""
    write_rows(aside, rows)
    write_rejects(aside / REJECTS, rejects)
    images = {image.sha256: image for row in rows for image in row.problem.images}
    sizes = Counter(_size(image) for image in images.values())
    report = DatasetReport(
        digest=final.name.removeprefix("raw-"),
        source=source,
        columns=list(columns),
        problems=len(rows),
        rejected=dict(Counter(reject.reason for reject in rejects).most_common()),
        distinct_images=len(images),
        image_sizes=dict(sizes.most_common()),
        prompts=prompt_stats(rows),
        min_pixels=data.min_pixels,
        max_pixels=data.max_pixels,
        sources=sources,
    )
    (aside / _REPORT).write_text(report.model_dump_json(indent=1))
    return _ref(final, report)


def _size(image: ImageRef) -> str:
    return f"{image.width}x{image.height}" + (f", {image.frames} frames" if image.is_video else "")


def existing_dataset(final: Path) -> DatasetRef | None:
    """The finished dataset at ``final``, or None if there is no such folder.

    Raises:
        StorageError: parts of the folder are missing.
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
    """The items, with a progress bar if stderr is a terminal."""
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
        sources=report.sources,
    )
