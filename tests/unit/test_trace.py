"""A trace of one step, asked for by a file in the run's folder."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.config import build_experiment
from rlcore.distributed.group import WorkerGroup
from rlcore.distributed.ranks import LocalRanks, RankRange
from rlcore.distributed.trace import StepTrace, Trace
from rlcore.types import ScoredTokens
from tests.numerics import toy
from tests.unit.toy_rank import Microbatches, ToyRank


class Recorder:
    """In place of a profiler."""

    def __init__(self, rank: RecordedRank) -> None:
        self._rank = rank

    def start(self) -> None:
        self._rank.calls.append("start")

    def stop(self) -> bytes:
        self._rank.calls.append("stop")
        return f"trace {self._rank.number}".encode()


class RecordedRank(ToyRank):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.trace = number, Recorder(self)

    def logprobs(self, microbatches: Microbatches, *, reference: bool) -> list[list[ScoredTokens]]:
        self.calls.append("logprobs")
        return super().logprobs(microbatches, reference=reference)


class TwoRanks:
    size = 2

    def __init__(self) -> None:
        self.workers = [RecordedRank(number) for number in range(2)]

    def call(self, action: Callable[[Any, Any], Any], arguments: Sequence[Any], first: int = 0) -> list[Any]:
        return [action(worker, own) for worker, own in zip(self.workers, arguments, strict=True)]


CONFIG = build_experiment({"name": "toy", "data": {"max_prompt_tokens": 200}, "resources": {"workers": 2}})


def step(workers: WorkerGroup, version: int) -> None:
    samples = toy.samples(4, text_only=True)
    workers.logprobs(samples)
    for _ in range(2):
        workers.update(samples, 0.0, 0.0)
    workers.sync_weights(version)


def test_one_step_is_recorded_and_no_other(tmp_path: Path):
    ranks = TwoRanks()
    workers = WorkerGroup(ranks, CONFIG, run_dir=tmp_path)
    usual = ["logprobs", "update", "update"]
    step(workers, 1)
    assert [rank.calls for rank in ranks.workers] == [[*usual, "sync_weights 1"]] * 2
    (tmp_path / "profile_step").touch()
    for rank in ranks.workers:
        rank.calls.clear()
    step(workers, 3)
    assert [rank.calls for rank in ranks.workers] == [["start", *usual, "sync_weights 3", "stop"]] * 2
    assert not (tmp_path / "profile_step").exists()
    found = {path.name: path.read_bytes() for path in (tmp_path / "profiles").iterdir()}
    assert found == {f"step-000003-rank-{rank}.json.gz": f"trace {rank}".encode() for rank in range(2)}
    for rank in ranks.workers:
        rank.calls.clear()
    step(workers, 5)
    assert [rank.calls for rank in ranks.workers] == [[*usual, "sync_weights 5"]] * 2


class Multiplying:
    def __init__(self) -> None:
        self.trace = Trace()

    def update(self) -> None:
        torch.ones(8, 8) @ torch.ones(8, 8)


def test_the_file_is_a_chrome_trace_of_what_ran(tmp_path: Path):
    ranks = RankRange[Multiplying](LocalRanks(Multiplying()), 0, 1)
    trace = StepTrace(ranks, tmp_path)
    (tmp_path / "profile_step").touch()
    trace.begin()
    ranks.each(Multiplying.update)
    trace.end(7)
    events = json.loads(gzip.decompress((tmp_path / "profiles" / "step-000007-rank-0.json.gz").read_bytes()))
    assert "aten::mm" in {event.get("name") for event in events["traceEvents"]}


def test_a_trace_that_was_not_started_is_an_error():
    with pytest.raises(RuntimeError, match="before start"):
        Trace().stop()
