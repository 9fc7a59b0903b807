"""ExperimentConfig: everything that defines an experiment, and the only home of defaults.

Frozen, typos refused, checked as a whole before a GPU is touched. Machine facts (folders, servers, the
trainer's interpreter) are not here but in ``infra/settings.py``.
"""

from __future__ import annotations

import hashlib
import json
from typing import Literal, Self

from pydantic import Field, model_validator

from rlcore.config.algorithm import AlgorithmConfig, PassAtKAdvantage
from rlcore.config.base import Frozen
from rlcore.config.build import flatten
from rlcore.config.health import HealthRule
from rlcore.config.partial import PartialRolloutConfig, check_staleness
from rlcore.config.reward import MathReward, RewardConfig

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
    "rollout.tensor_parallel",
    "rollout.max_sequences",
    "rollout.tokens_per_burst",
    "rollout.sleep",
    "rollout.enforce_eager",
)
STEPS = "training.steps"  # may be raised: the rate of a step does not depend on how many follow


class TinyModelConfig(Frozen):
    """The embedded default policy: a few million parameters, warm-started on synthetic problems."""

    seed: int = 0
    """Of the first weights and of the warm start."""
    task: Literal["geometry", "sums", "countdown"] = "geometry"
    """What the warm start teaches. geometry: a Qwen2.5-VL that begins to read drawn pictures; sums, countdown: a Qwen2
    text model that begins to add numbers ("#### 42") or to find expressions."""
    warm_start_steps: int = Field(600, ge=0)
    """Supervised steps at most; the warm start ends by itself once the format is certain and the reading begins. 0
    leaves the weights random."""


class LoraConfig(Frozen):
    """Adapters on every linear layer of the language model: W x + (alpha / rank) B A x. LoRA, arXiv:2106.09685."""

    rank: int = Field(64, ge=1, le=512)
    """At most what vLLM serves."""
    alpha: float = Field(64.0, gt=0)
    """Scale of the adapters, divided by rank."""
    vision_tower: bool = False
    """Adapters in the vision tower as well."""


class ModelConfig(Frozen):
    path: str = "tiny"
    """``tiny``, a Hugging Face id, or a folder with config.json and safetensors."""
    revision: str | None = None
    """Commit, branch or tag of a Hugging Face id. null: its main branch."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    tiny: TinyModelConfig = TinyModelConfig()
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of forward and backward. auto: bfloat16 on CUDA, float32 on CPU. Master weights are float32 unless
    training.optimizer is adamw_bf16."""
    gradient_checkpointing: Literal["none", "selective", "full"] = "full"
    """What the backward pass computes again instead of keeping. full: every block from its input, for a third more
    work; selective: all but the outputs of matrix products and attention, for little more work; none: nothing, or, in
    compiled blocks, what the compiler finds cheaper to compute than to keep. The gradient stays the same."""
    freeze_vision_tower: bool = False
    """The vision tower is not trained."""
    lora: LoraConfig | None = None
    """Train low-rank adapters and leave the weights as they are; the reference policy is then the same model with its
    adapters off. null trains all weights."""

    @model_validator(mode="after")
    def _frozen_and_adapted_exclude_each_other(self) -> Self:
        if self.freeze_vision_tower and self.lora is not None and self.lora.vision_tower:
            raise ValueError(
                "model.freeze_vision_tower is true and model.lora.vision_tower puts adapters into it. Set one to false."
            )
        return self


class CountdownConfig(Frozen):
    """The game that ``countdown@SPLIT`` draws: reach the target with the numbers, each used once, by + - * /."""

    numbers: tuple[int, int] = (3, 4)
    """Fewest and most numbers of a problem."""
    max_number: int = Field(99, ge=1)
    """Largest number of a game."""
    max_target: int = Field(99, ge=1)
    """Largest target of a game."""
    operations: tuple[Literal["+", "-", "*", "/"], ...] = ("+", "*", "-", "/")
    """Those that a game is drawn with; an answer may use all four."""

    @model_validator(mode="after")
    def _two_numbers_always_go_together(self) -> Self:
        if not {"+", "*"} & set(self.operations):
            raise ValueError(
                f"data.countdown.operations is {list(self.operations)}: 3 and 3 have no difference above 0, and 3 and "
                "2 no whole quotient. Add + or *."
            )
        return self


