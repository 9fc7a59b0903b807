"""Names of prepared datasets: a hash of everything that decides what is in them.

Light on purpose: no torch, no transformers, so that a Prefect task can use the key as its cache key.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from rlcore.config import ModelConfig
from rlcore.data.prepare.files import image_files, source_files
from rlcore.data.prepare.sources import parse_source
from rlcore.data.prompts import template_text
from rlcore.data.synthetic.sources import COUNTDOWN, DRAWN
from rlcore.specs import PrepareSpec, ResizeSpec

# Raise these when the same inputs give another folder: the rules of prepare, and those of resize.
PREPARE_VERSION = 3
RESIZE_VERSION = 1

_DATA = Path(__file__).parents[1]
_PROMPT_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "merges.txt",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json",
    "preprocessor_config.json", "processor_config.json",
)  # fmt: skip


def dataset_key(spec: PrepareSpec) -> str:
    """Digest of what ``prepare`` will make: source content and every setting that reaches the result.

    A source or model on a hub counts by its name (and revision), since its content is not here to be hashed.
    Image files that a source names by path count by that path, their size and time of change.
    """
    data = spec.data
    settings = {
        "version": PREPARE_VERSION,
        "source": spec.source,
        "content": _source_content(spec),
        "columns": [data.problem_column, data.answer_column, data.images_column, data.videos_column],
        "max_images": data.max_images,
        "template": template_text(data.template),
        "system_prompt": data.system_prompt,
        "chat_template_arguments": data.chat_template_arguments,
        "pixels": [data.min_pixels, data.max_pixels],
        "max_prompt_tokens": data.max_prompt_tokens,
        "model": _model_content(spec.model),
    }
    return _digest(settings)


def resized_key(spec: ResizeSpec) -> str:
    """Digest of what ``resize`` will make. The target sizes are part of the dataset it starts from."""
    return _digest({"version": RESIZE_VERSION, "dataset": spec.dataset.digest})


def prepared_folder(spec: PrepareSpec) -> Path:
    """Where ``prepare`` puts the dataset."""
    return spec.datasets_dir / f"raw-{dataset_key(spec)}"


def resized_folder(spec: ResizeSpec) -> Path:
    """Where ``resize`` puts the dataset."""
    return spec.datasets_dir / resized_key(spec)


def _digest(settings: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def _source_content(spec: PrepareSpec) -> object:
    name, split = parse_source(spec.source, spec.split)
    if spec.source_path is not None:
        files = source_files(spec.source_path, split)
        columns = (spec.data.images_column, spec.data.videos_column)
        root = spec.source_path if spec.source_path.is_dir() else spec.source_path.parent
        outside = (image for file in files for column in columns for image in image_files(file, column))
        return [[file.name, _file_hash(file)] for file in files] + [list(_stamp(image, root)) for image in outside]
    if name in DRAWN:
        data = spec.data
        code = [_file_hash(_DATA / "synthetic" / file) for file in ("sources.py", "splits.py", DRAWN[name])]
        game = data.countdown.model_dump(mode="json") if name == COUNTDOWN else None
        return [*code, name, split, data.synthetic_problems, data.synthetic_seed, game]
    return [name, split]


def _model_content(model: ModelConfig) -> object:
    if model.path == "tiny":  # its tokenizer is code
        return [model.tiny.task, _file_hash(_DATA / "tiny.py")]
    folder = Path(model.path)
    if folder.is_dir():
        return [[name, _file_hash(folder / name)] for name in _PROMPT_FILES if (folder / name).is_file()]
    return [model.path, model.revision]


def _file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _stamp(path: Path, root: Path) -> Iterator[str | int]:
    yield str(path.relative_to(root) if path.is_relative_to(root) else path)
    if path.is_file():
        status = path.stat()
        yield from (status.st_size, status.st_mtime_ns)
