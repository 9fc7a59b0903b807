"""vLLM's batch-invariant forward kernels on a GPU (0.32), for log-probs that equal the sampler's bit for bit."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from rlcore.models.flash import Sequences, Triple
from rlcore.process import importing_vllm

BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"


class VllmKernels:
    """Implements ``models.exact.SamplerKernels`` for a decoder of this configuration."""

    def __init__(self, config: Any, device: torch.device, dtype: torch.dtype) -> None:
        """
        Args:
            config: transformers' configuration of a text model.
        """
        os.environ[BATCH_INVARIANT] = "1"
        with importing_vllm():
            from vllm import _custom_ops
            from vllm.model_executor.determinism import batch_invariant
            from vllm.v1.attention.backends import fa_utils
            from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs
        self._ops, self._scores = _custom_ops, compute_token_logprobs
        self._invariant: Any = batch_invariant
        self._flash: Any = fa_utils
        self._invariant.init_batch_invariance()
        self._turns = _turns(config, device).to(dtype)

    def linear(self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out: Tensor = self._invariant.linear_batch_invariant(inputs, weight, bias)
        return out

    def norm(self, hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        out: Tensor = self._invariant.rms_norm_batch_invariant(hidden, weight, epsilon)
        return out

    def norm_of_sum(self, hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        out, total = torch.zeros_like(hidden), hidden.clone()  # vLLM's kernel adds them, and overwrites both
        self._ops.fused_add_rms_norm(out, total, weight, epsilon)
        return out

    def gated(self, gate_and_up: Tensor) -> Tensor:
        out = gate_and_up.new_empty(len(gate_and_up), gate_and_up.shape[-1] // 2)
        torch.ops._C.silu_and_mul(out, gate_and_up)
        return out

    def turned(self, positions: Tensor, query: Tensor, key: Tensor, head_size: int) -> tuple[Tensor, Tensor]:
        query, key = query.clone(memory_format=torch.contiguous_format), key.contiguous()  # views of one tensor
        self._ops.rotary_embedding(positions, query, key, head_size, self._turns, True)
        return query, key

    def attention(self, inputs: Triple, where: Sequences, scale: float) -> Tensor:
        query, key, value = inputs
        out: Tensor = self._flash.flash_attn_varlen_func(
            q=query,
            k=key,
            v=value,
            max_seqlen_q=where.longest,
            cu_seqlens_q=where.bounds,
            max_seqlen_k=where.longest_keys,
            cu_seqlens_k=where.key_bounds,
            softmax_scale=scale,
            causal=True,
            num_splits=1,
            fa_version=self._flash.get_flash_attn_version(),
        )
        return out

    def logprobs(self, logits: Tensor, targets: Tensor) -> Tensor:
        return self._scores(logits, targets[:, None])[:, 0]


def _turns(config: Any, device: torch.device) -> Tensor:
    """[positions, D] cosines, then sines, computed on the GPU as vLLM's are: its powers differ from the CPU's."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    exponents = torch.arange(0, size, 2, dtype=torch.float, device=device) / size
    frequencies = 1.0 / (config.rope_parameters["rope_theta"] ** exponents)
    positions = torch.arange(config.max_position_embeddings, dtype=torch.float, device=device)
    angles = torch.einsum("i,j -> ij", positions, frequencies)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)
