"""Real Ray actors that die, fail or hang: which rank is blamed, with whose traceback, and what its stacks say."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlcore.config import ExperimentConfig
from rlcore.distributed.actors import RayRanks, start_ranks
from rlcore.distributed.cluster import start_ray, stop_ray
from rlcore.errors import SamplerError, WorkerLostError
from rlcore.process import SIGNAL, in_background, innermost
from tests.integration.toy_worker import ToyWorker

CONFIG = ExperimentConfig.model_validate({"name": "toy", "resources": {"workers": 2}})


@pytest.fixture(scope="module")
def _ray() -> Iterator[None]:
    start_ray(None, 16)  # two for each test: ranks keep theirs until Ray goes
    yield
    stop_ray()


@pytest.fixture
def ranks(_ray: None, tmp_path: Path) -> RayRanks:
    return start_ranks(
        ToyWorker, model=tmp_path, dataset=tmp_path, config=CONFIG, device="cpu", stacks=tmp_path / "stacks"
    )


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named_although_others_fail_first(ranks: RayRanks, victim: int) -> None:
    assert ranks.call(lambda worker, _: worker.rank_of(), [None] * 2) == [0, 1]
    with pytest.raises(WorkerLostError, match=rf"(?s)^rank {victim} \(pid {ranks.pids[victim]} on .*Ray says: Actor"):
        ranks.call(ToyWorker.die, [victim] * 2)


def test_the_first_error_comes_with_the_traceback_of_its_rank(ranks: RayRanks) -> None:
    with pytest.raises(SamplerError, match="^the weights of version 3 did not arrive$") as caught:
        ranks.call(lambda worker, _: worker.fail(), [None] * 2)
    told = str(caught.value.__cause__)
    assert told.startswith("Traceback (most recent call last):")
    assert "in _really_wrong" in told
    assert f"(rank 1, pid {ranks.pids[1]} on " in told
    assert "ray" not in told.split("(rank 1")[0].lower()


def test_what_ranks_yield_comes_as_they_go(ranks: RayRanks) -> None:
    found = list(ranks.stream(ToyWorker.count, [(-1, "")] * 2))
    assert sorted(found) == [(rank, item) for rank in range(2) for item in range(3)]
    assert [item for _, item in found[:2]] == [0, 0]  # not all of one rank first


def test_a_stream_ends_with_the_error_or_the_death_of_its_rank(ranks: RayRanks) -> None:
    with pytest.raises(SamplerError, match="^the weights of version 3 did not arrive$") as caught:
        list(ranks.stream(ToyWorker.count, [(1, "fail")] * 2))
    assert f"(rank 1, pid {ranks.pids[1]} on " in str(caught.value.__cause__)
    with pytest.raises(WorkerLostError, match=rf"(?s)^rank 0 \(pid {ranks.pids[0]} on .*Ray says: Actor"):
        list(ranks.stream(ToyWorker.count, [(0, "die")] * 2))


def test_what_another_thread_streams_ends_with_the_ranks(ranks: RayRanks) -> None:
    streamed = in_background(lambda: list(ranks.stream(lambda worker, _: worker.forever(), [None], 1)))
    with pytest.raises(WorkerLostError, match=r"^rank 0 "):
        ranks.call(ToyWorker.die, [0], 0)
    assert not streamed.done()
    ranks.close()
    assert "closed while they were still sampling" in str(streamed.exception(timeout=5))


def test_a_stuck_rank_tells_its_stacks(ranks: RayRanks, tmp_path: Path) -> None:
    call = threading.Thread(target=lambda: ranks.call(ToyWorker.stuck, [tmp_path] * 2))
    call.start()
    flags = [tmp_path / f"stuck-{rank}" for rank in range(2)]
    dumps = [tmp_path / "stacks" / f"rank-{rank}-{pid}.txt" for rank, pid in enumerate(ranks.pids)]
    deadline = time.monotonic() + 30
    while not all(flag.exists() for flag in flags) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in ranks.pids:
        os.kill(pid, SIGNAL)
    while not all(dump.stat().st_size for dump in dumps) and time.monotonic() < deadline:
        time.sleep(0.05)
    for flag in flags:
        flag.unlink()
    call.join()
    for dump in dumps:
        assert any("in stuck" in frame for frame in innermost(dump.read_text()))
