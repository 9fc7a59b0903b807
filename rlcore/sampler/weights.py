"""How an engine takes the trainer's weights, and how it verifies that it holds them, bit for bit.

Nothing here imports vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlcore.errors import SamplerError

_SUMMED_AT_ONCE = 1 << 24  # elements: on a GPU torch makes a copy of them in int64, 8 bytes each


def checksum(values: Iterable[Tensor]) -> int:
    """Sum of the bit patterns of every element, as integers modulo 2^64.

    Equal for fused and unfused, zero-padded and unpadded layouts of the same values. Different if a single element is
    stale or rounded. One reduction per tensor, and one synchronisation with the device.
    """
    return added([bit_sum(value) for value in values])


def bit_sum(value: Tensor) -> Tensor:
    """[] int64 on the value's device."""
    value = value.detach()
    if (
        value.device.type == "cpu" and value.element_size() > 1
    ):  # weights that are read through a kernel have lost the sign of zeros
        value = value + 0.0
    bits = value.view({4: torch.int32, 2: torch.int16, 1: torch.int8}[value.element_size()])
    if bits.numel() <= _SUMMED_AT_ONCE:
        return bits.sum(dtype=torch.int64)
    rows = max(1, _SUMMED_AT_ONCE * bits.shape[0] // bits.numel())
    return torch.stack([part.sum(dtype=torch.int64) for part in torch.split(bits, rows)]).sum()


def added(sums: Sequence[Tensor]) -> int:
    """The total of the ``bit_sum`` of several tensors."""
    return int(torch.stack(list(sums)).sum())


class Copy(NamedTuple):
    """A copy of a part of a source tensor, given by its place in the source's memory, into a parameter."""

    into: Tensor
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # in elements from the source's first


Shape = tuple[int, ...]
Place = tuple[tuple[int, ...], tuple[int, ...], int]  # size, stride and offset of a copy
Places = Mapping[str, tuple[Shape, list[Place]]]  # by source: its shape, and the parts that a rank copied
Quantising = Callable[[], AbstractContextManager[Callable[[], int]]]
Took = Callable[[str, Tensor, Sequence[Copy]], None]


def taken(source: Tensor, copies: Sequence[Copy]) -> list[Tensor]:
    """The copied parts, as views of the source."""
    return [source.as_strided(c.size, c.stride, source.storage_offset() + c.offset) for c in copies]


class Parts:
    """The checksum that this rank must have after a load, if several ranks hold one engine together.

    A rank copies a part of most tensors, so its checksum is not that of the tensors sent. The places of all ranks'
    copies show that together they copied every element.
    """

    def __init__(self, gather: Callable[[Places], list[Places]], *, may_tie: bool = True) -> None:
        """
        Args:
            gather: an all-gather over the ranks of the engine. Collective.
            may_tie: whether the engine may tie a tensor to an equal one and copy only the other.
        """
        self._gather, self._may_tie = gather, may_tie
        self._tied: dict[str, str] = {}
        self.begin()

    def begin(self) -> None:
        """Forget the last load. Call it before each load."""
        self.places: dict[str, tuple[Shape, list[Place]]] = {}
        self._wholes: dict[str, Tensor] = {}
        self._sums: dict[str, list[Tensor]] = {}

    def took(self, name: str, source: Tensor, copies: Sequence[Copy]) -> None:
        self.places[name] = (tuple(source.shape), [(c.size, c.stride, c.offset) for c in copies])
        self._wholes[name] = bit_sum(source)
        self._sums[name] = [bit_sum(part) for part in taken(source, copies)]

    def of(self, sources: Mapping[str, Tensor], copies: Mapping[str, Sequence[Copy]]) -> int:
        """``due`` after a load of ``sources``, verified."""
        self.begin()
        for name, source in sources.items():
            self.took(name, source, copies[name])
        return self.due(verify=True)

    def due(self, *, verify: bool) -> int:
        """The ``checksum`` that this rank must have after the load.

        Args:
            verify: also verify that the ranks copied every element. Collective. Once is enough for the same copies.

        Raises:
            SamplerError: some element was not copied, or a tensor differs from the one that the engine ties it to.
        """
        if verify:
            device = next(iter(self._wholes.values())).device
            self._tied = self._find_tied(find_absent(self._gather(self.places), device))
        for name, twin in self._tied.items():
            if not torch.equal(self._wholes[name], self._wholes[twin]):
                raise SamplerError(
                    f"the sampler ties {name} to {twin}, and the trainer's two tensors differ. Correct "
                    "tie_word_embeddings in the model's config.json."
                )
        sums = [*self._sums.values(), *(self._sums[twin] for twin in self._tied.values())]
        return added([part for parts in sums for part in parts])

    def _find_tied(self, absent: Mapping[str, int]) -> dict[str, str]:
        """A tensor that no rank copies must be tied to one that a rank copies, with the same bits and shape."""
        twins: dict[str, str] = {}
        for name, elements in absent.items():
            candidates = self.places if self._may_tie and name in self.places else ()
            taken_somewhere = [other for other in candidates if other not in absent]
            equal = [
                other
                for other in taken_somewhere
                if self.places[other][0] == self.places[name][0]
                and torch.equal(self._wholes[other], self._wholes[name])
            ]
            if not equal:
                raise SamplerError(_not_taken(name, elements, elements))
            twins[name] = equal[0]
        return twins


def find_absent(ranks: Sequence[Places], device: torch.device) -> dict[str, int]:
    """Tensors of which no rank copied anything, and their number of elements.

    Raises:
        SamplerError: some elements of another tensor were copied by no rank.
    """
    absent: dict[str, int] = {}
    shapes: dict[str, set[Shape]] = {}
    for rank in ranks:
        for name, (shape, _) in rank.items():
            shapes.setdefault(name, set()).add(shape)
    for name, seen in shapes.items():
        shape, *others = sorted(seen)
        if others:
            raise SamplerError(
                f"the ranks saw {name} in the shapes {sorted(seen)}: the trainer sent them different weights."
            )
        places = [place for rank in ranks if name in rank for place in rank[name][1]]
        if not places:
            absent[name] = math.prod(shape)
            continue
        left = torch.ones(math.prod(shape), dtype=torch.bool, device=device)
        for size, stride, offset in places:
            left.as_strided(size, stride, offset).fill_(False)
        if missing := int(left.sum()):
            raise SamplerError(_not_taken(name, missing, left.numel()))
    return absent


def _not_taken(name: str, missing: int, total: int) -> str:
    return (
        f"{missing} of the {total} elements of {name} were taken by no rank of the sampler. Check that vLLM loads each "
        "tensor of this architecture by its Hugging Face name and shards it by plain copies, or set "
        "rollout.tensor_parallel to 1."
    )


# --- loading ---


class Loaded(NamedTuple):
    """Two ``checksum``s."""

    sent: int  # of the tensors received
    due: int  # that the engine, or this rank's part of it, must have now


class WeightLoader:
    """Puts Hugging Face tensors into the engine's parameters, which keep their addresses: CUDA graphs stay valid.

    vLLM's loaders fuse, shard and rename tensors, but what they do is plain copies from a tensor into a slice of a
    parameter. The first load runs through them and records these copies. Later loads repeat them, many in one kernel.
    """

    def __init__(self, llm: Any, device: str, parts: Parts | None, quantising: Quantising | None = None) -> None:
        """
        Args:
            parts: for an engine that several ranks hold together.
            quantising: ``QuantisedLayers.watched`` of an engine that quantises weights; one rank alone holds it.
        """
        self._llm, self._on_cpu, self._parts, self._quantising = llm, device == "cpu", parts, quantising
        # a head that the engine lacks is the embeddings: it counts in the checksum and is not loaded
        self._copies: dict[str, list[Copy]] | None = None
        (self._has_head,) = llm.apply_model(has_head)

    def load(self, weights: Iterator[tuple[str, Tensor]], bucket_bytes: int = 1 << 30) -> Loaded:
        """
        Args:
            bucket_bytes: size of the tensors that are copied together.

        Raises:
            SamplerError: no rank of the engine copied some element of some tensor.
        """
        sums: list[Tensor] = []

        def counted() -> Iterator[tuple[str, Tensor]]:
            for name, value in weights:
                sums.append(bit_sum(value))
                if self._has_head or not _is_head(name):
                    yield name, value
                elif self._parts is not None:
                    self._parts.took(name, value, ())

        watched = self._on_cpu or self._copies is None
        if self._parts is not None:
            self._parts.begin()
        if self._quantising is not None:
            with self._quantising() as excess:
                self._reload(counted())
            return Loaded(added(sums), added(sums) + excess())
        self._load(counted(), bucket_bytes)
        sent = added(sums)
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
        """Linear layers have no parameter to load into, because vLLM packs them on a CPU, or quantises them."""
        self._llm.apply_model(forget_expert_kernels)
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights, "is_checkpoint_format": True})


