"""A trace of one step, asked for by a file in the run's folder."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.distributed.ranks import LocalRanks
from rlcore.distributed.trace import ProfiledRanks, Trace


class TwoRanks:
    size = 2

    def __init__(self) -> None:
        self.called: list[str] = []

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]], first: int = 0) -> list[Any]:
        self.called.append(method)
        assert len(arguments) == 2
        return [f"{method} {rank}".encode() for rank in range(2)]


def step(ranks: ProfiledRanks, version: int) -> None:
    for method in ("generate", "logprobs", "update", "update"):
        ranks.call(method, [(), ()])
    ranks.call("sync_weights", [(version,)] * 2)


def test_one_step_is_recorded_and_no_other(tmp_path: Path):
    inner = TwoRanks()
    ranks = ProfiledRanks(inner, tmp_path)
    step(ranks, 1)
    assert "start_trace" not in inner.called
    (tmp_path / "profile_step").touch()
    inner.called.clear()
    step(ranks, 3)
    recorded = ["generate", "start_trace", "logprobs", "update", "update", "sync_weights", "stop_trace"]
    assert inner.called == recorded
    assert not (tmp_path / "profile_step").exists()
    found = {path.name: path.read_bytes() for path in (tmp_path / "profiles").iterdir()}
    assert found == {f"step-000003-rank-{rank}.json.gz": f"stop_trace {rank}".encode() for rank in range(2)}
    inner.called.clear()
    step(ranks, 5)
    assert "start_trace" not in inner.called


class Multiplying:
    def __init__(self) -> None:
        self._trace = Trace()
        self.start_trace, self.stop_trace = self._trace.start, self._trace.stop

    def update(self) -> None:
        torch.ones(8, 8) @ torch.ones(8, 8)

    def sync_weights(self, version: int) -> int:
        return version


def test_the_file_is_a_chrome_trace_of_what_ran(tmp_path: Path):
    ranks = ProfiledRanks(LocalRanks(Multiplying()), tmp_path)
    (tmp_path / "profile_step").touch()
    ranks.call("update", [()])
    assert ranks.call("sync_weights", [(7,)]) == [7]
    events = json.loads(gzip.decompress((tmp_path / "profiles" / "step-000007-rank-0.json.gz").read_bytes()))
    assert "aten::mm" in {event.get("name") for event in events["traceEvents"]}


def test_a_trace_that_was_not_started_is_an_error():
    with pytest.raises(RuntimeError, match="before start_trace"):
        Trace().stop()
