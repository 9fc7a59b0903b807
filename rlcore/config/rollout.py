"""Sampling: the engine, partial rollouts, and how stale a trained sample may be with and without them."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from rlcore.config.base import Frozen


class PartialRolloutConfig(Frozen):
    """No rollout batch waits for a long completion: a round samples at most so many tokens of each, and what has not
    ended is continued by the policy of the next batch, within training.max_staleness. Partial rollouts, Kimi k1.5,
    arXiv:2501.12599."""

    tokens_per_round: int = Field(ge=1)
    """Tokens of each completion that one round samples, at most rollout.max_completion_tokens."""
    in_flight: float = Field(1.5, ge=1)
    """Groups that are being sampled, or have ended and wait, per group of a rollout batch. If rollout/rounds is above
    1, too few of them end within a round: more in flight need fewer rounds. At most the rollout batches that a group
    has time for: training.max_staleness + 1, or training.max_staleness with prefetch."""
    prefetch: bool = False
    """Sample the next batch before this one is trained, so both overlap if resources.rollout_workers are set. Uses 1 of
    training.max_staleness."""

    def groups(self, problems_per_batch: int) -> int:
        """Groups in flight while a batch is sampled."""
        return math.ceil(round(self.in_flight * problems_per_batch, 6))  # 1.1 * 10 is a little above 11


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
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype in which the engine holds the policy and computes. auto: bfloat16 on a GPU, float32 on CPU. Sampler and
    trainer agree best where it is that of model.compute_dtype or a finer one (rollout/abs_delta_logprob_mean)."""
    mismatch_alarm: float | None = Field(None, gt=0)
    """Mean distance of the sampler's and the trainer's log-probs, nats per token, beyond which a step warns and
    rollout/mismatch_alarm is 1. null: by device and dtype, 0.05 where one of the two computes in bfloat16, 0.001 in
    float32 on CPU, 0.01 else."""
    gpu_memory_utilization: float = Field(0.6, gt=0, lt=1)
    """vLLM's share of each GPU. Unused on CPU."""
    kv_cache_mib: int = Field(64, ge=1)
    """vLLM's key-value cache on CPU, MiB per worker. Unused on GPU."""
    max_sequences: int = Field(1024, ge=1)
    """Sequences that one engine decodes at the same time."""
    scheduler_steps_per_call: int | None = Field(None, ge=1)
    """Tokens that each sequence decodes between two looks of the engine's scheduler. The sampled tokens do not depend
    on it. More tokens save time between them, but a finished sequence keeps its slot for half of them on average. null:
    16 on a GPU, 1 on CPU."""
    sleep: Literal["auto", "always", "never"] = "auto"
    """Whether the engine gives its GPU memory back while the policy trains. auto: until a step has shown that both fit
    beside each other with a tenth of the memory to spare. Unused on CPU."""
    enforce_eager: bool = False
    """GPU only: no CUDA graphs, which saves some memory and the time of capturing them."""
    partial: PartialRolloutConfig | None = None
    """null: every completion is sampled to its end by the policy that began it."""
