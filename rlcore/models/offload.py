"""Tensors offloaded to host memory while nothing uses them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from rlcore.models.sharding import local_part

_SMALL = 1024  # bytes: smaller tensors stay on the device, a copy would cost more than it frees


class HostOffload:
    """Moves the memory of tensors to the host and back, bit for bit. Local to a rank.

    The tensors and their views stay the same objects, so FSDP2 and optimizers do not notice. FSDP2's CPUOffloadPolicy
    differs: it keeps the weights on the host during the passes too, and runs the optimizer there.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        """
        Args:
            tensors: returns those to move, at each ``offload``. Of a sharded tensor this rank's shard moves.
        """
        self._tensors = tensors
        self._offloaded: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []  # on the device, on the host
        self._host: list[torch.UntypedStorage] = []  # reused by the next call: page-locking is slow

    def offload(self) -> None:
        """Move to host memory, page-locked for tensors of a GPU. Do not use the tensors until ``onload``."""
        if self._offloaded:
            return
        storages: dict[int, torch.UntypedStorage] = {}  # by address: several tensors may share one
        on_gpu = False
        for tensor in self._tensors():
            storage = local_part(tensor).untyped_storage()
            if storage.nbytes() >= _SMALL and storage.resizable():  # torch cannot free the pages of a mapped file
                storages[storage.data_ptr()] = storage
                on_gpu |= storage.is_cuda
        for place, storage in enumerate(storages.values()):
            size = storage.nbytes()
            if place == len(self._host) or self._host[place].nbytes() != size:
                self._host[place : place + 1] = [
                    torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu).untyped_storage()
                ]
            self._host[place].copy_(storage, non_blocking=True)
            self._offloaded.append((storage, self._host[place]))
        if on_gpu:
            torch.cuda.synchronize()  # the copies are done, and no other stream reads the device's memory
        for storage, _ in self._offloaded:
            storage.resize_(0)

    def onload(self) -> None:
        """Move back to the device what is offloaded."""
        for storage, host in self._offloaded:
            storage.resize_(host.nbytes())
            storage.copy_(host, non_blocking=True)
        self._offloaded = []


class OffloadedOptimizer:
    """Steps an optimizer whose state is offloaded, a few parameters at a time.

    The device never holds more state than that of the largest parameter. For an optimizer that treats each parameter
    separately, as AdamW does, the step is exactly the step over all of them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._parts = [(part, self._state_of(part)) for part in in_parts(parameters)]

    def _state_of(self, part: list[nn.Parameter]) -> HostOffload:
        def tensors() -> Iterator[Tensor]:
            for parameter in part:  # looked up at each call: loading replaces the state's dict
                yield from filter(torch.is_tensor, self._optimizer.state.get(parameter, {}).values())

        return HostOffload(tensors)

    def step(self) -> None:
        """Take one step. Afterwards the gradients are None and the state is on the host."""
        gradients = {parameter: parameter.grad for part, _ in self._parts for parameter in part}
        self._optimizer.zero_grad(set_to_none=True)  # the optimizer skips parameters without a gradient
        for part, state in self._parts:
            for parameter in part:
                parameter.grad = gradients.pop(parameter)
            state.onload()
            self._optimizer.step()
            state.offload()
            self._optimizer.zero_grad(set_to_none=True)

    def offload(self) -> None:
        for _, state in self._parts:
            state.offload()

    def onload(self) -> None:
        """Move the whole state to the device, to save or load it."""
        for _, state in self._parts:
            state.onload()


def in_parts(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Consecutive parameters, each part with at most as many elements on this rank as the largest parameter."""
    sizes = [(parameter, local_part(parameter).numel()) for parameter in parameters]
    largest = max((size for _, size in sizes), default=0)
    part: list[nn.Parameter] = []
    elements = 0
    for parameter, size in sizes:
        if part and elements + size > largest:
            yield part
            part, elements = [], 0
        part.append(parameter)
        elements += size
    if part:
        yield part
