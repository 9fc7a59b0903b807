"""What earlier failures have changed about a run: kept in its folder, told to its next trainer. No torch.

The experiment stays as it was written, its digest too; everything here is beside it, on record, and the same after
every resume.
"""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict

from rlcore.config import ExperimentConfig
from rlcore.errors import ConfigError


class Intervention(BaseModel):
    """A rollback's change: the steps after ``step`` run at another rate and are sampled with another seed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int  # of the checkpoint that was gone back to
    learning_rate_factor: float  # on the configured rate; those of earlier rollbacks are in it
    seed: int  # in place of the experiment's
    rule: str  # the health rule, in words


class Adjustments(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens_per_microbatch: int | None = None
    """In place of the experiment's, after it ran out of memory. The gradient does not depend on it."""
    interventions: tuple[Intervention, ...] = ()
    """In order of their steps."""
    rollbacks: int = 0
    """How often the run has gone back so far."""
    healthy_from: int = 0
    """Health rules look at the steps after this one."""

    def applied_to(self, experiment: ExperimentConfig) -> ExperimentConfig:
        """The experiment as the next trainer computes it: of the adjustments, the one that changes no number."""
        if self.tokens_per_microbatch is None:
            return experiment
        training = experiment.training.model_copy(update={"tokens_per_microbatch": self.tokens_per_microbatch})
        return experiment.model_copy(update={"training": training})

    def with_less_memory(self, experiment: ExperimentConfig) -> Self:
        """Half the token budget.

        Raises:
            ConfigError: half of it could not hold one sequence.
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
        """From the checkpoint of ``step`` on: the learning rate times ``factor``, and a seed that no step has had.

        What an earlier rollback changed after ``step`` has been taken back with the steps; its factor stays in.
        """
        before = self.interventions[-1].learning_rate_factor if self.interventions else 1.0
        rollbacks = self.rollbacks + 1
        fresh = Intervention(
            step=step, learning_rate_factor=before * factor, seed=experiment.seed + 1_000_003 * rollbacks, rule=rule
        )
        kept = tuple(item for item in self.interventions if item.step < step)
        return self.model_copy(update={"interventions": (*kept, fresh), "rollbacks": rollbacks, "healthy_from": step})

    def paused(self, step: int) -> Self:
        """Health rules count from ``step`` on: whoever continues the run has seen what was before."""
        return self.model_copy(update={"healthy_from": step})

    def learning_rate_factor(self, step: int) -> float:
        """Of optimizer step ``step``."""
        intervention = self._at(step)
        return 1.0 if intervention is None else intervention.learning_rate_factor

    def seed(self, step: int, configured: int) -> int:
        """Of the rollout batch that optimizer step ``step`` is the first to train on."""
        intervention = self._at(step)
        return configured if intervention is None else intervention.seed

    def _at(self, step: int) -> Intervention | None:
        return next((item for item in reversed(self.interventions) if item.step < step), None)
