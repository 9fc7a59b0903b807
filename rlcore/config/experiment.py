"""ExperimentConfig: everything that defines an experiment, and the only home of defaults.

Frozen, typos refused, checked as a whole before a GPU is touched. Machine facts (folders, servers, the
trainer's interpreter) are not here but in ``infra/settings.py``.
"""

from __future__ import annotations

import hashlib
import json
from typing import Literal, Self

from pydantic import Field, model_validator

from rlcore.config.algorithm import AlgorithmConfig, PassAtKAdvantage, RemaxAdvantage
from rlcore.config.base import Frozen, flatten
from rlcore.config.data import DataConfig
from rlcore.config.health import HealthRule
from rlcore.config.model import ModelConfig
from rlcore.config.reward import MathReward, RewardConfig
from rlcore.config.rollout import PartialRolloutConfig, RolloutConfig
from rlcore.config.training import TrainingConfig

# Keys (or beginnings of keys) of what may change in the middle of a run: memory, speed, cutting and measuring. Every
# other value is the science: what is learned depends on it.
NOT_SCIENCE = (
    "resources.",
    "segment.",
    "evaluation.",
    "recovery.",
    "health",
    "reward.processes",
    "training.tokens_per_microbatch",
    "training.compile_blocks",
    "training.reshard_after_forward",
    "training.sequence_parallel",
    "training.offload",
    "model.gradient_checkpointing",
    "rollout.gpu_memory_utilization",
    "rollout.kv_cache_mib",
    "rollout.mismatch_alarm",
    "rollout.tensor_parallel",
    "rollout.max_sequences",
    "rollout.scheduler_steps_per_call",
    "rollout.sleep",
    "rollout.enforce_eager",
)
STEPS = "training.steps"  # may be raised: the rate of a step does not depend on how many follow


class SegmentConfig(Frozen):
    steps: int = Field(20, ge=1)
    """Optimizer steps of one segment; each segment ends in a committed checkpoint."""
    max_minutes: float | None = Field(None, gt=0)
    """A segment also ends at the first step after this many minutes."""
    keep_checkpoints: int = Field(2, ge=1)
    """Latest checkpoints kept. An older one goes only after its successor is committed and verified."""
    keep_every: int | None = Field(None, ge=1)
    """The checkpoint of every k-th segment is kept as well."""
    keep_best: int = Field(0, ge=0)
    """Checkpoints of this many best segments are kept as well."""
    best_metric: str = "reward/mean"
    """A segment's mean of this metric says how good it is; the highest is best."""
    hang_minutes: float = Field(30.0, gt=0)
    """Without a finished phase of a step, a finished start, or more bytes of the checkpoint that it waits for, for this
    long the trainer counts as stuck: the stacks of all its threads are kept, it is killed and started again."""

    def max_kept(self, segments: int) -> int:
        """Checkpoints that a run of this many segments keeps at most."""
        every = 0 if self.keep_every is None else segments // self.keep_every
        return min(segments, self.keep_checkpoints + every + self.keep_best)


class RecoveryConfig(Frozen):
    attempts: int = Field(3, ge=0)
    """How often the recover flow brings a run back before a person has to look, counted anew with each committed
    step."""
    silence_seconds: float = Field(120.0, gt=0)
    """A driver counts as lost when recover has watched it for this long and seen no sign of life."""


class EvaluationConfig(Frozen):
    problems: int | None = Field(None, ge=1)
    """Validation problems used, from the front. None: all."""
    samples: int = Field(1, ge=1)
    """Completions per problem."""
    temperature: float = Field(1.0, ge=0)
    """0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """1 keeps the whole distribution."""
    seed: int = 0
    """Of sampling."""

    @model_validator(mode="after")
    def _greedy_is_one_sample(self) -> Self:
        if self.temperature == 0 and self.samples > 1:
            raise ValueError(
                f"evaluation.samples is {self.samples} at evaluation.temperature 0: greedy answers are all the same. "
                "Set samples to 1, or the temperature above 0."
            )
        return self


class ResourceConfig(Frozen):
    workers: int = Field(1, ge=1)
    """Ray actors that train, one per GPU (or per CPU core): each holds a policy shard and, without rollout_workers, a
    sampler."""
    rollout_workers: int = Field(0, ge=0)
    """Ray actors that only sample, on devices of their own. With training.max_staleness 1, or with
    rollout.partial.prefetch, they sample the next rollout batch while this one trains. 0: every worker samples as well
    as trains."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is a GPU."""
    threads_per_worker: int = Field(1, ge=1)
    """CPU only: threads of each worker."""
    wait_minutes: float = Field(10.0, gt=0)
    """How long workers may wait for devices of a Ray cluster that are taken, or whose node died and is being replaced,
    before the try counts as failed."""
    deterministic: bool = False
    """GPU only: kernels that give the same bits for the same input, slower. On the CPU every run is exact as it is."""

    @property
    def devices(self) -> int:
        """GPUs, or CPU cores, of all workers."""
        return self.workers + self.rollout_workers


