"""How a run is cut into segments, recovered, watched, evaluated and placed. All of it may change in the middle of a
run."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rlcore.config.base import Frozen


class SegmentConfig(Frozen):
    steps: int = Field(20, ge=1)
    """Optimizer steps per segment. Each segment ends with a committed checkpoint."""
    max_minutes: float | None = Field(None, gt=0)
    """A segment also ends at the first step after this many minutes."""
    keep_checkpoints: int = Field(2, ge=1)
    """Number of latest checkpoints to keep. An older one is deleted only after its successor is committed and
    verified."""
    keep_every: int | None = Field(None, ge=1)
    """Also keep the checkpoint of every k-th segment."""
    keep_best: int = Field(0, ge=0)
    """Also keep the checkpoints of this many best segments."""
    best_metric: str = "reward/mean"
    """The best segments have the highest mean of this metric over their steps. eval/accuracy is the accuracy on the
    validation problems, which the trainer measures at each segment's end (evaluation.every_steps)."""
    merge: Literal["last", "best"] = "last"
    """Which checkpoint the flow evaluates after training, merges and registers. best: that of the segment with the
    highest best_metric, the first one if several are equal; needs keep_best of at least 1."""
    hang_minutes: float = Field(30.0, gt=0)
    """A trainer that makes no progress for this long counts as stuck: it is killed and restarted, and the stacks of all
    its threads are saved. Progress is a finished phase of a step, a finished start, or more bytes of a checkpoint that
    is being written."""

    def max_kept(self, segments: int) -> int:
        """Checkpoints that a run of this many segments keeps, at most."""
        every = 0 if self.keep_every is None else segments // self.keep_every
        return min(segments, self.keep_checkpoints + every + self.keep_best)

    @model_validator(mode="after")
    def _keeps_what_it_merges(self) -> Self:
        if self.merge == "best" and self.keep_best == 0:
            raise ValueError(
                "segment.merge is best and segment.keep_best is 0: the best checkpoint may be deleted before it is "
                "merged. Set keep_best to 1 or more, or merge to last."
            )
        return self


class RecoveryConfig(Frozen):
    attempts: int = Field(3, ge=0)
    """How often the recover flow restarts a run without progress. The count starts anew with each committed step."""
    silence_seconds: float = Field(120.0, gt=0)
    """The recover flow treats a driver as lost after watching it for this long without a sign of life."""


class HealthRule(Frozen):
    """A metric that exceeds its bound for ``for_steps`` consecutive steps, or falls below its best. Steps without the
    metric are ignored; NaN exceeds every bound."""

    metric: str
    """A name from the journal and MLflow, such as ``loss/kl_ref``."""
    above: float | None = None
    """Values above this breach the rule."""
    below: float | None = None
    """Values below this breach the rule."""
    below_best_by: float | None = Field(None, gt=0)
    """The mean of the last ``for_steps`` values is this much below the best earlier mean of as many values."""
    for_steps: int = Field(1, ge=1)
    """Consecutive steps that log the metric."""
    action: Literal["warn", "pause", "rollback"] = "warn"
    """warn: send an event, write a report page, and continue. pause: also commit a checkpoint and end the run until
    someone continues it. rollback: also continue from the last checkpoint, with the changes below."""
    learning_rate_factor: float = Field(0.5, gt=0, le=1)
    """For rollback: factor on the learning rate from there on. The sampling seed changes too."""
    max_rollbacks: int = Field(2, ge=1, le=50)
    """Rollbacks of the run by any rule. The next one becomes a pause."""

    @model_validator(mode="after")
    def _has_one_bound(self) -> Self:
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


class EvaluationConfig(Frozen):
    problems: int | None = Field(None, ge=1)
    """Number of validation problems, from the start of the dataset. null: all."""
    samples: int = Field(1, ge=1)
    """Completions per problem."""
    temperature: float = Field(1.0, ge=0)
    """Sampling temperature. 0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """1 keeps the whole distribution."""
    seed: int = 0
    """Sampling seed."""
    group_column: str | None = None
    """Column of the validation data, such as data_source or category: accuracy is also reported for each of its values.
    null: for each source of ``data.mixture`` that has validation problems, if there are any."""
    every_steps: Annotated[int, Field(ge=1)] | Literal["segment"] | None = "segment"
    """When the trainer evaluates, with its own samplers. segment: before step 1 and at the end of each segment. A
    number: before step 1, after each rollout batch that reaches a multiple of this number of steps, and after the last
    step. null: never, and the flow evaluates before and after training in a process of its own. Training is the same
    with every value."""

    patience: int | None = Field(None, ge=1)
    """Stop training early: at the end of a segment, after this many evaluations by the trainer in a row whose accuracy
    was not above the highest before them. null: train all steps."""
    find_duplicates: bool = True
    """Find the validation problems that training has too, while training runs. The page and MLflow then have the
    accuracy on the other problems too."""

    def is_due(self, before: int, after: int) -> bool:
        """Whether the trainer evaluates after a rollout batch that takes the run from step ``before`` to ``after``,
        unless a segment ends there."""
        return isinstance(self.every_steps, int) and after // self.every_steps > before // self.every_steps

    def is_due_at_segment_end(self, *, last: bool) -> bool:
        """Whether the trainer evaluates at the end of a segment. ``last``: it is the run's last one."""
        return self.every_steps == "segment" or (last and self.every_steps is not None)

    def suite(self) -> dict[str, object]:
        """The settings that the numbers of an evaluation depend on."""
        values = self.model_dump(mode="json", exclude={"every_steps", "patience", "find_duplicates"})
        if self.group_column is None:  # keys of evaluations that were made before this setting existed stay the same
            del values["group_column"]
        return values

    @model_validator(mode="after")
    def _greedy_needs_one_sample(self) -> Self:
        if self.temperature == 0 and self.samples > 1:
            raise ValueError(
                f"evaluation.samples is {self.samples} at evaluation.temperature 0: greedy answers are all the same. "
                "Set samples to 1, or the temperature above 0."
            )
        return self

    @model_validator(mode="after")
    def _patience_needs_evaluations(self) -> Self:
        if self.patience is not None and self.every_steps is None:
            raise ValueError(
                f"evaluation.patience is {self.patience} and evaluation.every_steps is null: the trainer evaluates "
                "nothing. Set every_steps to segment or a number, or patience to null."
            )
        return self


class ResourceConfig(Frozen):
    workers: int = Field(1, ge=1)
    """Ray actors that train, one per GPU (or CPU core). Each has a shard of the policy and, without rollout_workers, a
    sampler."""
    rollout_workers: int = Field(0, ge=0)
    """Ray actors that only sample, on their own devices. With training.max_staleness 1 or rollout.partial.prefetch they
    sample the next rollout batch while this one trains. 0: every worker samples and trains."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda if there is a GPU."""
    threads_per_worker: int = Field(1, ge=1)
    """CPU only: threads per worker."""
    wait_minutes: float = Field(10.0, gt=0)
    """How long workers wait for devices of a Ray cluster that are in use, or whose node is being replaced, before the
    attempt fails."""
    deterministic: bool = False
    """GPU only: slower kernels that give the same bits for the same input. CPU runs are always deterministic."""

    @property
    def devices(self) -> int:
        """GPUs, or CPU cores, of all workers."""
        return self.workers + self.rollout_workers
