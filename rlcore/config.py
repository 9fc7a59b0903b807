"""ExperimentConfig: everything that defines an experiment, and the only home of defaults.

Frozen, typos refused, checked as a whole before a GPU is touched. Machine facts (folders, servers, the
trainer's interpreter) are not here but in ``infra/settings.py``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rlcore.errors import ConfigError


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class TinyModelConfig(Frozen):
    """The embedded default policy: a Qwen2.5-VL of a few million parameters, warm-started on synthetic problems."""

    seed: int = 0
    warm_start_steps: int = Field(600, ge=0)
    """Supervised steps at most; the warm start ends by itself once the format is certain and the reading begins. 0
    leaves the weights random."""


class ModelConfig(Frozen):
    path: str = "tiny"
    """``tiny``, a Hugging Face id, or a folder with config.json and safetensors."""
    revision: str | None = None
    trust_remote_code: bool = False
    tiny: TinyModelConfig = TinyModelConfig()
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of forward and backward. auto: bfloat16 on CUDA, float32 on CPU. Master weights are always float32."""
    gradient_checkpointing: bool = True


class DataConfig(Frozen):
    train: str = "synthetic-geometry@train"
    """A Hugging Face id with split (``hiyouga/geometry3k@train``), a local file or folder (parquet, jsonl), an
    fsspec URI, or ``synthetic-geometry@{train,validation,test}``."""
    validation: str = "synthetic-geometry@validation"
    problem_column: str = "problem"
    answer_column: str = "answer"
    images_column: str = "images"
    template: str = "math"
    """Prompt template: a name under rlcore/data/templates, or the path of a Jinja file that uses ``content``."""
    min_pixels: int = Field(56 * 56, ge=1)
    max_pixels: int = Field(1024 * 1024, ge=1)
    max_prompt_tokens: int = Field(2048, ge=1)
    """Problems with a longer prompt (image tokens included) are rejected with that reason, never cut."""
    synthetic_seed: int = 0
    synthetic_problems: int = Field(2048, ge=1)
    """Training problems that ``synthetic-geometry`` draws; validation and test draw an eighth of it each."""
    shuffle_seed: int = 0

    @model_validator(mode="after")
    def _pixels_in_order(self) -> Self:
        if self.min_pixels > self.max_pixels:
            raise ValueError(
                f"data.min_pixels ({self.min_pixels}) is above data.max_pixels ({self.max_pixels}). "
                "Lower the first or raise the second."
            )
        return self


class RolloutConfig(Frozen):
    group_size: int = Field(8, ge=1)
    """G: completions sampled per problem."""
    max_completion_tokens: int = Field(2048, ge=1)
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    """0 keeps the whole vocabulary."""
    gpu_memory_utilization: float = Field(0.6, gt=0, lt=1)
    """vLLM's share of each GPU. Unused on CPU."""
    kv_cache_mib: int = Field(64, ge=1)
    """vLLM's key-value cache on CPU, MiB per worker. Unused on GPU."""
    max_sequences: int = Field(256, ge=1)
    """Sequences that one engine decodes at the same time."""
    enforce_eager: bool = False


class RewardConfig(Frozen):
    name: str = "math"
    """A name in ``rlcore.rewards.REWARDS``."""
    format_weight: float = Field(0.1, ge=0, le=1)
    """The reward is (1 - format_weight) * accuracy + format_weight * format."""
    deadline_seconds: float = Field(10.0, gt=0)
    """A grading that takes longer is killed and counted as ungraded: reward 0 and left out of the advantage."""
    processes: int = Field(1, ge=1)


class KlConfig(Frozen):
    coefficient: float = Field(0.01, ge=0)
    """Weight of the k3 estimate of KL(policy || reference) in the loss. 0: no KL term, no reference model."""


class AlgorithmConfig(Frozen):
    normalize_by_std: bool = True
    """Divide a group's centred rewards by their standard deviation (GRPO). False is Dr.GRPO's choice."""
    clip_low: float = Field(0.2, ge=0, lt=1)
    clip_high: float = Field(0.28, ge=0)
    kl: KlConfig = KlConfig()
    recompute_old_logprobs: bool = False
    """With one update per rollout batch the policy that sampled is the policy that trains, so the old log-probs are
    the new ones and the extra forward pass is skipped. True runs it all the same. Several updates always run it."""
    aggregation: Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"] = "token_mean"
    """How per-token losses become one number. ``constant`` is Dr.GRPO: sum over tokens, divided by
    sequences * rollout.max_completion_tokens."""


