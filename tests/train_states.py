"""Write a train state and wait until it is on disk; read the weights of one."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rlcore.models.checkpoint import BackgroundSaver, read_tensors, stored_tensors
from rlcore.models.checkpoint_weights import CheckpointWeights


def save_train_state(model: nn.Module, optimizer: Optimizer, folder: Path) -> None:
    """Collective over all ranks."""
    saver = BackgroundSaver()
    saver.begin(model, optimizer, folder)
    while not saver.done():
        time.sleep(0.001)


def load_full_weights(folder: Path, base: Path | None = None) -> dict[str, Tensor]:
    """All weights of a train state by name, a tied one once.

    Args:
        base: the model folder that the run started from. Needed if the train state holds adapters.
    """
    if base is not None:
        return {name: value for bucket in CheckpointWeights(folder, base).buckets() for name, value in bucket.items()}
    stored = {key.removeprefix("model."): e for key, e in stored_tensors(folder).items() if key.startswith("model.")}
    weights = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in stored.items()}
    read_tensors(folder, {"model": weights})
    return weights
