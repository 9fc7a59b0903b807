"""Changes that earlier failures made to a run. They are stored in its folder and passed to its next trainer. No torch.

The experiment and its digest stay as written. The changes are recorded and are the same after every resume.
"""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict

from rlcore.config import ExperimentConfig
from rlcore.errors import ConfigError


class Intervention(BaseModel):
    """A rollback's change: the steps after ``step`` use another learning rate and another sampling seed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int  # of the checkpoint that training resumed from
    learning_rate_factor: float  # of the configured rate; includes earlier rollbacks
    seed: int  # replaces the experiment's
    rule: str  # the health rule as text


class Adjustments(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens_per_microbatch: int | None = None
    """Replaces the experiment's after it ran out of memory. The gradient does not depend on it."""
    interventions: tuple[Intervention, ...] = ()
    """In order of their steps."""
    rollbacks: int = 0
    """Rollbacks of the run so far."""
    healthy_from: int = 0
    """Health rules ignore steps up to this one."""

    def applied_to(self, experiment: ExperimentConfig) -> ExperimentConfig:
        """The experiment with the adjusted memory budget, which changes no number."""
        if self.tokens_per_microbatch is None:
            return experiment
        training = experiment.training.model_copy(update={"tokens_per_microbatch": self.tokens_per_microbatch})
        return experiment.model_copy(update={"training": training})

    def with_less_memory(self, experiment: ExperimentConfig) -> Self:
        """Halve the token budget, down to one longest sequence.

        Raises:
            ConfigError: it is already that small.
        """
        now = self.tokens_per_microbatch or experiment.training.tokens_per_microbatch
        least = -(-experiment.max_sequence_tokens // experiment.training.sequence_parallel)
        if now <= least:
            raise ConfigError(
                f"out of memory with training.tokens_per_microbatch at {now}: the longest sequence that "
                f"data.max_prompt_tokens ({experiment.data.max_prompt_tokens}) and rollout.max_completion_tokens "
                f"({experiment.rollout.max_completion_tokens}) allow needs {least}. Lower one of these two, "
                "rollout.gpu_memory_utilization or rollout.max_sequences, set model.gradient_checkpointing to full, "
                "or raise resources.workers or training.sequence_parallel."
            )
        return self.model_copy(update={"tokens_per_microbatch": max(least, now // 2)})

    def rolled_back(self, step: int, experiment: ExperimentConfig, *, factor: float, rule: str) -> Self:
        """After the checkpoint of ``step``: the learning rate times ``factor``, and a new sampling seed.

        Changes that earlier rollbacks made after ``step`` are dropped with those steps, but their factor is kept.
        """
        before = self.interventions[-1].learning_rate_factor if self.interventions else 1.0
        rollbacks = self.rollbacks + 1
        fresh = Intervention(
            step=step, learning_rate_factor=before * factor, seed=experiment.seed + 1_000_003 * rollbacks, rule=rule
        )
        kept = tuple(item for item in self.interventions if item.step < step)
        return self.model_copy(update={"interventions": (*kept, fresh), "rollbacks": rollbacks, "healthy_from": step})

    def paused(self, step: int) -> Self:
        """Restart the health rules after ``step``, because a person has looked at the run before continuing it."""
        return self.model_copy(update={"healthy_from": step})

    def learning_rate_factor(self, step: int) -> float:
        """For optimizer step ``step``."""
        intervention = self._at(step)
        return 1.0 if intervention is None else intervention.learning_rate_factor

    def seed(self, step: int, configured: int) -> int:
        """Sampling seed of the rollout batch whose first optimizer step is ``step``."""
        intervention = self._at(step)
        return configured if intervention is None else intervention.seed

    def _at(self, step: int) -> Intervention | None:
        return next((item for item in reversed(self.interventions) if item.step < step), None)
