"""What a training run is made of, and where it stands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcore.adjustments import Adjustments
from rlcore.config import ExperimentConfig
from rlcore.distributed.group import WorkerGroup
from rlcore.ports import Grader, MetricSink
from rlcore.rollout.groups import Group
from rlcore.rollout.state import RolloutState
from rlcore.types import Problem

OnBatch = Callable[[int, Sequence[Group], Sequence[Group]], None]
"""Called once per rollout batch, when its training has ended: the batch's last step, what was generated for it, and the
groups that it was trained on, in their order."""


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """A wired experiment."""

    config: ExperimentConfig
    problems: Sequence[Problem]
    workers: WorkerGroup  # policy and sampler
    grader: Grader
    sink: MetricSink
    on_batch: OnBatch
    adjustments: Adjustments = Adjustments()  # what rollbacks have changed


@dataclass(frozen=True, slots=True)
class TrainState:
    """Where a run stands: with the sharded weights and optimizer it is all that a resume needs."""

    step: int = 0  # optimizer steps taken; also the version of the weights
    nonfinite_in_a_row: int = 0
    kl_coefficient: float | None = None  # None: the configured one
    rollouts: RolloutState = RolloutState()

    def scalars(self) -> dict[str, Any]:
        """What fits into a line of JSON; the rest is in the files of ``save``."""
        return {
            "step": self.step,
            "problems_seen": self.rollouts.problems_seen,
            "postponed": list(self.rollouts.postponed),
            "nonfinite_in_a_row": self.nonfinite_in_a_row,
            "kl_coefficient": self.kl_coefficient,
        }

    def save(self, folder: Path) -> None:
        """Write the pass rates and the groups that are not trained on yet into a checkpoint's folder."""
        self.rollouts.save(folder)

    @classmethod
    def load(
        cls, folder: Path, scalars: Mapping[str, Any], problems: Sequence[Problem], *, mask_truncated: bool
    ) -> TrainState:
        """Read what ``save`` and ``scalars`` wrote.

        Args:
            problems: of the dataset that the run trains on.

        Raises:
            CheckpointError: a group is of a problem that the dataset does not have.
        """
        return cls(
            step=scalars["step"],
            nonfinite_in_a_row=scalars["nonfinite_in_a_row"],
            kl_coefficient=scalars["kl_coefficient"],
            rollouts=RolloutState.load(folder, scalars, problems, mask_truncated=mask_truncated),
        )
