"""Warm-started tiny policies, kept on disk between runs of the tests: making one takes up to a minute."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from rlcore.config import TinyModelConfig
from rlcore.data.tiny import build_processor, build_text_tokenizer
from rlcore.files import building
from rlcore.models.loading import save_published
from rlcore.models.tiny import build_model, build_text_model, warm_start
from tasks.store.made import content_key

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class WarmStarted:
    folder: Path  # Hugging Face's
    steps: int  # that the warm start took


def warm_started(config: TinyModelConfig) -> WarmStarted:
    """The policy, made by the first caller and by nobody else at the same time.

    The folder's name has a digest of the configuration, of the code that makes the policy and of its libraries'
    versions. ``RLFLOW_TEST_CACHE`` names another place than ``.pytest_cache/rlflow``; remove it to make all again.
    """
    cache = Path(os.environ.get("RLFLOW_TEST_CACHE", ROOT / ".pytest_cache" / "rlflow"))
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / content_key("model", config.model_dump_json(), "rlcore/models", "rlcore/data", "rlcore/config")
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            with building(folder) as unfinished:
                (unfinished / "steps").write_text(str(_make(unfinished, config)))
    return WarmStarted(folder, int((folder / "steps").read_text()))


def _make(folder: Path, config: TinyModelConfig) -> int:
    processor: Any = build_processor(config.family) if config.task == "geometry" else build_text_tokenizer()
    geometry = config.task == "geometry"
    model: Any = build_model(config.family, config.seed) if geometry else build_text_model(processor, config.seed)
    steps = warm_start(model, processor, config)
    save_published(model, folder)
    return steps
