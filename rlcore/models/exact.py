"""Log-probs that equal the sampler's bit for bit: the trainer's weights, computed by the sampler's own kernels.

Values only: the gradient is that of the ordinary forward pass, which differs by rounding. Letters as in
``rlcore.batch``; Hq and Hkv heads of size D, H hidden width, V vocabulary.

A floating-point sum depends on its order, so equal bits need the same kernels, the same fused matrices and rounding at
the same places, and kernels whose order does not depend on the other sequences of a batch ("batch-invariant").
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from rlcore.batch import Microbatch, Segments
from rlcore.errors import ModelError
from rlcore.families import EXACT
from rlcore.models.flash import Sequences, Triple
from rlcore.models.packed import PackedModel

_ROWS = 1024  # of logits at a time
_BANNED = -100.0  # the sampler adds it to the logit of a token that it may not sample


class SamplerKernels(Protocol):
    """The sampler's forward kernels."""

    def linear(self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """[T, in] -> [T, out]."""
        ...

    def norm(self, hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """RMS norm of embeddings [T, H]."""
        ...

    def norm_of_sum(self, hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """RMS norm of the sum [T, H] of a layer's output and its input, which another kernel computes."""
        ...

    def gated(self, gate_and_up: Tensor) -> Tensor:
        """[T, 2 F] -> [T, F]: silu of the first half, times the second."""
        ...

    def turned(self, positions: Tensor, query: Tensor, key: Tensor, head_size: int) -> tuple[Tensor, Tensor]:
        """Rotary embedding of [T, Hq D] and [T, Hkv D] at positions [T]."""
        ...

    def attention(self, inputs: Triple, where: Sequences, scale: float) -> Tensor:
        """[T, Hq, D], causal, the mask aligned to the end of each sequence's keys."""
        ...

    def logprobs(self, logits: Tensor, targets: Tensor) -> Tensor:
        """[n] of logits [n, V]."""
        ...


def require_exact(config: Any, device: str) -> None:
    """
    Raises:
        ModelError: the model has layers that are not computed here, or the sampler has no such kernels on this device.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    found = {
        "device": (device, ("cuda",)),
        "model_type": (config.model_type, EXACT),
        "rope_type": (rope.get("rope_type", "default"), ("default",)),
        "use_sliding_window": (getattr(config, "use_sliding_window", False), (False,)),
    }
    for field, (value, allowed) in found.items():
        if value not in allowed:
            raise ModelError(
                f"rollout.exact is true and the {field} is {value!r}; allowed is {' or '.join(map(repr, allowed))}. "
                "Set rollout.exact to false."
            )


@torch.no_grad()
def exact_logprobs(model: PackedModel, batch: Microbatch, kernels: SamplerKernels, *, reshards: bool) -> Tensor:
    """[N] float32 log-probs of the trained tokens at temperature 1.

    Collective with sharded weights. Call it after the model's first forward pass, which prepares their collectives.

    Args:
        model: of a type in ``families.EXACT``.
        reshards: free gathered weights after their use.
    """
    hf: Any = model.hf
    decoder, config = hf.model, hf.config
    with _gathered(model, reshards=reshards):
        hidden: Tensor = decoder.embed_tokens(batch.token_ids)  # [T, H]
    for number, layer in enumerate(decoder.layers):
        with _gathered(layer, reshards=reshards):
            norm = kernels.norm if number == 0 else kernels.norm_of_sum
            normed = norm(hidden, layer.input_layernorm.weight, config.rms_norm_eps)
            hidden = hidden + _attention(layer.self_attn, normed, batch.position_ids, batch.segments, kernels)
            normed = kernels.norm_of_sum(hidden, layer.post_attention_layernorm.weight, config.rms_norm_eps)
            hidden = hidden + _feed_forward(layer.mlp, normed, kernels)
    with _gathered(model, reshards=reshards):
        hidden = kernels.norm_of_sum(hidden, decoder.norm.weight, config.rms_norm_eps)
        rows = zip(*(torch.split(x, _ROWS) for x in (batch.predict_from, batch.targets)), strict=True)
        return torch.cat([_logprobs(model, hidden[places], targets, kernels) for places, targets in rows])


def _attention(module: Any, hidden: Tensor, positions: Tensor, segments: Segments, kernels: SamplerKernels) -> Tensor:
    parts, size = (module.q_proj, module.k_proj, module.v_proj), module.head_dim
    joined = kernels.linear(hidden, *_fused(*parts))
    query, key, value = torch.split(joined, [part.out_features for part in parts], dim=-1)
    query, key = kernels.turned(positions, query, key, size)
    q, k, v = (x.reshape(len(x), -1, size) for x in (query, key, value))
    _, longest, longest_keys = segments.sizes.tolist()
    where = Sequences(segments.bounds, segments.key_bounds, longest, longest_keys)
    out = kernels.attention((q, k[segments.key_rows], v[segments.key_rows]), where, module.scaling)
    return kernels.linear(out.flatten(1), *_fused(module.o_proj))


def _feed_forward(module: Any, hidden: Tensor, kernels: SamplerKernels) -> Tensor:
    gated = kernels.gated(kernels.linear(hidden, *_fused(module.gate_proj, module.up_proj)))
    return kernels.linear(gated, *_fused(module.down_proj))


def _fused(*parts: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of linear layers with the same input, as the one layer that the sampler makes of them."""
    weights: list[Tensor] = [part.weight for part in parts]
    biases: list[Tensor] = [part.bias for part in parts if part.bias is not None]
    return torch.cat(weights), torch.cat(biases) if biases else None


def _logprobs(model: PackedModel, hidden: Tensor, targets: Tensor, kernels: SamplerKernels) -> Tensor:
    logits = kernels.linear(hidden, model.hf.lm_head.weight).float()
    penalty = logits.new_full((len(logits), len(model.banned)), _BANNED)
    return kernels.logprobs(logits.index_add_(1, model.banned, penalty), targets)


@contextmanager
def _gathered(module: nn.Module, *, reshards: bool) -> Iterator[None]:
    """Inside the block the module's own parameters are whole, in the compute dtype."""
    if not isinstance(module, FSDPModule):
        yield
        return
    module.unshard()
    yield
    if reshards:
        module.reshard()


class _WithValue(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, _of_gradient: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def with_value(of_gradient: Tensor, value: Tensor) -> Tensor:
    """``value``, with the gradient of ``of_gradient``."""
    return cast(Tensor, _WithValue.apply(of_gradient, value))  # type: ignore[no-untyped-call]
