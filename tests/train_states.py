"""Write a train state and wait until it is on disk."""

from __future__ import annotations

import time
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from rlcore.models.checkpoint import BackgroundSaver


def save_train_state(model: nn.Module, optimizer: Optimizer, folder: Path) -> None:
    """Collective over all ranks."""
    saver = BackgroundSaver()
    saver.begin(model, optimizer, folder)
    while not saver.done():
        time.sleep(0.001)
