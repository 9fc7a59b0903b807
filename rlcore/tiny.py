"""Where the embedded tiny policies live."""

from __future__ import annotations

import hashlib
from pathlib import Path

from rlcore.config import TinyModelConfig

_TINY_SOURCES = {
    "geometry": ("models/tiny.py", "models/tiny_parts.py", "data/synthetic.py", "data/drawn.py"),
    "sums": ("models/tiny_text.py", "models/tiny_parts.py", "data/arithmetic.py", "data/drawn.py"),
    "countdown": ("models/tiny_text.py", "models/tiny_parts.py", "data/arithmetic.py", "data/drawn.py"),
}


def tiny_folder(models_dir: Path, config: TinyModelConfig) -> Path:
    """Where the tiny policy of this configuration, made by this code, lives."""
    digest = hashlib.sha256(config.model_dump_json().encode())
    for name in _TINY_SOURCES[config.task]:
        digest.update((Path(__file__).parent / name).read_bytes())
    return models_dir / f"tiny-{digest.hexdigest()[:16]}"
