"""The policy: which model, how it is sampled, how it is updated."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from rlcore.config.base import Frozen


def expand_home(path: str) -> str:
    """A model's path without "~". Called when the experiment is read, so that every process and cache key uses the same
    folder."""
    return str(Path(path).expanduser()) if path.startswith("~") else path


TinyFamily = Literal[
    "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "glm4v", "internvl", "idefics3", "gemma3"
]


class TinyModelConfig(Frozen):
    """The built-in default policy: a few million parameters, warm-started on synthetic problems."""

    seed: int = 0
    """Seed of the initial weights and of the warm start."""
    task: Literal["geometry", "sums", "countdown"] = "geometry"
    """Task of the warm start. geometry: a vision-language model that starts to read pictures; sums, countdown: a text
    model that starts to add numbers ("#### 42") or to write expressions."""
    family: TinyFamily | None = None
    """Architecture of the policy that reads pictures. null: qwen2_5_vl; gemma3 needs a GPU. Text policies are qwen2."""
    warm_start_steps: int = Field(600, ge=0)
    """Supervised steps, at most. The warm start ends once the model knows the format and starts to give right answers.
    0 leaves the weights random."""

    @model_validator(mode="after")
    def _check_family(self) -> Self:
        if self.family is not None and self.task != "geometry":
            raise ValueError(
                f"model.tiny.family is {self.family}, whose policy reads pictures, and model.tiny.task is {self.task}, "
                "which has none. Set model.tiny.task to geometry or model.tiny.family to null."
            )
        return self


class LoraConfig(Frozen):
    """Adapters on every linear layer of the language model: W x + (alpha / rank) B A x. LoRA, arXiv:2106.09685."""

    rank: int = Field(64, ge=1, le=512)
    """Rank of the adapters. vLLM serves at most 512."""
    alpha: float = Field(64.0, gt=0)
    """Scale of the adapters, divided by rank."""
    vision_tower: bool = False
    """Also put adapters into the vision tower."""


class ModelConfig(Frozen):
    path: str = "tiny"
    """``tiny``, a Hugging Face id, or a folder with config.json and safetensors."""
    revision: str | None = None
    """Commit, branch or tag of a Hugging Face id. null: its main branch."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    tiny: TinyModelConfig = TinyModelConfig()
    check: Literal["auto", "on", "off"] = "auto"
    """Before the first step, compare the trainer, transformers and vLLM on the model's folder, and refuse a model on
    which they differ. Models that were compared before are not compared again. auto: on, without vLLM for the tiny
    policies, which rlflow makes itself."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of forward and backward. auto: bfloat16 on CUDA, float32 on CPU. Master weights are float32 unless
    training.optimizer is adamw_bf16."""
    gradient_checkpointing: Literal["none", "selective", "full"] = "full"
    """Activations that the backward pass recomputes. full: all but each block's input, for a third more work;
    selective: all but the outputs of matrix products and attention, for little more work; none: nothing, or, in
    compiled blocks, what the compiler chooses. The gradient is the same."""
    freeze_vision_tower: bool = False
    """Do not train the vision tower."""
    lora: LoraConfig | None = None
    """Train low-rank adapters and keep the weights. The reference policy is then the same model without adapters.
    null trains all weights."""

    @field_validator("path")
    @classmethod
    def _expand_home(cls, path: str) -> str:
        return expand_home(path)

    @model_validator(mode="after")
    def _check_vision_tower(self) -> Self:
        if self.freeze_vision_tower and self.lora is not None and self.lora.vision_tower:
            raise ValueError(
                "model.freeze_vision_tower is true and model.lora.vision_tower puts adapters into it. Set one to false."
            )
        return self


