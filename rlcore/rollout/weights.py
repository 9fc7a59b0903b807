"""How an engine takes the trainer's weights, and how it is known that it did. Nothing here imports vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


class WeightLoader:
    """Puts Hugging Face tensors into the engine's parameters, which keep their addresses: CUDA graphs stay valid.

    The first load goes tensor by tensor through vLLM's loaders, which fuse, cut and rename, and is watched: each is a
    plain copy out of one tensor into a slice of one parameter. Later loads make the same copies, many in one kernel.
    """

    def __init__(self, llm: Any, device: str) -> None:
        self._llm, self._on_cpu = llm, device == "cpu"
        self._copies: dict[str, list[_Copy]] | None = None

    def load(self, weights: Iterator[tuple[str, Tensor]], bucket_bytes: int = 1 << 30) -> None:
        """
        Args:
            bucket_bytes: of tensors held before they are copied.
        """
        if self._on_cpu:  # its linear layers keep no parameter to load into, and have to be packed again
            self._llm.collective_rpc(
                "reload_weights", kwargs={"weights_iterator": weights, "is_checkpoint_format": True}
            )
        elif self._copies is None:
            (self._copies,) = self._llm.apply_model(lambda model: watched_load(model, weights))
        else:
            replay_load(self._copies, weights, bucket_bytes)


class _Copy(NamedTuple):
    """``into`` takes what lies in the source tensor's memory at this place."""

    into: Tensor
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # elements behind the source's first


class _CopyWatch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.source: Tensor | None = None
        self.seen: list[_Copy] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is torch.ops.aten.copy_.default and self.source is not None:
            into, value = args[0], args[1]
            if value.untyped_storage().data_ptr() == self.source.untyped_storage().data_ptr():
                offset = value.storage_offset() - self.source.storage_offset()
                self.seen.append(_Copy(into, tuple(value.shape), value.stride(), offset))
        return op(*args, **(kwargs or {}))


def watched_load(model: Any, weights: Iterator[tuple[str, Tensor]]) -> dict[str, list[_Copy]]:
    """Load by the model's own ``load_weights``; what was copied where, by source. All sources are contiguous."""
    copies: dict[str, list[_Copy]] = {}
    watch = _CopyWatch()

    def watched() -> Iterator[tuple[str, Tensor]]:
        for name, value in weights:
            watch.source, watch.seen = value.detach().contiguous(), copies.setdefault(name, [])
            yield name, watch.source

    with torch.no_grad(), watch:
        model.load_weights(watched())
    return copies


@torch.no_grad()
def replay_load(copies: Mapping[str, list[_Copy]], weights: Iterator[tuple[str, Tensor]], bucket_bytes: int) -> None:
    """The copies of a ``watched_load`` once more, from other values of the same tensors."""
    into: list[Tensor] = []
    values: list[Tensor] = []
    held = 0
    for name, value in weights:
        source = value.detach().contiguous()
        for copy in copies[name]:
            into.append(copy.into)
            values.append(source.as_strided(copy.size, copy.stride, source.storage_offset() + copy.offset))
        held += source.nbytes
        if into and held >= bucket_bytes:
            torch._foreach_copy_(into, values)
            into, values, held = [], [], 0
    if into:
        torch._foreach_copy_(into, values)


def unsharded(tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Of a world of one rank, where each shard is the whole tensor: no packing, no collective."""
    for name, value in tensors:
        local = value.to_local() if isinstance(value, DTensor) else value
        yield name, local.detach().to(dtype or local.dtype)


def checksum(values: Iterable[Tensor]) -> int:
    """Sum of the bit patterns of every element, as integers modulo 2^64.

    Exact, so equal for fused and unfused, padded (zeros) and unpadded layouts of the same values, and changed by a
    single element that is stale or rounded. One reduction per tensor and one wait for the device.
    """
    return added([bit_sum(value) for value in values])


def bit_sum(value: Tensor) -> Tensor:
    """[] int64 on the value's device."""
    value = value.detach()
    if value.device.type == "cpu":  # what is read through a kernel has lost the sign of its zeros
        value = value + 0.0
    bits = torch.int32 if value.element_size() == 4 else torch.int16
    return value.view(bits).sum(dtype=torch.int64)


def added(sums: Sequence[Tensor]) -> int:
    """The sums of single tensors as one number."""
    return int(torch.stack(list(sums)).sum())
