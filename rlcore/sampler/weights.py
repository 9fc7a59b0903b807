"""How an engine takes the trainer's weights, and how it is known that it did. Nothing here imports vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlcore.sampler.verify import Copy, Parts, Took, added, bit_sum, taken


class Loaded(NamedTuple):
    """Two ``checksum``s."""

    sent: int  # of all tensors that came
    due: int  # of what the engine, or this rank's part of it, has to hold now


class WeightLoader:
    """Puts Hugging Face tensors into the engine's parameters, which keep their addresses: CUDA graphs stay valid.

    The first load goes tensor by tensor through vLLM's loaders, which fuse, cut and rename, and is watched: each is a
    plain copy out of one tensor into a slice of one parameter. Later loads make the same copies, many in one kernel.
    """

    def __init__(self, llm: Any, device: str, parts: Parts | None) -> None:
        """
        Args:
            parts: of an engine that several ranks hold together.
        """
        self._llm, self._on_cpu, self._parts = llm, device == "cpu", parts
        self._copies: dict[str, list[Copy]] | None = None

    def load(self, weights: Iterator[tuple[str, Tensor]], bucket_bytes: int = 1 << 30) -> Loaded:
        """
        Args:
            bucket_bytes: of tensors held before they are copied.

        Raises:
            SamplerError: no rank of the engine took some element of some tensor.
        """
        came: list[Tensor] = []

        def counted() -> Iterator[tuple[str, Tensor]]:
            for name, value in weights:
                came.append(bit_sum(value))
                yield name, value

        watched = self._on_cpu or self._copies is None
        if self._parts is not None:
            self._parts.begin()
        self._load(counted(), bucket_bytes)
        sent = added(came)
        return Loaded(sent, sent if self._parts is None else self._parts.due(verify=watched))

    def _load(self, weights: Iterator[tuple[str, Tensor]], bucket_bytes: int) -> None:
        took = None if self._parts is None else self._parts.took
        if self._on_cpu and took is None:
            self._reload(weights)
        elif self._on_cpu and took is not None:
            watched_reload(self._reload, weights, took)
        elif self._copies is None:
            (self._copies,) = self._llm.apply_model(lambda model: watched_load(model, weights, took))
        else:
            replay_load(self._copies, weights, bucket_bytes, took)

    def _reload(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """On CPU linear layers keep no parameter to load into, and have to be packed again."""
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights, "is_checkpoint_format": True})


class _CopyWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Copies out of sources, which are told apart by the memory that they lie in."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sources: dict[int, tuple[Tensor, list[Copy]]] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is torch.ops.aten.copy_.default and not args[0].is_meta:  # vLLM counts what a layer still lacks on meta
            into, value = args[0], args[1]
            source, seen = self.sources.get(_memory(value), (None, []))
            if source is not None:
                offset = value.storage_offset() - source.storage_offset()
                copy = Copy(into, tuple(value.shape), value.stride(), offset)
                if not any(_is_same(copy, other) for other in seen):  # vLLM on CPU loads a bias twice
                    seen.append(copy)
        return op(*args, **(kwargs or {}))


def _is_same(one: Copy, other: Copy) -> bool:
    return one[1:] == other[1:] and one.into.data_ptr() == other.into.data_ptr()


def _memory(value: Tensor) -> int:
    return -1 if value.is_meta else value.untyped_storage().data_ptr()


def watched_load(model: Any, weights: Iterator[tuple[str, Tensor]], took: Took | None = None) -> dict[str, list[Copy]]:
    """Load by the model's own ``load_weights``; what was copied where, by source. All sources are contiguous."""
    copies: dict[str, list[Copy]] = {}
    watch = _CopyWatch()

    def watched() -> Iterator[tuple[str, Tensor]]:
        for name, value in weights:
            source, seen = value.detach().contiguous(), copies.setdefault(name, [])
            watch.sources = {_memory(source): (source, seen)}  # only this one: others may lie in the same memory
            yield name, source
            if took is not None:
                took(name, source, seen)

    with torch.no_grad(), watch:
        model.load_weights(watched())
    return copies


def watched_reload(
    reload: Callable[[Iterator[tuple[str, Tensor]]], None], weights: Iterator[tuple[str, Tensor]], took: Took
) -> None:
    """The same where a layer's tensors are kept until all are there, and copied then."""
    named: list[str] = []
    watch = _CopyWatch()

    def watched() -> Iterator[tuple[str, Tensor]]:
        for name, value in weights:
            source = value.detach().clone(memory_format=torch.contiguous_format)  # in memory of its own
            named.append(name)
            watch.sources[_memory(source)] = (source, [])
            yield name, source

    with torch.no_grad(), watch:
        reload(watched())
    for name, (source, seen) in zip(named, watch.sources.values(), strict=True):
        took(name, source, seen)


@torch.no_grad()
def replay_load(
    copies: Mapping[str, list[Copy]],
    weights: Iterator[tuple[str, Tensor]],
    bucket_bytes: int,
    took: Took | None = None,
) -> None:
    """The copies of a ``watched_load`` once more, from other values of the same tensors."""
    into: list[Tensor] = []
    values: list[Tensor] = []
    held = 0
    for name, value in weights:
        source = value.detach().contiguous()
        into += [copy.into for copy in copies[name]]
        values += taken(source, copies[name])
        if took is not None:
            took(name, source, copies[name])
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


def bucketed(tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """In order, each bucket as few tensors as reach ``bucket_bytes``."""
    bucket: list[tuple[str, Tensor]] = []
    held = 0
    for name, value in tensors:
        bucket.append((name, value))
        held += value.nbytes
        if held >= bucket_bytes:
            yield bucket
            bucket, held = [], 0
    if bucket:
        yield bucket
