"""The update: batches, memory, optimizer."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlcore.config.base import Frozen


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
    """Policy versions (rollout batches) between the policy that sampled a sample's oldest token and the one that trains
    on it, at most. Above 0 without rollout.partial: batch t + 1 is sampled by the policy that batch t starts from,
    while batch t trains where resources.rollout_workers are set. With rollout.partial: what a completion that is
    carried over may reach. algorithm.correction weighs the difference of the policies."""
    tokens_per_microbatch: int = Field(16384, ge=1)
    """Packed tokens per forward pass and worker. Changes memory and speed, never the gradient."""
    sequence_parallel: int = Field(1, ge=1)
    """Workers that compute each microbatch together, every one a part of its tokens (Ulysses, arXiv:2309.14509), so
    that it may have this many times tokens_per_microbatch. Divides resources.workers and the model's attention heads.
    For sequences that are too long for one worker; otherwise 1 is faster."""
    compile_blocks: Literal["auto", "on", "off"] = "auto"
    """torch.compile over each transformer block. auto: on CUDA, in bfloat16. Costs a minute at the start of each
    process."""
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
        return self.mini_batches * self.ppo_epochs
