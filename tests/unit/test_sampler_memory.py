"""The peak of a rank whose sampler sleeps while the policy trains. The GPU's counters are played here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.device_allocator.cumem import AllocationData, CuMemAllocator

from rlcore.sampler.engine import Engine
from rlcore.sampler.vllm_sampler import EngineSleep

WEIGHTS, CACHE = 16, 32


class PlayedGpu:
    """Counts as torch does: what the engine gives up while it sleeps stays allocated."""

    def __init__(self) -> None:
        self.tensors = self.peak = 0
        self.asleep: set[str] = set()
        self.levels: list[int] = []
        self.config = SimpleNamespace(rollout=SimpleNamespace(sleep="always"), model=SimpleNamespace(lora=None))
        self.device, self.llm = "cuda", self

    def hold(self, size: int) -> None:
        """The policy's tensors take this much from now on."""
        self.tensors = size
        self.peak = max(self.peak, size + WEIGHTS + CACHE)

    def sleep(self, level: int) -> None:
        self.levels.append(level)
        self.asleep = {"weights", "kv_cache"}

    def wake_up(self, tags: list[str]) -> None:
        self.asleep -= set(tags)

    def sleeping_bytes(self) -> int:
        return sum({"weights": WEIGHTS, "kv_cache": CACHE}[part] for part in self.asleep)

    def mem_get_info(self) -> tuple[int, int]:
        return 100 - self.tensors - WEIGHTS - CACHE + self.sleeping_bytes(), 100

    def reset_peak_memory_stats(self) -> None:
        self.peak = self.tensors + WEIGHTS + CACHE


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> PlayedGpu:
    gpu = PlayedGpu()
    for name in ("mem_get_info", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, getattr(gpu, name))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: gpu.peak)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return gpu


@pytest.mark.parametrize(
    ("training", "syncing", "sampling", "peak"), [(70, 5, 5, 70), (20, 60, 5, 60 + WEIGHTS), (20, 5, 9, 9 + 48)]
)
def test_a_peak_leaves_out_what_slept_at_that_moment(
    training: int, syncing: int, sampling: int, peak: int, gpu: PlayedGpu
) -> None:
    memory = EngineSleep(gpu)  # type: ignore[arg-type]
    for _ in range(2):  # the second step's peak does not have the first one's
        memory.sleep()
        gpu.hold(training)
        gpu.hold(1)
        memory.wake_weights()
        gpu.hold(syncing)
        gpu.hold(1)
        memory.wake_cache()
        gpu.hold(sampling)
        gpu.hold(1)
        assert memory.take_peak_bytes() == peak
    assert memory.take_peak_bytes() == 1 + WEIGHTS + CACHE


def test_only_allocations_that_sleep_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = CuMemAllocator()
    for address, (size, asleep) in enumerate([(100, True), (20, False), (3, True)]):
        data = AllocationData((0, size, address, 0), "weights")
        data.is_asleep = asleep
        allocator.pointer_to_data[address] = data
    engine = object.__new__(Engine)
    assert engine.sleeping_bytes() == 0  # no allocator yet
    monkeypatch.setattr(CuMemAllocator, "instance", allocator)
    assert engine.sleeping_bytes() == 103


@pytest.mark.parametrize(
    ("mode", "held", "levels", "sent"),
    [
        ("auto", 2, [2, 2], [True, True, False, False]),  # both fit: it stays awake
        ("auto", 50, [2, 2, 1, 1], [True, True, False, False]),
        ("always", 2, [2, 1, 1, 1], [True, False, False, False]),
    ],
)
def test_frozen_weights_are_kept_on_the_host_only_if_the_engine_will_sleep_often(
    mode: str, held: int, levels: list[int], sent: list[bool], gpu: PlayedGpu
) -> None:
    gpu.config = SimpleNamespace(rollout=SimpleNamespace(sleep=mode), model=SimpleNamespace(lora="an adapter"))
    memory = EngineSleep(gpu)  # type: ignore[arg-type]
    found = []
    for step in range(4):
        memory.sleep()
        gpu.hold(held)
        if step:
            memory.decide()
        memory.wake_weights()
        found.append(memory.lost_weights)
        memory.lost_weights = False  # they are sent
        memory.wake_cache()
    assert (gpu.levels, found) == (levels, sent)
