"""Learning rate by optimizer step."""

from __future__ import annotations

from rlcore.config import TrainingConfig


def learning_rate(step: int, config: TrainingConfig) -> float:
    """The rate of optimizer step ``step``, counted from 1: linear warm-up, then constant. Never 0."""
    if step < 1:
        raise ValueError(f"optimizer steps count from 1, got {step}")
    return config.learning_rate * min(1.0, step / config.warmup_steps) if config.warmup_steps else config.learning_rate
