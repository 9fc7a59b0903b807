"""The parts of a training run, and its state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcore.adjustments import Adjustments
from rlcore.config import ExperimentConfig
from rlcore.distributed.group import WorkerGroup
from rlcore.rollout.groups import Group
from rlcore.rollout.state import RolloutState
from rlcore.types import Grader, MetricSink, Problem

OnBatch = Callable[[int, Sequence[Group], Sequence[Group]], None]
"""Called after the training of each rollout batch, with its last step, the groups generated for it, and the groups
trained on, in order."""


def _no_validation(step: int) -> bool:
    """For a run without validation problems."""
    return True


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """The parts of an experiment, connected."""

    config: ExperimentConfig
    problems: Sequence[Problem]
    workers: WorkerGroup  # policy and sampler
    grader: Grader
    sink: MetricSink
    on_batch: OnBatch
    adjustments: Adjustments = Adjustments()  # made by rollbacks
    validate: Callable[[int], bool] = _no_validation
    """Evaluates the policy of a step, which the sampler holds. False: the trainer has to stop before it is done."""


@dataclass(frozen=True, slots=True)
class TrainState:
    """The state of a run. With the sharded weights and optimizer it is all that a resume needs."""

    step: int = 0  # optimizer steps taken; also the version of the weights
    nonfinite_in_a_row: int = 0
    kl_coefficient: float | None = None  # None: the configured one
    rollouts: RolloutState = RolloutState()

    def scalars(self) -> dict[str, Any]:
        """The part that fits into JSON; ``save`` writes the rest."""
        mixture = self.rollouts.mixture
        return {
            "step": self.step,
            "problems_seen": self.rollouts.problems_seen,
            "mixture": None if mixture is None else mixture.to_json(),
            "postponed": list(self.rollouts.postponed),
            "nonfinite_in_a_row": self.nonfinite_in_a_row,
            "kl_coefficient": self.kl_coefficient,
        }

    def save(self, folder: Path) -> None:
        """Write the pass rates and the untrained groups into a checkpoint's folder."""
        self.rollouts.save(folder)

    @classmethod
    def load(
        cls, folder: Path, scalars: Mapping[str, Any], problems: Sequence[Problem], *, mask_truncated: bool
    ) -> TrainState:
        """Restore the state from ``scalars`` and the files of ``save``.

        Args:
            problems: of the run's dataset.

        Raises:
            CheckpointError: the dataset lacks the problem of a group, or has other sources than the run had.
        """
        return cls(
            step=scalars["step"],
            nonfinite_in_a_row=scalars["nonfinite_in_a_row"],
            kl_coefficient=scalars["kl_coefficient"],
            rollouts=RolloutState.load(folder, scalars, problems, mask_truncated=mask_truncated),
        )