class TrainingConfig(Frozen):
    steps: int = Field(60, ge=1)
    """Optimizer steps of the whole run."""
    problems_per_step: int = Field(32, ge=1)
    """Problems sampled per rollout batch."""
    updates_per_batch: int = Field(1, ge=1)
    """Optimizer steps per rollout batch; each takes problems_per_step / updates_per_batch whole groups."""
    tokens_per_microbatch: int = Field(16384, ge=1)
    """Packed tokens per forward pass and worker. Changes memory and speed, never the gradient."""
    learning_rate: float = Field(1e-6, gt=0)
    warmup_steps: int = Field(0, ge=0)
    """Linear warm-up. The first step already learns: step k runs at k / warmup_steps of the rate, counted from 1."""
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.999, ge=0, lt=1)
    weight_decay: float = Field(0.01, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    max_nonfinite_steps: int = Field(3, ge=1)
    """Steps in a row with a non-finite gradient (each is skipped and counted) before the run ends as diverged."""


class SegmentConfig(Frozen):
    steps: int = Field(20, ge=1)
    """Optimizer steps of one segment; each segment ends in a committed checkpoint."""
    max_minutes: float | None = Field(None, gt=0)
    """A segment also ends at the first step after this many minutes."""
    keep_checkpoints: int = Field(2, ge=1)
    """Latest checkpoints kept. An older one goes only after its successor is committed and verified."""


class EvaluationConfig(Frozen):
    problems: int | None = Field(None, ge=1)
    """Validation problems used, from the front. None: all."""
    samples: int = Field(1, ge=1)
    temperature: float = Field(1.0, ge=0)
    """0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int = 0

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
    """Ray actors, one per GPU (or per CPU core): each holds a policy shard and a sampler."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads_per_worker: int = Field(1, ge=1)
    """CPU only: threads of each worker."""


class ExperimentConfig(Frozen):
    """One experiment, complete."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$", max_length=60)
    seed: int = 0
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    training: TrainingConfig = TrainingConfig()
    segment: SegmentConfig = SegmentConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    resources: ResourceConfig = ResourceConfig()

    @model_validator(mode="after")
    def _arithmetic_works_out(self) -> Self:
        group, per_step, updates = (
            self.rollout.group_size,
            self.training.problems_per_step,
            self.training.updates_per_batch,
        )
        if group < 2:
            raise ValueError(
                f"rollout.group_size is {group}: GRPO compares completions of one problem, so a group of one has "
                "no advantage and nothing is learned. Set it to 2 or more."
            )
        for name, steps in (("training.steps", self.training.steps), ("segment.steps", self.segment.steps)):
            if steps % updates:
                raise ValueError(
                    f"{name} ({steps}) is no multiple of training.updates_per_batch ({updates}): a segment has to end "
                    f"where a rollout batch is used up. Set it to a multiple of {updates}."
                )
        if per_step % updates:
            raise ValueError(
                f"training.updates_per_batch ({updates}) does not divide training.problems_per_step ({per_step}). "
                f"Set it to a divisor of {per_step}."
            )
        longest = self.data.max_prompt_tokens + self.rollout.max_completion_tokens
        if longest > self.training.tokens_per_microbatch:
            raise ValueError(
                f"training.tokens_per_microbatch ({self.training.tokens_per_microbatch}) cannot hold one sequence: "
                f"data.max_prompt_tokens ({self.data.max_prompt_tokens}) + rollout.max_completion_tokens "
                f"({self.rollout.max_completion_tokens}) = {longest}. Raise the first to at least {longest}, "
                "or lower a length."
            )
        if per_step % self.resources.workers:
            raise ValueError(
                f"training.problems_per_step ({per_step}) does not split evenly over resources.workers "
                f"({self.resources.workers}). Set it to a multiple of {self.resources.workers}."
            )
        return self

    @property
    def max_sequence_tokens(self) -> int:
        return self.data.max_prompt_tokens + self.rollout.max_completion_tokens

    @property
    def num_segments(self) -> int:
        return -(-self.training.steps // self.segment.steps)

    def digest(self) -> str:
        """Hash of every value; two experiments with the same digest are the same experiment."""
        canonical = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    def flat(self) -> dict[str, str | int | float | bool | None]:
        """Dotted keys to scalar values, as logged to MLflow and as accepted by overrides."""
        return dict(_flatten("", self.model_dump(mode="json")))


def _flatten(prefix: str, tree: dict[str, Any]) -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for key, value in tree.items():
        name = f"{prefix}.{key}" if prefix else key
        rows += _flatten(name, value) if isinstance(value, dict) else [(name, value)]
    return rows


def build_experiment(values: dict[str, Any], overrides: Sequence[str] = ()) -> ExperimentConfig:
    """Merge dotted ``key=value`` overrides (values in JSON, else text) into ``values`` and validate the whole.

    Raises:
        ConfigError: an override without ``=``, an unknown key, or a value that breaks a rule; lists every finding.
    """
    tree = json.loads(json.dumps(values))
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"override {override!r} is not key=value. Write for example training.steps=40.")
        *parents, leaf = key.strip().split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise ConfigError(f"override {override!r}: {parent} holds a value, not a group of settings.")
        node[leaf] = _parse_value(text.strip())
    try:
        return ExperimentConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from None


def _parse_value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _explain(error: ValidationError) -> str:
    lines = [f"the experiment has {error.error_count()} error(s):"]
    for item in error.errors(include_url=False):
        where = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            lines.append(f"- {where}: unknown key. {_known_keys(item['loc'])}")
        elif where:
            lines.append(f"- {where}: found {item['input']!r}; {item['msg']}.")
        else:
            lines.append(f"- {item['msg'].removeprefix('Value error, ')}")
    return "\n".join(lines)


def _known_keys(loc: tuple[int | str, ...]) -> str:
    import difflib

    model: Any = ExperimentConfig
    for part in loc[:-1]:
        model = model.model_fields[str(part)].annotation
    known = sorted(model.model_fields)
    close = difflib.get_close_matches(str(loc[-1]), known, n=1)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    return f"{hint}Allowed here: {', '.join(known)}."