class CurriculumConfig(Frozen):
    """Problems whose measured pass rate says that there is nothing to learn rest for some epochs."""

    hardest: float = Field(0.0, ge=0, lt=1)
    """A pass rate at or below it rests."""
    easiest: float = Field(1.0, gt=0, le=1)
    """A pass rate at or above it rests."""
    rest_epochs: int = Field(2, ge=1)
    """Epochs that such a problem is left out of before it is measured again."""

    @model_validator(mode="after")
    def _bounds_in_order(self) -> Self:
        if self.hardest >= self.easiest:
            raise ValueError(
                f"data.curriculum.hardest ({self.hardest}) is not below data.curriculum.easiest ({self.easiest}): "
                "every problem would rest. Lower the first or raise the second."
            )
        return self


class DataConfig(Frozen):
    train: str = "synthetic-geometry@train"
    """A Hugging Face id with split (``hiyouga/geometry3k@train``), a local file or folder (parquet, jsonl), an
    fsspec URI, or ``NAME@{train,validation,test}`` with NAME one of synthetic-geometry, countdown, sums, drawn from
    ``synthetic_seed``."""
    validation: str = "synthetic-geometry@validation"
    """As ``train``, for evaluation."""
    problem_column: str = "problem"
    """Text, or chat messages. A dotted name is a path into nested columns, here and below."""
    answer_column: str = "answer"
    """What the reward compares with."""
    images_column: str = "images"
    """Lists of images: bytes, or paths beside the source. May be missing in a source of text."""
    videos_column: str = "videos"
    """Lists of frames; a ``<video>`` marker stands for one image per frame."""
    max_images: int = Field(8, ge=1)
    """Problems with more images (frames included) are rejected."""
    template: str = "math"
    """Prompt template: a name under rlcore/data/templates, or the path of a Jinja file that uses ``content``."""
    min_pixels: int = Field(56 * 56, ge=1)
    """Smaller images are scaled up to it."""
    max_pixels: int = Field(1024 * 1024, ge=1)
    """Larger images are scaled down to it. Image tokens grow with it."""
    max_prompt_tokens: int = Field(2048, ge=1)
    """Problems with a longer prompt (image tokens included) are rejected with that reason, never cut."""
    synthetic_seed: int = 0
    """Seed of what is drawn."""
    synthetic_problems: int = Field(2048, ge=1)
    """Training problems that a drawn source has; validation and test have an eighth of it each."""
    countdown: CountdownConfig = CountdownConfig()
    shuffle_seed: int = 0
    """Seed of the order of problems."""
    curriculum: CurriculumConfig | None = None
    """null: every problem in every epoch."""

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
    """A completion is cut there (rollout/truncated)."""
    temperature: float = Field(1.0, gt=0)
    """Of sampling; logits are divided by it wherever log-probs are taken."""
    top_p: float = Field(1.0, gt=0, le=1)
    """1 keeps the whole distribution."""
    top_k: int = Field(0, ge=0)
    """0 keeps the whole vocabulary."""
    tensor_parallel: int = Field(1, ge=1)
    """Workers that hold one engine together, every one a part of each weight and of the key-value cache (vLLM's tensor
    parallelism), on one node. Divides resources.workers, resources.rollout_workers and the model's attention heads. For
    policies of which one GPU cannot hold a whole copy; otherwise 1 is faster."""
    gpu_memory_utilization: float = Field(0.6, gt=0, lt=1)
    """vLLM's share of each GPU. Unused on CPU."""
    kv_cache_mib: int = Field(64, ge=1)
    """vLLM's key-value cache on CPU, MiB per worker. Unused on GPU."""
    max_sequences: int = Field(1024, ge=1)
    """Sequences that one engine decodes at the same time."""
    tokens_per_burst: int | None = Field(None, ge=1)
    """Tokens that each sequence decodes between two looks of the engine's scheduler. What is drawn does not depend on
    it. More saves time between tokens; a sequence that ends holds its place for half of it on average. null: 16 on a
    GPU, 1 on CPU."""
    sleep: Literal["auto", "always", "never"] = "auto"
    """Whether the engine gives its GPU memory back while the policy trains. auto: until a step has shown that both fit
    beside each other with a tenth of the memory to spare. Unused on CPU."""
    enforce_eager: bool = False
    """GPU only: no CUDA graphs, which saves some memory and the time of capturing them."""
    partial: PartialRolloutConfig | None = None
    """null: every completion is drawn to its end by the policy that began it."""


