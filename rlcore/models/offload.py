"""Tensors that rest in host memory while nothing uses them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_SMALL = 1024  # bytes: what is smaller stays, its copy would cost more than it frees


class HostRest:
    """Moves the memory behind tensors away and back, bit for bit; the tensors and all views of them stay the same
    objects, so whatever holds them (FSDP2, an optimizer) need not know. Local to a rank.

    Not FSDP2's CPUOffloadPolicy, which keeps the weights on the host during the passes as well and steps there.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        """
        Args:
            tensors: those to move, asked for at each ``leave``; of sharded ones this rank's shard.
        """
        self._tensors = tensors
        self._away: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []  # where it belongs, where it is
        self._host: list[torch.UntypedStorage] = []  # kept from one time to the next: page-locking takes long

    def leave(self) -> None:
        """Into host memory, page-locked where the tensors are a GPU's. Until ``come_back`` nothing may touch them."""
        if self._away:
            return
        found: dict[int, torch.UntypedStorage] = {}  # views of the same memory once
        on_gpu = False
        for tensor in self._tensors():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            storage = local.untyped_storage()
            if storage.nbytes() >= _SMALL and storage.resizable():  # a mapped file's pages are not torch's to free
                found[storage.data_ptr()] = storage
                on_gpu |= local.is_cuda
        for place, storage in enumerate(found.values()):
            size = storage.nbytes()
            if place == len(self._host) or self._host[place].nbytes() != size:
                self._host[place : place + 1] = [
                    torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu).untyped_storage()
                ]
            self._host[place].copy_(storage, non_blocking=True)
            self._away.append((storage, self._host[place]))
        if on_gpu:
            torch.cuda.synchronize()  # copied, and read by no other stream any more
        for storage, _ in self._away:
            storage.resize_(0)

    def come_back(self) -> None:
        """Does nothing where nothing is away."""
        for storage, host in self._away:
            storage.resize_(host.nbytes())
            storage.copy_(host, non_blocking=True)
        self._away = []
