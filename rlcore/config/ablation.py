"""What an ablation compares, and how long a point may stay behind."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from rlcore.config.base import Frozen


class AblationConfig(Frozen):
    """Points around a base experiment, each trained with every seed. The base itself is always one of them."""

    grid: tuple[str, ...] = ()
    """Dotted key=[value, value] each, values in JSON: every combination of them is a point."""
    points: tuple[tuple[str, ...], ...] = ()
    """Points one by one, each a list of dotted key=value."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Every point is trained with each of them, as seed and as data.shuffle_seed: the same problems in the same
    order."""
    rungs: int = Field(1, ge=1, le=10)
    """Times that the points are compared, the end included. 1: every point trains to its end. More: successive halving,
    a point that is dropped stays at its last checkpoint."""
    keep: float = Field(0.5, gt=0, lt=1)
    """Share of the points (rounded up, the base apart) that trains on after a rung."""
    retries: int = Field(1, ge=0, le=10)
    """Further tries of a point that failed; the others do not wait for it."""

    @model_validator(mode="after")
    def _something_differs_and_seeds_are_distinct(self) -> Self:
        if not self.grid and not self.points:
            raise ValueError(
                "the ablation has neither a grid nor points, so there is nothing to compare with the base. Give a grid "
                "such as training.learning_rate=[1e-4, 3e-4], or points such as algorithm.kl.coefficient=0."
            )
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"ablation seeds are {list(self.seeds)}: give at least one, and each of them once.")
        return self
