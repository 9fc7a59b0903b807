"""When the metrics say that a run has gone wrong, and what to do then."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rlcore.config.base import Frozen


class HealthRule(Frozen):
    """A metric beyond its bound for ``for_steps`` steps in a row, or fallen from its best. Steps that lack the metric
    are left out; a value that is no number is beyond every bound."""

    metric: str
    """A name of the journal and of MLflow, such as ``loss/kl_ref``."""
    above: float | None = None
    """Breached by values above it."""
    below: float | None = None
    """Breached by values below it."""
    below_best_by: float | None = Field(None, gt=0)
    """The mean of the last ``for_steps`` values is this much below the best mean of as many values before."""
    for_steps: int = Field(1, ge=1)
    """Steps in a row that log the metric."""
    action: Literal["warn", "pause", "rollback"] = "warn"
    """warn: an event and a page, training goes on. pause: the same, a committed checkpoint, and the run ends until
    somebody continues it. rollback: the same, and the run goes on from the last checkpoint, changed as below."""
    learning_rate_factor: float = Field(0.5, gt=0, le=1)
    """For rollback: times the learning rate from there on. The sampling seed is another one as well."""
    max_rollbacks: int = Field(2, ge=1, le=50)
    """Rollbacks of the run, whichever rule asked for them; the one after them is a pause."""

    @model_validator(mode="after")
    def _one_bound(self) -> Self:
        bounds = [name for name in ("above", "below", "below_best_by") if getattr(self, name) is not None]
        if len(bounds) != 1:
            raise ValueError(
                f"the health rule on {self.metric} has {' and '.join(bounds) or 'no bound'}. Give it exactly one of "
                "above, below and below_best_by."
            )
        return self

    def __str__(self) -> str:
        steps = f"{self.for_steps} steps" if self.for_steps > 1 else "1 step"
        if self.above is not None:
            return f"{self.metric} above {self.above:g} for {steps}"
        if self.below is not None:
            return f"{self.metric} below {self.below:g} for {steps}"
        return f"{self.metric}, mean of {steps}, more than {self.below_best_by:g} below its best"