class TrainingConfig(Frozen):
    steps: int = Field(60, ge=1)
    """Optimizer steps of the whole run."""
    problems_per_step: int = Field(32, ge=1)
    """Problems sampled per rollout batch."""
    updates_per_batch: int = Field(1, ge=1)
    """Optimizer steps per pass over a rollout batch; each takes problems_per_step / updates_per_batch whole groups."""
    passes_per_batch: int = Field(1, ge=1)
    """Times that a rollout batch is gone through. From the second optimizer step on a batch, the policy that trains is
    no longer the one that sampled, and ratios and clipping do their work."""
    max_staleness: int = Field(0, ge=0)
    """Rollout batches between the policy that drew a sample's oldest token and the one that trains on it, at most. 1:
    batch t + 1 is sampled by the policy that batch t starts from, beside the training on batch t where
    resources.rollout_workers are set. With rollout.partial: what a completion that is carried over may reach. The
    difference of the policies is weighted by algorithm.correction."""
    tokens_per_microbatch: int = Field(16384, ge=1)
    """Packed tokens per forward pass and worker. Changes memory and speed, never the gradient."""
    sequence_parallel: int = Field(1, ge=1)
    """Workers that compute each microbatch together, every one a part of its tokens (Ulysses, arXiv:2309.14509), so
    that it may have this many times tokens_per_microbatch. Divides resources.workers and the model's attention heads.
    For sequences that are too long for one worker; otherwise 1 is faster."""
    compile_blocks: Literal["auto", "on", "off"] = "auto"
    """torch.compile over each transformer block. auto: on CUDA. Costs a minute at the start of each process."""
    reshard_after_forward: Literal["auto", "on", "off"] = "auto"
    """Whether a block's whole weights are let go after its forward and its backward pass, and its gradient is reduced
    over the workers, in each microbatch. on costs the least memory; off keeps a copy of the whole model in the compute
    dtype, and its gradient in float32, until the last microbatch of a step. auto: on with more than one worker."""
    offload: bool = False
    """Optimizer state lies in the host's page-locked memory and comes to the device a few parameters at a time when the
    optimizer steps; weights (the reference's as well) lie there while the sampler draws. For models that do not fit
    otherwise: each step waits for the copies. Changes no number."""
    learning_rate: float = Field(1e-6, ge=0)
    """AdamW's learning rate."""
    optimizer: Literal["adamw", "adamw_bf16"] = "adamw"
    """adamw: float32 master weights and state. adamw_bf16: all of it in bfloat16, with Kahan-compensated updates: 10
    bytes per parameter, gradient included, instead of 16."""
    warmup_steps: int = Field(0, ge=0)
    """Linear warm-up. The first step already learns: step k runs at k / warmup_steps of the rate, counted from 1."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the mean of gradients."""
    beta2: float = Field(0.999, ge=0, lt=1)
    """Decay of the mean of squared gradients."""
    weight_decay: float = Field(0.01, ge=0)
    """Decoupled, times the learning rate."""
    max_grad_norm: float = Field(1.0, gt=0)
    """A longer gradient, over all parameters and ranks, is scaled to it."""
    max_nonfinite_steps: int = Field(3, ge=1)
    """Steps in a row with a non-finite gradient (each is skipped and counted) before the run ends as diverged."""

    @property
    def tokens_per_row(self) -> int:
        """Packed tokens of one microbatch, on all the workers that compute it together."""
        return self.tokens_per_microbatch * self.sequence_parallel

    @property
    def steps_per_batch(self) -> int:
        """Optimizer steps per rollout batch."""
        return self.updates_per_batch * self.passes_per_batch


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
    """Without a finished phase of a step, or a finished start, for this long the trainer counts as stuck: the stacks of
    all its threads are kept, it is killed and started again."""

    def max_kept(self, segments: int) -> int:
        """Checkpoints that a run of this many segments keeps at most."""
        every = 0 if self.keep_every is None else segments // self.keep_every
        return min(segments, self.keep_checkpoints + every + self.keep_best)


class RecoveryConfig(Frozen):
    attempts: int = Field(3, ge=0)
    """How often the recover flow brings a run back before a person has to look, counted anew with each committed
    step."""
    silence_seconds: float = Field(120.0, gt=0)
    """A driver whose process cannot be seen counts as lost after this long without a sign of life."""


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
    rollout.partial.one_ahead, they sample the next rollout batch while this one trains. 0: every worker samples as well
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
            self.training.problems_per_step,
            self.training.updates_per_batch,
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
                    f"{name} ({steps}) is no multiple of training.updates_per_batch * training.passes_per_batch "
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
                f"training.updates_per_batch ({updates}) does not divide training.problems_per_step ({per_step}). "
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
        check_staleness(self)
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
    def one_ahead(self) -> bool:
        """Whether each batch is sampled by the policy that the batch before it starts from."""
        partial = self.rollout.partial
        return self.training.max_staleness > 0 if partial is None else partial.one_ahead

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