def has_head(model: Any) -> bool:
    """Whether the engine's model has an LM head by that name.
    An engine of a model whose head is always tied may have none."""
    return any(_is_head(f"{name}.weight") for name, _ in model.named_modules(remove_duplicate=False))


def _is_head(name: str) -> bool:
    return name == "lm_head.weight" or name.endswith(".lm_head.weight")


def forget_expert_kernels(model: Any) -> None:
    """Let vLLM make the kernels of experts again at the next reload. It packs the experts' weights only when it makes
    the kernel: a later reload would give it weights that are not packed, with the right checksum."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if hasattr(method, "moe_kernel"):
            method.moe_kernel = None


class _CopyWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records copies from ``sources``, which it recognises by their memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sources: dict[int, tuple[Tensor, list[Copy]]] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is torch.ops.aten.copy_.default and not args[0].is_meta:  # vLLM counts missing elements on meta
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


def watched(load: Callable[[], None], sources: Mapping[str, Tensor]) -> dict[str, list[Copy]]:
    """Call ``load``, and return the copies by source. Each source has memory of its own."""
    copies: dict[str, list[Copy]] = {name: [] for name in sources}
    watch = _CopyWatch()
    watch.sources = {_memory(source): (source, copies[name]) for name, source in sources.items()}
    with torch.no_grad(), watch:
        load()
    return copies


def watched_load(model: Any, weights: Iterator[tuple[str, Tensor]], took: Took | None = None) -> dict[str, list[Copy]]:
    """Load through the model's ``load_weights``, and return the copies by source. All sources are contiguous."""
    copies: dict[str, list[Copy]] = {}
    watch = _CopyWatch()

    def watched() -> Iterator[tuple[str, Tensor]]:
        for name, value in weights:
            source, seen = value.detach().contiguous(), copies.setdefault(name, [])
            watch.sources = {_memory(source): (source, seen)}  # only this one: the next may reuse the same memory
            yield name, source
            if took is not None:
                took(name, source, seen)

    with torch.no_grad(), watch:
        model.load_weights(watched())
    return copies