class PartialRolloutConfig(Frozen):
    """Rollout batches do not wait for long completions: a round samples a limited number of tokens of each completion,
    and the policy of the next batch continues the unfinished ones, within training.max_staleness. Partial rollouts,
    Kimi k1.5, arXiv:2501.12599."""

    tokens_per_round: int = Field(ge=1)
    """Tokens of each completion per round, at most rollout.max_completion_tokens."""
    in_flight: float = Field(1.5, ge=1)
    """Unfinished and waiting groups, per group of a rollout batch. Raise it if rollout/rounds is above 1, because too
    few groups end within a round. At most training.max_staleness + 1, or training.max_staleness with prefetch."""
    prefetch: bool = False
    """Sample the next batch before this one is trained, so both overlap if resources.rollout_workers are set. Uses 1 of
    training.max_staleness."""

    def groups(self, problems_per_batch: int) -> int:
        """Groups in flight while a batch is sampled."""
        return math.ceil(round(self.in_flight * problems_per_batch, 6))  # 1.1 * 10 is a little above 11


class RolloutConfig(Frozen):
    group_size: int = Field(8, ge=1)
    """G: completions per problem."""
    max_completion_tokens: int = Field(2048, ge=1)
    """Longer completions are cut (rollout/truncated)."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature. Logits are divided by it wherever log-probs are computed."""
    top_p: float = Field(1.0, gt=0, le=1)
    """1 keeps the whole distribution."""
    top_k: int = Field(0, ge=0)
    """0 keeps the whole vocabulary."""
    tensor_parallel: int = Field(1, ge=1)
    """Workers of one node that share one engine, each with a part of every weight and of the key-value cache (vLLM's
    tensor parallelism). Divides resources.workers, resources.rollout_workers and the model's attention heads. For
    policies that do not fit on one GPU; otherwise 1 is faster."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of the engine's weights and computation. auto: bfloat16 on a GPU, float32 on CPU. Sampler and trainer agree
    best if it is model.compute_dtype or a finer one (rollout/abs_delta_logprob_mean)."""
    quantization: Literal["fp8"] | None = None
    """fp8: the engine computes the decoder's linear layers in 8-bit floats (e4m3), with a scale for each row of a
    weight and for each token. For an H100 or newer. Sampler and trainer then differ by more than rounding, so
    algorithm.correction has to be set. null: all layers compute in rollout.dtype."""
    exact: bool = False
    """GPU only, and for few model types, which the error of another one names: the trainer's log-probs are those of the
    sampler bit for bit, so the ratio of the two is exactly 1 until the policy changes. Both use vLLM's batch-invariant
    kernels, and each of the trainer's passes computes one more forward pass. Slower; temperature 1 and the whole
    vocabulary only."""
    mismatch_alarm: float | None = Field(None, gt=0)
    """Mean distance between the log-probs of sampler and trainer, nats per token, above which a step warns and
    rollout/mismatch_alarm is 1. null: 0.5 with rollout.quantization; else 0.05 if either computes in bfloat16, 0.001 in
    float32 on CPU, else 0.01."""
    gpu_memory_utilization: float = Field(0.6, gt=0, lt=1)
    """vLLM's share of each GPU. Unused on CPU."""
    kv_cache_mib: int = Field(64, ge=1)
    """vLLM's key-value cache on CPU, MiB per worker. Unused on GPU."""
    max_sequences: int = Field(1024, ge=1)
    """Sequences that one engine decodes at the same time."""
    scheduler_steps_per_call: int | None = Field(None, ge=1)
    """Tokens that each sequence decodes between two calls of the engine's scheduler. The sampled tokens do not depend
    on it. More tokens save time between them, but a finished sequence keeps its slot for half of them on average. null:
    16 on a GPU, 4 on CPU."""
    sleep: Literal["auto", "always", "never"] = "auto"
    """Whether the engine releases its GPU memory while the policy trains. auto: until a step has shown that both fit
    together with a tenth of the memory to spare. Unused on CPU."""
    enforce_eager: bool = False
    """GPU only: no CUDA graphs. Saves some memory and the time to capture them."""
    compile_engine: bool = True
    """GPU only: torch.compile of the engine's model. false starts sooner: only decoding is captured in CUDA graphs,
    with vLLM's own kernels."""
    replay_routes: bool = False
    """For policies with experts: the trainer sends each token to the experts that the sampler chose for it, with the
    weights of its own router. Router replay (R3), arXiv:2510.11370. Costs one byte per token, layer and expert that it
    uses, two from 256 experts on."""
    partial: PartialRolloutConfig | None = None
    """null: the policy that begins a completion samples it to its end."""


