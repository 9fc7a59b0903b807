"""ExperimentConfig: everything that defines an experiment, and the only place of defaults.

Frozen, without unknown keys, and checked as a whole before a GPU is used. Facts about machines (folders, servers, the
trainer's interpreter) are in ``infra/settings.py``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from pydantic import Field, model_validator

from rlcore.config.algorithm import AlgorithmConfig, PassAtKAdvantage, RemaxAdvantage
from rlcore.config.base import Frozen, flatten
from rlcore.config.data import DataConfig
from rlcore.config.policy import ModelConfig, PartialRolloutConfig, RolloutConfig, TrainingConfig
from rlcore.config.reward import MathReward, RewardConfig
from rlcore.config.run import EvaluationConfig, HealthRule, RecoveryConfig, ResourceConfig, SegmentConfig

# Keys, or beginnings of keys, that may change in the middle of a run: memory, speed, segments and measurements. All
# other values affect the results.
FREE_SETTINGS = (
    "resources.", "segment.", "evaluation.", "recovery.", "health", "reward.processes",
    "reward.judge.url", "reward.judge.key_variable", "reward.judge.budget", "reward.judge.concurrency",
    "reward.judge.retries", "reward.judge.timeout_seconds", "reward.judge.outage_minutes",
    "reward.model.device", "reward.model.batch_size",
    "model.gradient_checkpointing", "model.check",
    "training.tokens_per_microbatch", "training.compile_blocks", "training.reshard_after_forward",
    "training.sequence_parallel", "training.offload",
    "rollout.gpu_memory_utilization", "rollout.kv_cache_mib", "rollout.mismatch_alarm", "rollout.tensor_parallel",
    "rollout.max_sequences", "rollout.scheduler_steps_per_call", "rollout.sleep", "rollout.enforce_eager",
    "rollout.compile_engine",
)  # fmt: skip
STEPS = "training.steps"  # may be raised: the learning rate of a step does not depend on how many follow

Scalar = str | int | float | bool | None


class ExperimentConfig(Frozen):
    """One experiment, complete."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$", max_length=60)
    """Name in prefect.yaml and in MLflow. Names of runs, artifacts and models derive from it."""
    seed: int = 0
    """Seed of sampling and of LoRA's initial adapters."""
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
    """Health rules (docs/reliability.md), checked after every rollout batch."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        broken = [*_broken_batch_rules(self), *_broken_length_rules(self), *_broken_placement_rules(self)]
        broken += [*_broken_staleness_rules(self), *_broken_quantization_rules(self), *_broken_exact_rules(self)]
        if broken:
            raise ValueError("\n- ".join(broken))
        return self

    @property
    def max_sequence_tokens(self) -> int:
        return self.data.max_prompt_tokens + self.rollout.max_completion_tokens

    @property
    def prefetch(self) -> bool:
        """Whether the policy that trains on a batch samples the next one."""
        partial = self.rollout.partial
        return self.training.max_staleness > 0 if partial is None else partial.prefetch

    @property
    def rewards(self) -> dict[str, RewardConfig]:
        """The rewards in use, by name of a source of ``data.mixture``. "": of all other problems."""
        sources = self.data.mixture
        own = {name: source.reward for name, source in sorted(sources.items()) if source.reward is not None}
        elsewhere = len(own) < len(sources) or not self.data.sources("validation")
        return {"": self.reward, **own} if elsewhere else own

    @property
    def num_segments(self) -> int:
        return -(-self.training.steps // self.segment.steps)

    def digest(self) -> str:
        """Hash of all values. Experiments with the same digest are the same experiment."""
        canonical = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    def results_digest(self) -> str:
        """Hash of the values that affect results. It stays the same when a run continues on other machines, in
        other segments, or for more steps."""
        values = {k: v for k, v in self.flat().items() if k != STEPS and not k.startswith(FREE_SETTINGS)}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]

    def flat(self) -> dict[str, Scalar]:
        """Dotted keys and scalar values, as MLflow logs them and overrides set them."""
        leaves = dict(flatten(self.model_dump(mode="json")))
        return {key: json.dumps(leaf) if isinstance(leaf, dict | list) else leaf for key, leaf in leaves.items()}


def _broken_batch_rules(config: ExperimentConfig) -> Iterator[str]:
    training, group, advantage = config.training, config.rollout.group_size, config.algorithm.advantage
    problems, steps_per_batch = training.problems_per_batch, training.steps_per_batch
    if group < advantage.min_group_size and config.algorithm.trains_on_reward:
        yield (
            f"rollout.group_size is {group}: {advantage.name} compares completions of one problem, so a group of one "
            "has no advantage and nothing is learned. Set it to 2 or more, or algorithm.advantage.name to remax or "
            "reinforce_plus_plus."
        )
    if isinstance(advantage, PassAtKAdvantage) and advantage.k >= group and config.algorithm.trains_on_reward:
        yield (
            f"algorithm.advantage.k is {advantage.k}, and a group has {group} completions: with one subset nothing is "
            "learned. Lower it, or raise rollout.group_size."
        )
    adaptive, completions = config.algorithm.kl.adaptive, group * problems
    if adaptive is not None and completions >= 5 * adaptive.horizon:
        yield (
            f"algorithm.kl.adaptive.horizon is {adaptive.horizon} and a rollout batch has {completions} completions: "
            "one batch could take the coefficient to 0. Set it to the completions of several batches."
        )
    for name, steps in (("training.steps", training.steps), ("segment.steps", config.segment.steps)):
        if steps % steps_per_batch:
            yield (
                f"{name} ({steps}) is no multiple of training.mini_batches * training.ppo_epochs ({steps_per_batch}): "
                f"a segment must end with a rollout batch. Set it to a multiple of {steps_per_batch}."
            )
    if problems % training.mini_batches:
        yield (
            f"training.mini_batches ({training.mini_batches}) does not divide training.problems_per_batch "
            f"({problems}). Set it to a divisor of {problems}."
        )


def _broken_length_rules(config: ExperimentConfig) -> Iterator[str]:
    budget = config.rollout.max_completion_tokens
    for source, reward in config.rewards.items():
        overlong = reward.overlong
        if overlong is not None and overlong.buffer_tokens > budget:
            key = f"data.mixture.{source}.reward" if source else "reward"
            yield (
                f"{key}.overlong.buffer_tokens ({overlong.buffer_tokens}) is above rollout.max_completion_tokens "
                f"({budget}): every completion would be punished. Set it to at most {budget}."
            )
    longest = config.max_sequence_tokens
    if longest > config.training.tokens_per_row:
        yield (
            f"training.tokens_per_microbatch ({config.training.tokens_per_microbatch}) cannot hold one sequence: "
            f"data.max_prompt_tokens ({config.data.max_prompt_tokens}) + rollout.max_completion_tokens ({budget}) = "
            f"{longest}. Raise the first to at least {-(-longest // config.training.sequence_parallel)}, or "
            "training.sequence_parallel, or lower a length."
        )


def _broken_placement_rules(config: ExperimentConfig) -> Iterator[str]:
    sequence, tensor, resources = config.training.sequence_parallel, config.rollout.tensor_parallel, config.resources
    if resources.workers % sequence:
        yield (
            f"training.sequence_parallel ({sequence}) does not divide resources.workers ({resources.workers}). "
            f"Set it to a divisor of {resources.workers}; 1 turns it off."
        )
    for name, workers in (
        ("resources.workers", resources.workers),
        ("resources.rollout_workers", resources.rollout_workers),
    ):
        if workers % tensor:
            yield (
                f"rollout.tensor_parallel ({tensor}) does not divide {name} ({workers}). Set it to a divisor of "
                f"{workers}; 1 gives each worker its own engine."
            )
    if config.training.problems_per_batch % resources.workers:
        yield (
            f"training.problems_per_batch ({config.training.problems_per_batch}) does not split evenly over "
            f"resources.workers ({resources.workers}). Set it to a multiple of {resources.workers}."
        )


def _broken_staleness_rules(config: ExperimentConfig) -> Iterator[str]:
    stale, algorithm = config.training.max_staleness, config.algorithm
    if config.rollout.partial is not None:
        yield from _broken_partial_rules(config, config.rollout.partial)
    elif stale > 1 and algorithm.dynamic_sampling is None:
        yield (
            f"training.max_staleness is {stale} and rollout.partial null: only one batch is prefetched. Set "
            "max_staleness to 0 or 1, or rollout.partial.tokens_per_round."
        )
    if stale and algorithm.correction is None:
        yield (
            f"training.max_staleness is {stale} and algorithm.correction null: the policy would train on completions "
            "of older policies as if they were its own. Set algorithm.correction.name to truncate or mask, or "
            "max_staleness to 0."
        )


def _broken_quantization_rules(config: ExperimentConfig) -> Iterator[str]:
    rollout = config.rollout
    if rollout.quantization is None:
        return
    if config.algorithm.correction is None:
        yield (
            f"rollout.quantization is {rollout.quantization} and algorithm.correction null: the quantised policy "
            "samples from another distribution than the one that trains. Set algorithm.correction.name to truncate or "
            "mask, or rollout.quantization to null."
        )
    if config.model.lora is not None:
        yield (
            f"rollout.quantization is {rollout.quantization} with model.lora set: adapters on quantised weights are "
            "not supported. Set one of them to null."
        )
    if rollout.tensor_parallel > 1:
        yield (
            f"rollout.quantization is {rollout.quantization} and rollout.tensor_parallel {rollout.tensor_parallel}: an "
            "engine that several workers share cannot be quantised. Set tensor_parallel to 1, or quantization to null."
        )


def _broken_exact_rules(config: ExperimentConfig) -> Iterator[str]:
    rollout = config.rollout
    if not rollout.exact:
        return
    needed = {
        "rollout.temperature": (rollout.temperature, 1.0),
        "rollout.top_p": (rollout.top_p, 1.0),
        "rollout.top_k": (rollout.top_k, 0),
        "rollout.quantization": (rollout.quantization, None),
        "rollout.tensor_parallel": (rollout.tensor_parallel, 1),
        "training.sequence_parallel": (config.training.sequence_parallel, 1),
        "model.lora": (config.model.lora, None),
    }
    for key, (value, allowed) in needed.items():
        if value != allowed:
            yield (
                f"rollout.exact is true and {key} is {'set' if key == 'model.lora' else value}: the trainer has no "
                f"kernels that compute this as the sampler does. Set {key} to "
                f"{'null' if allowed is None else allowed}, or rollout.exact to false."
            )


def _broken_partial_rules(config: ExperimentConfig, partial: PartialRolloutConfig) -> Iterator[str]:
    stale, budget = config.training.max_staleness, config.rollout.max_completion_tokens
    least, why = (2, ", one of them for prefetching") if partial.prefetch else (1, "")
    batches = stale + 1 - partial.prefetch
    if stale < least:
        yield (
            f"rollout.partial is set and training.max_staleness {stale}: continued completions have tokens of an older "
            f"policy. Set max_staleness to {least} or more{why}, or rollout.partial to null."
        )
    elif partial.in_flight > batches:
        yield (
            f"rollout.partial.in_flight is {partial.in_flight:g}: a group has {batches} rollout batches to be trained "
            f"in (training.max_staleness {stale}, rollout.partial.prefetch {str(partial.prefetch).lower()}), and more "
            f"groups than fit into these would be too old. Set in_flight to {batches} or less, or raise max_staleness."
        )
    if partial.tokens_per_round > budget:
        yield (
            f"rollout.partial.tokens_per_round ({partial.tokens_per_round}) is above rollout.max_completion_tokens "
            f"({budget}), where a completion ends. Set it to at most {budget}."
        )
    if isinstance(config.algorithm.advantage, RemaxAdvantage):
        yield (
            "rollout.partial is set and algorithm.advantage.name is remax: its greedy baseline is of one policy, the "
            "completions of several. Set rollout.partial to null, or use another estimator."
        )


@dataclass(frozen=True, slots=True)
class Change:
    """A difference between the experiment of a run and the one that it is continued with."""

    key: str  # dotted
    was: Scalar  # None also if there was no such key
    now: Scalar

    @property
    def affects_results(self) -> bool:
        """Whether results depend on it. More steps continue the same experiment; fewer are another one."""
        if self.key == STEPS:
            return not (isinstance(self.was, int) and isinstance(self.now, int) and self.now > self.was)
        return not self.key.startswith(FREE_SETTINGS)

    def __str__(self) -> str:
        return f"{self.key}: was {self.was!r}, now {self.now!r}"


def changes(before: ExperimentConfig, now: ExperimentConfig) -> list[Change]:
    """All values that differ, in the order of the keys."""
    old, new = before.flat(), now.flat()
    return [Change(key, old.get(key), new.get(key)) for key in {**old, **new} if old.get(key) != new.get(key)]


class AblationConfig(Frozen):
    """Points around a base experiment, each trained with every seed. The base itself is always one of them."""

    grid: tuple[str, ...] = ()
    """Entries of the form dotted.key=[value, value], in JSON. Every combination of their values is a point."""
    points: tuple[tuple[str, ...], ...] = ()
    """Single points, each a list of dotted.key=value."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Every point is trained with each seed, used as seed and as data.shuffle_seed. So all points see the same problems
    in the same order."""
    rungs: int = Field(1, ge=1, le=10)
    """Comparisons of the points, including the one at the end. 1: every point trains to its end. More: successive
    halving; a dropped point stays at its last checkpoint."""
    keep: float = Field(0.5, gt=0, lt=1)
    """Share of the points (rounded up, without the base) that continues after a rung."""
    retries: int = Field(1, ge=0, le=10)
    """Retries of a failed point. The other points do not wait for it."""
    trunk: str | None = Field(None, pattern=r"^[^@]+@[0-9]+$")
    """RUN@STEP: every point with every seed is a fork of this run, from its checkpoint of this step, and has the run's
    values where the ablation sets none. The seeds then differ in what follows the step. null: points start from the
    model."""

    @property
    def trunk_step(self) -> int:
        """The step from which the points go on. 0: they start from the model."""
        return 0 if self.trunk is None else int(self.trunk.rpartition("@")[2])

    @model_validator(mode="after")
    def _check_points_and_seeds(self) -> Self:
        if not self.grid and not self.points:
            raise ValueError(
                "the ablation has neither a grid nor points, so there is nothing to compare with the base. Give a grid "
                "such as training.learning_rate=[1e-4, 3e-4], or points such as algorithm.kl.coefficient=0."
            )
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"ablation seeds are {list(self.seeds)}: give at least one, and each of them once.")
        return self