def watched_reload(
    reload: Callable[[Iterator[tuple[str, Tensor]]], None], weights: Iterator[tuple[str, Tensor]], took: Took
) -> None:
    """The same for a ``reload`` that collects all tensors of a layer before it copies them."""
    named: list[str] = []
    watch = _CopyWatch()

    def watched() -> Iterator[tuple[str, Tensor]]:
        for name, value in weights:
            source = value.detach().clone(memory_format=torch.contiguous_format)  # new memory, to recognise it by
            named.append(name)
            watch.sources[_memory(source)] = (source, [])
            yield name, source

    with torch.no_grad(), watch:
        reload(watched())
    for name, (source, seen) in zip(named, watch.sources.values(), strict=True):
        took(name, source, seen)


@torch.no_grad()
def replay_load(
    copies: Mapping[str, list[Copy]], weights: Iterator[tuple[str, Tensor]], bucket_bytes: int, took: Took | None = None
) -> None:
    """Repeat the copies of a ``watched_load`` with new values of the same tensors."""
    into: list[Tensor] = []
    values: list[Tensor] = []
    size = 0
    for name, value in weights:
        source = value.detach().contiguous()
        into += [copy.into for copy in copies[name]]
        values += taken(source, copies[name])
        if took is not None:
            took(name, source, copies[name])
        size += source.nbytes
        if into and size >= bucket_bytes:
            torch._foreach_copy_(into, values)
            into, values, size = [], [], 0
    if into:
        torch._foreach_copy_(into, values)
