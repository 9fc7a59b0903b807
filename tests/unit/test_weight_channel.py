"""Weights arrive at every sampler whole, in order and bit for bit, however they are packed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from rlcore.models.sharding import bucketed
from rlcore.sampler.channel import WeightChannel, WeightSender
from rlcore.sampler.weights import checksum
from tests.ports import reserved_port

T = TypeVar("T")


def everywhere(size: int, dtype: torch.dtype, work: Callable[[int, WeightChannel], T]) -> list[T]:
    """``work`` of each member, in threads that stand for processes."""
    port = reserved_port()

    def member(number: int) -> T:
        channel = WeightChannel(number, size, address="127.0.0.1", port=port, device="cpu", dtype=dtype)
        return work(number, channel)

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(member, range(size)))


def tensors(dtype: torch.dtype) -> list[tuple[str, Tensor]]:
    torch.manual_seed(0)
    shapes = {"scalar": (), "matrix": (7, 5), "cut": (3, 4), "empty": (0, 4), "row": (11,)}
    made = [(name, torch.randn(shape).to(dtype)) for name, shape in shapes.items()]
    return [(name, value[:, ::2] if name == "cut" else value) for name, value in made]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bucket_bytes", [1, 100, 1 << 20])
def test_every_sampler_gets_what_was_sent(dtype: torch.dtype, bucket_bytes: int) -> None:
    sent = tensors(dtype)

    def work(number: int, channel: WeightChannel) -> list[list[tuple[str, Tensor]]]:
        if number:
            return [list(channel.receive()) for _ in range(3)]
        for some in (sent, [], sent[:1]):
            channel.send(iter(some), bucket_bytes)
        return []

    for found in everywhere(3, dtype, work)[1:]:
        assert [[name for name, _ in some] for some in found] == [[n for n, _ in sent], [], ["scalar"]]
        for (_, left), (_, right) in zip(found[0], sent, strict=True):
            assert (left.dtype, left.shape) == (right.dtype, right.shape)
            assert torch.equal(left, right)


def test_sender_and_samplers_compute_the_same_checksum() -> None:
    weights = tensors(torch.bfloat16)[:3]

    def work(number: int, channel: WeightChannel) -> int:
        if number:
            return checksum(value for _, value in channel.receive())
        helps = WeightSender(None, torch.float32)
        sums = [sender.load_weights(iter(weights), 1) for sender in (WeightSender(channel, torch.float32), helps)]
        assert sums[0] == sums[1]
        return sums[0]

    sums = everywhere(3, torch.float32, work)
    assert len(set(sums)) == 1
    assert sums[0] != checksum(value.float() + 1e-3 for _, value in weights)


def test_a_bucket_ends_where_it_is_full() -> None:
    found = bucketed([(name, torch.zeros(size)) for name, size in (("a", 2), ("b", 1), ("c", 5), ("d", 1))], 12)
    assert [[name for name, _ in bucket] for bucket in found] == [["a", "b"], ["c"], ["d"]]