class ExperimentConfig(Frozen):
    """One experiment, complete."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$", max_length=60)
    """Of the experiment in prefect.yaml and in MLflow; runs, artifacts and models are named after it."""
    seed: int = 0
    """Seed of everything that training draws: completions, and the first adapters of LoRA."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = MathReward()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    training: TrainingConfig = TrainingConfig()
    segment: SegmentConfig = SegmentConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    resources: ResourceConfig = ResourceConfig()
    health: tuple[HealthRule, ...] = ()
    """What docs/reliability.md calls health rules, looked at after every rollout batch."""

    @model_validator(mode="after")
    def _arithmetic_works_out(self) -> Self:
        group, per_step, updates = (
            self.rollout.group_size,
            self.training.problems_per_batch,
            self.training.mini_batches,
        )
        advantage, steps_per_batch = self.algorithm.advantage, self.training.steps_per_batch
        if group < advantage.min_group_size:
            raise ValueError(
                f"rollout.group_size is {group}: {advantage.name} compares completions of one problem, so a group of "
                "one has no advantage and nothing is learned. Set it to 2 or more, or algorithm.advantage.name to "
                "remax or reinforce_plus_plus."
            )
        if isinstance(advantage, PassAtKAdvantage) and advantage.k >= group:
            raise ValueError(
                f"algorithm.advantage.k is {advantage.k}, and a group has {group} completions: with one subset "
                "nothing is learned. Lower it, or raise rollout.group_size."
            )
        adaptive, completions = self.algorithm.kl.adaptive, group * per_step
        if adaptive is not None and completions >= 5 * adaptive.horizon:
            raise ValueError(
                f"algorithm.kl.adaptive.horizon is {adaptive.horizon} and a rollout batch has {completions} "
                "completions: one batch could take the coefficient to 0. Set it to the completions of several batches."
            )
        for name, steps in (("training.steps", self.training.steps), ("segment.steps", self.segment.steps)):
            if steps % steps_per_batch:
                raise ValueError(
                    f"{name} ({steps}) is no multiple of training.mini_batches * training.ppo_epochs "
                    f"({steps_per_batch}): a segment has to end where a rollout batch is used up. "
                    f"Set it to a multiple of {steps_per_batch}."
                )
        overlong, budget = self.reward.overlong, self.rollout.max_completion_tokens
        if overlong is not None and overlong.buffer_tokens > budget:
            raise ValueError(
                f"reward.overlong.buffer_tokens ({overlong.buffer_tokens}) is above rollout.max_completion_tokens "
                f"({budget}): every completion would be punished. Set it to at most {budget}."
            )
        if per_step % updates:
            raise ValueError(
                f"training.mini_batches ({updates}) does not divide training.problems_per_batch ({per_step}). "
                f"Set it to a divisor of {per_step}."
            )
        longest = self.data.max_prompt_tokens + self.rollout.max_completion_tokens
        sequence = self.training.sequence_parallel
        if longest > self.training.tokens_per_row:
            raise ValueError(
                f"training.tokens_per_microbatch ({self.training.tokens_per_microbatch}) cannot hold one sequence: "
                f"data.max_prompt_tokens ({self.data.max_prompt_tokens}) + rollout.max_completion_tokens "
                f"({self.rollout.max_completion_tokens}) = {longest}. Raise the first to at least "
                f"{-(-longest // sequence)}, or training.sequence_parallel, or lower a length."
            )
        if self.resources.workers % sequence:
            raise ValueError(
                f"training.sequence_parallel ({sequence}) does not divide resources.workers "
                f"({self.resources.workers}). Set it to a divisor of {self.resources.workers}; 1 turns it off."
            )
        tensor = self.rollout.tensor_parallel
        for name, workers in (
            ("resources.workers", self.resources.workers),
            ("resources.rollout_workers", self.resources.rollout_workers),
        ):
            if workers % tensor:
                raise ValueError(
                    f"rollout.tensor_parallel ({tensor}) does not divide {name} ({workers}). Set it to a divisor of "
                    f"{workers}; 1 gives each worker an engine of its own."
                )
        if tensor > 1 and self.model.lora is not None:
            raise ValueError(
                f"rollout.tensor_parallel is {tensor} and model.lora set: that each part of an adapter reached its "
                "place in an engine of several workers cannot be proved. Set rollout.tensor_parallel to 1, or "
                "model.lora to null."
            )
        trained = self.model.compute_dtype
        if self.model.lora is not None and self.rollout.dtype in ("float32", "float16") and trained != "float32":
            raise ValueError(
                f"rollout.dtype is {self.rollout.dtype}, model.compute_dtype {trained}, and model.lora set: the engine "
                "would read the weights that are not trained from the model folder in a finer dtype than the trainer "
                "holds them in. Set rollout.dtype to auto, or model.compute_dtype to float32."
            )
        check_staleness(self)
        if per_step % self.resources.workers:
            raise ValueError(
                f"training.problems_per_batch ({per_step}) does not split evenly over resources.workers "
                f"({self.resources.workers}). Set it to a multiple of {self.resources.workers}."
            )
        return self

    @property
    def max_sequence_tokens(self) -> int:
        return self.data.max_prompt_tokens + self.rollout.max_completion_tokens

    @property
    def prefetch(self) -> bool:
        """Whether each batch is sampled by the policy that the batch before it starts from."""
        partial = self.rollout.partial
        return self.training.max_staleness > 0 if partial is None else partial.prefetch

    @property
    def num_segments(self) -> int:
        return -(-self.training.steps // self.segment.steps)

    def digest(self) -> str:
        """Hash of every value; two experiments with the same digest are the same experiment."""
        canonical = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    def science_digest(self) -> str:
        """Hash of every value that what is learned depends on; it stays when a run is continued on other machines,
        in other segments, or for more steps."""
        science = {key: value for key, value in self.flat().items() if key != STEPS and not key.startswith(NOT_SCIENCE)}
        return hashlib.sha256(json.dumps(science, sort_keys=True).encode()).hexdigest()[:16]

    def flat(self) -> dict[str, str | int | float | bool | None]:
        """Dotted keys to scalar values, as logged to MLflow and as accepted by overrides."""
        return dict(flatten(self.model_dump(mode="json")))


def check_staleness(config: ExperimentConfig) -> None:
    """
    Raises:
        ValueError: a bound on staleness that cannot be kept, or what does not go with stale samples.
    """
    stale, algorithm = config.training.max_staleness, config.algorithm
    if config.rollout.partial is not None:
        _check_partial(config, config.rollout.partial)
    elif stale > 1 and algorithm.dynamic_sampling is None:
        raise ValueError(
            f"training.max_staleness is {stale} and rollout.partial null: only one batch is sampled ahead. Set "
            "max_staleness to 0 or 1, or rollout.partial.tokens_per_round."
        )
    if stale and algorithm.correction is None:
        raise ValueError(
            f"training.max_staleness is {stale} and algorithm.correction null: the policy that trains would take "
            "another policy's completions for its own. Set algorithm.correction.name to truncate or mask, or "
            "max_staleness to 0."
        )


def _check_partial(config: ExperimentConfig, partial: PartialRolloutConfig) -> None:
    stale, budget = config.training.max_staleness, config.rollout.max_completion_tokens
    least, why = (2, ", one of them for sampling one batch ahead") if partial.prefetch else (1, "")
    if stale < least:
        raise ValueError(
            f"rollout.partial is set and training.max_staleness {stale}: what is carried over is of an older policy. "
            f"Set max_staleness to {least} or more{why}, or rollout.partial to null."
        )
    batches = stale + 1 - partial.prefetch
    if partial.in_flight > batches:
        raise ValueError(
            f"rollout.partial.in_flight is {partial.in_flight:g}: a group has {batches} rollout batches to be trained "
            f"in, with training.max_staleness {stale} and rollout.partial.prefetch {str(partial.prefetch).lower()}, "
            f"so more groups than fit into these would be too old. Set in_flight to {batches} or less, or raise "
            "max_staleness."
        )
    if partial.tokens_per_round > budget:
        raise ValueError(
            f"rollout.partial.tokens_per_round ({partial.tokens_per_round}) is above rollout.max_completion_tokens "
            f"({budget}), where a completion ends. Set it to at most {budget}."
        )
    if isinstance(config.algorithm.advantage, RemaxAdvantage):
        raise ValueError(
            "rollout.partial is set and algorithm.advantage.name is remax: its greedy baseline is of one policy, the "
            "completions of several. Set rollout.partial to null or take another estimator."
        )
