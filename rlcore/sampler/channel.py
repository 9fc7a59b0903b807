"""Sends weights from one trainer to samplers in other processes: one broadcast per bucket."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlcore.models.sharding import bucketed
from rlcore.sampler.weights import added, bit_sum

_TIMEOUT = timedelta(minutes=10)  # for a member that is still busy


class WeightChannel:
    """A process group of the trainer, member 0, and the samplers, members 1 to ``size`` - 1.

    It is separate from torch's default group, which belongs to an engine or to the trainers. Creating it waits for all
    members.
    """

    def __init__(self, member: int, size: int, *, address: str, port: int, device: str, dtype: torch.dtype) -> None:
        """
        Args:
            address, port: of member 0.
            dtype: of all tensors sent.
        """
        self._device, self._dtype = device, dtype
        store = dist.TCPStore(  # type: ignore[attr-defined]
            address, port, size, is_master=member == 0, timeout=_TIMEOUT
        )
        make: Any = dist.ProcessGroupGloo if device == "cpu" else dist.ProcessGroupNCCL
        self._group = make(store, member, size, _TIMEOUT)

    def send(self, tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int = 512 << 20) -> None:
        """Called by member 0. Each bucket is one collective, after two small ones with its names and shapes."""
        for bucket in bucketed(tensors, bucket_bytes):
            names = json.dumps([(name, list(value.shape)) for name, value in bucket]).encode()
            self._from_trainer(torch.tensor([len(names)], device=self._device))
            self._from_trainer(torch.frombuffer(bytearray(names), dtype=torch.uint8).to(self._device))
            self._from_trainer(torch.cat([value.reshape(-1) for _, value in bucket]))
        self._from_trainer(torch.tensor([0], device=self._device))

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """Called by the others: the tensors of one ``send``. Consume all of them. Each bucket has new memory."""
        while size := int(self._from_trainer(torch.zeros(1, dtype=torch.int64, device=self._device))):
            names = self._from_trainer(torch.empty(size, dtype=torch.uint8, device=self._device))
            listed = [(name, shape, math.prod(shape)) for name, shape in json.loads(bytes(names.cpu().numpy()))]
            total = sum(count for _, _, count in listed)
            values = self._from_trainer(torch.empty(total, dtype=self._dtype, device=self._device))
            parts = torch.split(values, [count for _, _, count in listed])
            for (name, shape, _), part in zip(listed, parts, strict=True):
                yield name, part.view(shape)

    def _from_trainer(self, tensor: Tensor) -> Tensor:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([tensor.view(torch.uint8)], options).wait()
        return tensor


class WeightSender:
    """Takes a trainer's weights like a colocated sampler, and sends them to samplers in other processes."""

    def __init__(self, channel: WeightChannel | None, dtype: torch.dtype) -> None:
        """
        Args:
            channel: None on ranks other than 0, which only help to gather the tensors.
            dtype: of the samplers.
        """
        self._channel, self._dtype = channel, dtype
        self.needs_base = True  # the samplers do not have the frozen weights of a policy with adapters

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> int:
        """Send all weights; return their ``checksum``, to be compared with those of the samplers."""
        return self._send(weights)

    def load_adapter(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> int:
        """Send an adapter; return its ``checksum``."""
        return self._send(tensors)

    def load_base(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Send the frozen weights of a policy with adapters."""
        self._send(weights)
        self.needs_base = False

    def _send(self, tensors: Iterable[tuple[str, Tensor]]) -> int:
        sums: list[Tensor] = []

        def counted() -> Iterator[tuple[str, Tensor]]:
            for name, value in tensors:
                value = value.detach().to(self._dtype)
                sums.append(bit_sum(value))
                yield name, value

        if self._channel is None:
            for _ in counted():
                pass  # take part in the gathering, which is collective
        else:
            self._channel.send(counted())
        return added(sums)
