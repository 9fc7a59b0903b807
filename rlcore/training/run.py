"""What a training run is made of, and what one collection gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from rlcore.adjustments import Adjustments
from rlcore.config import ExperimentConfig
from rlcore.distributed.group import WorkerGroup
from rlcore.ports import Grader, MetricSink
from rlcore.training.advantages import ScoredGroup
from rlcore.training.state import TrainState
from rlcore.types import Problem, RolloutGroup

OnBatch = Callable[[int, Sequence[RolloutGroup], Sequence[RolloutGroup]], None]
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
class Drawn:
    """What was asked of the sampler in the time of one step, and what it had drawn in vain."""

    rounds: int = 0
    tokens: int = 0  # of completions
    continued: int = 0  # completions that an older policy had begun
    dropped_stale: int = 0  # groups that would have been trained too late

    def __add__(self, other: Drawn) -> Drawn:
        return Drawn(
            self.rounds + other.rounds,
            self.tokens + other.tokens,
            self.continued + other.continued,
            self.dropped_stale + other.dropped_stale,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Collected:
    """What a step trains on, and what became of everything that was sampled for it."""

    groups: list[ScoredGroup]  # of the step
    generated: Sequence[ScoredGroup]  # for this step, kept or not; empty where the buffer alone fills the step
    drawn: Drawn
    age_max: int  # optimizer steps between the policy of the oldest token and the one that trains on it
    stale: bool = False  # the sampler's log-probs are those of older policies
    filled: int = 0  # groups without signal that take the place of groups with it
    from_buffer: int = 0
    following: Future[Following] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Following:
    """The rollout batch after the one that is trained on."""

    state: TrainState  # with the batch in ``ahead``
    drawn: Drawn
    seconds: float  # of sampling beside the training; 0 where it was not beside