class TrainingConfig(Frozen):
    steps: int = Field(60, ge=1)
    """Optimizer steps of the whole run."""
    problems_per_batch: int = Field(32, ge=1)
    """Problems per rollout batch. They are distinct, unless the batch is larger than the dataset: then every problem
    occurs before any occurs twice, each time with new completions."""
    mini_batches: int = Field(1, ge=1)
    """Mini-batches that a rollout batch is split into, each for one optimizer step. Each has
    problems_per_batch / mini_batches whole groups."""
    ppo_epochs: int = Field(1, ge=1)
    """Passes over a rollout batch. From the second optimizer step on a batch, the policy differs from the one that
    sampled: ratios leave 1 and clipping takes effect."""
    max_staleness: int = Field(0, ge=0)
    """Policy versions (rollout batches) between the policy that sampled a sample's oldest token and the policy that
    trains on it, at most. Without rollout.partial, 1 prefetches: the policy that trains on batch t samples batch t + 1,
    at the same time if resources.rollout_workers are set. With rollout.partial it bounds the age of continued
    completions. algorithm.correction weights the difference between the policies."""
    tokens_per_microbatch: int = Field(16384, ge=1)
    """Packed tokens per forward pass and worker. Changes memory and speed, never the gradient."""
    sequence_parallel: int = Field(1, ge=1)
    """Workers that compute each microbatch together, each a part of its tokens (Ulysses, arXiv:2309.14509). A
    microbatch then has this many times tokens_per_microbatch. Divides resources.workers and the model's attention
    heads. For sequences that are too long for one worker; otherwise 1 is faster."""
    compile_blocks: Literal["auto", "on", "off"] = "auto"
    """torch.compile for each transformer block. auto: on CUDA, in bfloat16. Costs about 10 s in the first step, and 4 s
    where the data folder has the compiled code."""
    reshard_after_forward: Literal["auto", "on", "off"] = "auto"
    """on: each microbatch frees a block's gathered weights after its forward and backward pass and reduces its gradient
    over the workers; needs the least memory. off: a copy of the whole model in the compute dtype, and its gradient in
    float32, stay until the last microbatch of a step. auto: on with more than one worker."""
    offload: bool = False
    """Keep the optimizer state in pinned host memory and copy it to the device in parts at each optimizer step; also
    move the weights (and the reference's) to the host during sampling. For models that do not fit otherwise: each step
    waits for the copies. Changes no number."""
    learning_rate: float = Field(1e-6, ge=0)
    """AdamW's learning rate."""
    optimizer: Literal["adamw", "adamw_bf16"] = "adamw"
    """adamw: float32 master weights and state. adamw_bf16: everything in bfloat16 with Kahan-compensated updates, 10
    bytes per parameter including the gradient instead of 16."""
    warmup_steps: int = Field(0, ge=0)
    """Linear warm-up: step k, counted from 1, uses k / warmup_steps of the learning rate."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the mean of gradients."""
    beta2: float = Field(0.999, ge=0, lt=1)
    """Decay of the mean of squared gradients."""
    weight_decay: float = Field(0.01, ge=0)
    """Decoupled weight decay, multiplied by the learning rate."""
    max_grad_norm: float = Field(1.0, gt=0)
    """A larger gradient norm, over all parameters and ranks, is scaled down to it."""
    max_nonfinite_steps: int = Field(3, ge=1)
    """The run ends as diverged after more consecutive steps with a non-finite gradient. Each such step is skipped and
    counted."""

    @property
    def tokens_per_row(self) -> int:
        """Packed tokens of one microbatch, over all workers that compute it together."""
        return self.tokens_per_microbatch * self.sequence_parallel

    @property
    def steps_per_batch(self) -> int:
        """Optimizer steps per rollout batch."""
        return self.mini_batches * self.ppo_epochs
