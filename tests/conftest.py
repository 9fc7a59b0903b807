"""Shared fixtures: a tiny policy with random weights, and samples over a few drawn pictures."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny policy with random weights, as a Hugging Face folder."""
    from rlcore.config import TinyModelConfig
    from rlcore.models.tiny import create_tiny_policy

    folder = tmp_path_factory.mktemp("model") / "tiny"
    create_tiny_policy(folder, TinyModelConfig(warm_start_steps=0))
    return folder
