"""FSDP2 over the ranks, with transformer blocks as units of sharding, recomputation and compilation; whole tensors from
their shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, is_dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.attention.varlen  # registers the operator that is named below
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from rlcore.config import ExperimentConfig
from rlcore.families import family_of
from rlcore.models import attention, sequence
from rlcore.models.dtypes import compute_dtype

_SAVED = {  # slow to compute: matrix products and attention. Norms, rotations and activations are memory traffic
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._grouped_mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.torch_attn._varlen_attn.default,
    attention.OPERATOR,
    sequence.EXCHANGE,
}
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


def transformer_blocks(hf: Any) -> list[nn.Module]:
    """In the order in which they run: vision blocks, then decoder layers."""
    family = family_of(hf.config)
    vision = [] if family.images is None else family.images.tower_blocks(family.images.tower(hf))
    return [*vision, *family.decoder(hf).layers]


def shard(model: nn.Module, hf: Any, mesh: DeviceMesh, config: ExperimentConfig, whole: set[nn.Parameter]) -> None:
    """Shard a model over the ranks of ``mesh``, and compile its blocks if ``training.compile_blocks`` says so.

    Args:
        hf: the Hugging Face model in ``model``.
        whole: the model's parameters that are not sharded.
    """
    blocks = [block for block in transformer_blocks(hf) if whole.isdisjoint(block.parameters())]
    computes_in = compute_dtype(config, mesh.device_type)
    # float32 attention is no single operator, so a compiled block would consist of several graphs
    if _is_on(config.training.compile_blocks, auto=mesh.device_type == "cuda" and computes_in != torch.float32):
        compile_blocks(blocks)
    precision = MixedPrecisionPolicy(
        param_dtype=computes_in,
        reduce_dtype=torch.float32,  # no output_dtype: a block's output is the next block's input
    )
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=precision, reshard_after_forward=reshards_after_forward(config, mesh))
    fully_shard(model, mesh=mesh, mp_policy=precision, ignored_params=whole)
    layers = family_of(hf.config).decoder(hf).layers
    for before, after in pairwise(layers):  # FSDP2 does this by itself in the backward pass
        before.set_modules_to_forward_prefetch([after])
    for module in model.modules():
        if isinstance(module, FSDPModule):  # sum over ranks: the tokens' weights contain the step's denominators
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def reshards_after_forward(config: ExperimentConfig, mesh: DeviceMesh) -> bool:
    """Whether a block's gathered weights are freed after its forward pass, and gathered again for the backward pass."""
    return _is_on(config.training.reshard_after_forward, auto=mesh.size() > 1)


def _is_on(choice: Literal["auto", "on", "off"], *, auto: bool) -> bool:
    return auto if choice == "auto" else choice == "on"


def reshard(model: nn.Module) -> None:
    """Free the gathered weights, which a forward pass without a backward pass leaves in memory."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def checkpoint_blocks(blocks: Sequence[nn.Module], mode: Literal["none", "selective", "full"]) -> None:
    """Let every block compute part of its activations again in the backward pass. Call it before sharding."""
    if mode == "none":
        return
    context: dict[str, Any] = {"context_fn": _selective} if mode == "selective" else {}
    for block in blocks:
        again = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, **context)
        block.forward = again


def compile_blocks(blocks: Sequence[nn.Module]) -> None:
    """torch.compile each block's forward without the module's hooks. One graph serves all blocks of a kind, for any
    number of tokens."""
    for block in blocks:
        block.forward = _with_any_sizes(torch.compile(block.forward))


def _with_any_sizes(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """``compiled`` for tensors of any size. With ``dynamic=True`` instead, torch would also keep every number of the
    module open: head sizes, and floats, for which it compiles C++ for half a minute."""

    def call(*arguments: Any, **named: Any) -> Any:
        for tensor in (*_tensors(arguments), *_tensors(tuple(named.values()))):
            if not hasattr(tensor, "_dynamo_weak_dynamic_indices"):
                torch._dynamo.maybe_mark_dynamic(tensor, [dim for dim, size in enumerate(tensor.shape) if size > 1])
        return compiled(*arguments, **named)

    return call


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _tensors(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for item in fields(value):
            yield from _tensors(getattr(value, item.name))


def _selective() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return create_selective_checkpoint_contexts(_policy)  # type: ignore[no-any-return, no-untyped-call]


def _policy(_: SelectiveCheckpointContext, operator: object, *_args: object, **_kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _SAVED else CheckpointPolicy.PREFER_RECOMPUTE


def bucketed(
    tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int, dtype: torch.dtype | None = None
) -> Iterator[list[tuple[str, Tensor]]]:
    """Consecutive tensors, as few per bucket as reach ``bucket_bytes`` in ``dtype`` (None: in their own)."""
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, value in tensors:
        bucket.append((name, value))
        size += value.numel() * (dtype or value.dtype).itemsize
        if size >= bucket_bytes:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


def gather_whole(
    tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None, bucket_bytes: int
) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors from dim-0 shards. One all-gather per bucket, because each costs its latency. Tensors that are not
    sharded pass through. Collective."""
    for bucket in bucketed(tensors, bucket_bytes, dtype):
        yield from _gather_bucket(bucket, dtype)


def _gather_bucket(bucket: Sequence[tuple[str, Tensor]], dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    sharded = [(name, value) for name, value in bucket if isinstance(value, DTensor)]
    shards = [value.to_local().detach().to(dtype or value.dtype) for _, value in sharded]
    whole: dict[str, Tensor] = {}
    if sharded:
        group = sharded[0][1].device_mesh.get_group()
        ranks = dist.get_world_size(group)
        chunks = [-(-value.shape[0] // ranks) * (value.numel() // max(1, value.shape[0])) for _, value in sharded]
        mine = shards[0].new_zeros(sum(chunks))  # torch.chunk's layout: equal chunks, the last ranks may have less
        offset = 0
        for shard, chunk in zip(shards, chunks, strict=True):
            mine[offset : offset + shard.numel()] = shard.flatten()
            offset += chunk
        everyone = mine.new_empty(ranks, sum(chunks))
        dist.all_gather_into_tensor(everyone.flatten(), mine, group=group)
        offset = 0
        for (name, value), chunk in zip(sharded, chunks, strict=True):
            flat = everyone[:, offset : offset + chunk].flatten()
            whole[name] = flat[: value.numel()].view(value.shape)
            offset += chunk
    for name, tensor in bucket:
        yield name, whole[name] if name in whole else tensor.detach().to(dtype or tensor.dtype)


def unsharded(tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a world of one rank, where each shard is a whole tensor. No copy, no collective."""
    for name, value in tensors:
        yield name, local_part(value).detach().to(dtype or value.dtype)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_rows(tensor: Tensor) -> slice:
    """The rows of the whole tensor that this rank holds."""
    if not isinstance(tensor, DTensor):
        return slice(None)
    rows, mesh = tensor.shape[0], tensor.device_mesh
    chunk = -(-rows // mesh.size())  # torch.chunk's layout
    first = min(mesh.get_local_rank() * chunk, rows)
    return slice(first, min(first + chunk, rows))


def tied_aliases(model: nn.Module) -> dict[str, str]:
    """The further names of tied parameters, with the first name of each."""
    first: dict[nn.Parameter, str] = {}
    aliases: dict[str, str] = {}
    for raw, parameter in model.named_parameters(remove_duplicate=False):
        name = plain_name(raw)
        if first.setdefault(parameter, name) != name:
            aliases[name] = first[parameter]
    return aliases


def plain_name(name: str) -> str:
    """A parameter's name without the parts that torch.compile and activation checkpointing add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
