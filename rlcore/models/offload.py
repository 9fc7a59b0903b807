"""Tensors offloaded to host memory while nothing uses them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_SMALL = 1024  # bytes: what is smaller stays, its copy would cost more than it frees


class HostOffload:
    """Moves the memory behind tensors to the host and back, bit for bit. The tensors and all views of them stay the
    same objects, so FSDP2 and optimizers need not know. Local to a rank.

    FSDP2's CPUOffloadPolicy is another thing: it keeps the weights on the host during the passes too and steps there.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        """
        Args:
            tensors: those to move, called at each ``offload``; of a sharded tensor this rank's shard moves.
        """
        self._tensors = tensors
        self._offloaded: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []  # on the device, on the host
        self._host: list[torch.UntypedStorage] = []  # kept between calls: page-locking takes long

    def offload(self) -> None:
        """Into host memory, page-locked for tensors of a GPU. Until ``onload`` nothing may touch them."""
        if self._offloaded:
            return
        found: dict[int, torch.UntypedStorage] = {}  # views of the same memory once
        on_gpu = False
        for tensor in self._tensors():
            storage = local_part(tensor).untyped_storage()
            if storage.nbytes() >= _SMALL and storage.resizable():  # a mapped file's pages are not torch's to free
                found[storage.data_ptr()] = storage
                on_gpu |= storage.is_cuda
        for place, storage in enumerate(found.values()):
            size = storage.nbytes()
            if place == len(self._host) or self._host[place].nbytes() != size:
                self._host[place : place + 1] = [
                    torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu).untyped_storage()
                ]
            self._host[place].copy_(storage, non_blocking=True)
            self._offloaded.append((storage, self._host[place]))
        if on_gpu:
            torch.cuda.synchronize()  # copied, and read by no other stream any more
        for storage, _ in self._offloaded:
            storage.resize_(0)

    def onload(self) -> None:
        """Does nothing where nothing is offloaded."""
        for storage, host in self._offloaded:
            storage.resize_(host.nbytes())
            storage.copy_(host, non_blocking=True)
        self._offloaded = []


class OffloadedOptimizer:
    """Steps an optimizer whose state is offloaded, some parameters at a time: the device holds at most the state of the
    largest parameter. An optimizer that treats each parameter by itself, as AdamW does, takes exactly the step that it
    would take over all of them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._parts = [(part, self._state_of(part)) for part in in_parts(parameters)]

    def _state_of(self, part: list[nn.Parameter]) -> HostOffload:
        def tensors() -> Iterator[Tensor]:
            for parameter in part:  # of the dict that there is now: loading puts another in its place
                yield from filter(torch.is_tensor, self._optimizer.state.get(parameter, {}).values())

        return HostOffload(tensors)

    def step(self) -> None:
        """Leaves no gradient behind, and the state on the host."""
        gradients = {parameter: parameter.grad for part, _ in self._parts for parameter in part}
        self._optimizer.zero_grad(set_to_none=True)  # what has none is not stepped
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
        """The whole state, to be saved or loaded."""
        for _, state in self._parts:
            state.onload()


def in_parts(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """In order, each part with at most as many elements on this rank as the largest parameter."""
    sizes = [(parameter, local_part(parameter).numel()) for parameter in parameters]
    largest = max((size for _, size in sizes), default=0)
    part: list[nn.Parameter] = []
    held = 0
    for parameter, size in sizes:
        if part and held + size > largest:
            yield part
            part, held = [], 0
        part.append(parameter)
        held += size
    if part:
        yield part


def local_part(tensor: Tensor) -> Tensor:
    """This rank's shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
