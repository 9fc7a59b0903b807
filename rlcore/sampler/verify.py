"""Verify that an engine holds the weights that were sent, bit for bit. Nothing here imports vLLM."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlcore.errors import SamplerError


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


class Copy(NamedTuple):
    """``into`` takes what lies in the source tensor's memory at this place."""

    into: Tensor
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # elements behind the source's first


Shape = tuple[int, ...]
Place = tuple[tuple[int, ...], tuple[int, ...], int]  # size, stride and offset of a copy
Places = Mapping[str, tuple[Shape, list[Place]]]  # by source: its shape, and what a rank took of it
Took = Callable[[str, Tensor, Sequence[Copy]], None]


def taken(source: Tensor, copies: Sequence[Copy]) -> list[Tensor]:
    """What the copies took, as views of the source."""
    return [source.as_strided(c.size, c.stride, source.storage_offset() + c.offset) for c in copies]


class Parts:
    """What this rank, of several that hold one engine, has to hold after a load: what its copies took.

    A rank takes a part of most tensors and all of some, so its sum is not that of what was sent. That the ranks
    together took every element is verified by the places of their copies.
    """

    def __init__(self, gather: Callable[[Places], list[Places]]) -> None:
        """
        Args:
            gather: what each rank of the engine gives, for all of them. Collective.
        """
        self._gather = gather
        self._tied: dict[str, str] = {}
        self.begin()

    def begin(self) -> None:
        """Before a load: forget the last one."""
        self.places: dict[str, tuple[Shape, list[Place]]] = {}
        self._wholes: dict[str, Tensor] = {}
        self._sums: dict[str, list[Tensor]] = {}

    def took(self, name: str, source: Tensor, copies: Sequence[Copy]) -> None:
        self.places[name] = (tuple(source.shape), [(c.size, c.stride, c.offset) for c in copies])
        self._wholes[name] = bit_sum(source)
        self._sums[name] = [bit_sum(part) for part in taken(source, copies)]

    def due(self, *, verify: bool) -> int:
        """``checksum`` of what this rank has to hold after the load.

        Args:
            verify: that the ranks took every element. Collective. Not needed again for the same copies.

        Raises:
            SamplerError: they did not, or a tensor that the engine ties to another one differs from it.
        """
        if verify:
            device = next(iter(self._wholes.values())).device
            self._tied = self._twins(nowhere(self._gather(self.places), device))
        for name, twin in self._tied.items():
            if not torch.equal(self._wholes[name], self._wholes[twin]):
                raise SamplerError(
                    f"the sampler ties {name} to {twin}, and the trainer's two tensors differ. Set tie_word_embeddings "
                    "in the model's config.json to what the trainer does."
                )
        sums = [*self._sums.values(), *(self._sums[twin] for twin in self._tied.values())]
        return added([part for parts in sums for part in parts])

    def _twins(self, absent: Mapping[str, int]) -> dict[str, str]:
        """A tensor that no rank takes has to be tied to one that they take: the same bits in the same shape."""
        twins: dict[str, str] = {}
        for name, elements in absent.items():
            taken_somewhere = [other for other in self.places if name in self.places and other not in absent]
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


def nowhere(ranks: Sequence[Places], device: torch.device) -> dict[str, int]:
    """Tensors of which no rank took anything, and how many elements they have.

    Raises:
        SamplerError: of another tensor, some elements were taken by no rank.
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
                f"the ranks saw {name} in the shapes {sorted(seen)}: the trainer sent them other weights."
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
        "tensor of this architecture by its Hugging Face name, and cuts it by plain copies; rollout.tensor_parallel=1 "
        "leaves it whole."
    )
