"""What a transformer block keeps for its backward pass, and whether it is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.attention.varlen  # registers the operator that is named below
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from rlcore.models import attention, sequence

_KEPT = {  # what takes long: matrix products and attention; norms, rotations and activations are memory traffic
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.torch_attn._varlen_attn.default,
    attention.OPERATOR,
    sequence.EXCHANGE,
}


def checkpoint_blocks(blocks: Sequence[nn.Module], mode: Literal["none", "selective", "full"]) -> None:
    """Let every block compute part of itself again in its backward pass, inside of what shards or compiles it."""
    if mode == "none":
        return
    context: dict[str, Any] = {"context_fn": _selective} if mode == "selective" else {}
    for block in blocks:
        again = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, **context)
        block.forward = again  # type: ignore[method-assign]


def compile_blocks(blocks: Sequence[nn.Module]) -> None:
    """torch.compile each block's forward, hooks of the module left outside; one graph serves all blocks of a kind."""
    for block in blocks:
        block.forward = torch.compile(block.forward, dynamic=True)  # type: ignore[method-assign]


def _selective() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return create_selective_checkpoint_contexts(_policy)  # type: ignore[no-any-return]


def _policy(_: SelectiveCheckpointContext, operator: object, *_args: object, **_kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
