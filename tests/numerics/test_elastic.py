"""Promise 9: a checkpoint of W ranks continues on W', the same weights, loss, next step and data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from rlcore.algorithms.loss import StepTotals
from rlcore.algorithms.objective import UpdateResult
from rlcore.data.stream import ProblemStream
from rlcore.distributed.group import SamplerGroup
from rlcore.distributed.ranks import RankRange
from rlcore.models.torch_policy import TorchPolicy
from rlcore.rollout.groups import in_order
from rlcore.training.metrics import update_metrics
from rlcore.types import Problem, SampledGroup, SampleRequest, TrainingSample
from tests.numerics import toy
from tests.ranks import on_ranks
from tests.sampling import sample_requests


def _rank(rank: int, world: int, model: str, source: str | None, out: str) -> None:
    """Without a source: take a step, save, take another. With one: load, take that other step."""
    policy = toy.policy(Path(model), toy.config(), init_device_mesh("cpu", (world,)))
    if source is None:
        _update(policy, toy.samples(8), rank, world)
        toy.save(policy, Path(out))
    else:
        policy.load(Path(source))
    weights = _digest(policy)
    metrics = update_metrics(_update(policy, toy.samples(8, seed=1), rank, world), 0.0, alarm_above=0.01)
    after = torch.cat([value.flatten() for _, value in policy.full_weights()])
    if rank == 0:
        torch.save(after, f"{out}.pt")
        Path(f"{out}.json").write_text(json.dumps({"weights": weights, "metrics": metrics}))


def _update(policy: TorchPolicy, samples: Sequence[TrainingSample], rank: int, world: int) -> UpdateResult:
    plan = toy.plan(samples, num_ranks=world, token_budget=200)
    totals = StepTotals(sum(s.num_trained for s in samples), len(samples))
    return policy.update([[samples[i] for i in micro] for micro in plan[rank]], totals, 1e-3, 0.0)


def _digest(policy: TorchPolicy) -> str:
    digest = hashlib.sha256()
    for name, value in policy.full_weights():
        digest.update(name.encode() + value.numpy().tobytes())
    return digest.hexdigest()


def _run(world: int, model: Path, out: Path, source: Path | None = None) -> tuple[dict[str, Any], torch.Tensor]:
    out.mkdir()
    on_ranks(world, _rank, str(model), source and str(source), str(out))
    return json.loads(Path(f"{out}.json").read_text()), torch.load(f"{out}.pt", weights_only=True)


def test_a_checkpoint_continues_on_another_number_of_ranks(tiny_model: Path, tmp_path: Path) -> None:
    written = {world: _run(world, tiny_model, tmp_path / f"by-{world}") for world in (1, 2)}
    for before, after in ((1, 2), (2, 1), (2, 4)):
        expected, weights = written[before]
        found, moved = _run(after, tiny_model, tmp_path / f"{before}-to-{after}", tmp_path / f"by-{before}")
        assert found["weights"] == expected["weights"]  # bit for bit
        for name, value in expected["metrics"].items():
            assert found["metrics"][name] == pytest.approx(value, rel=1e-5, abs=1e-6), (before, after, name)
        # where a gradient is float noise around 0 AdamW's step of it is too, so most weights and not all
        assert ((moved - weights).abs() < 1e-5).float().mean() > 0.999


class EchoRanks:
    """Ranks that answer each request with its problem and seed in place of tokens."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.loads: list[int] = []

    def stream(
        self, action: Callable[[Any, Any], Iterator[Any]], arguments: Sequence[Any], first: int = 0
    ) -> Iterator[tuple[int, Any]]:
        self.loads = [len(requests) for requests in arguments]
        for rank, requests in reversed([*enumerate(arguments)]):  # the last one is done first
            for item in action(Echo(), requests):
                yield rank, item


class Echo:
    def generate(self, requests: Sequence[SampleRequest]) -> Iterator[dict[int, SampledGroup]]:
        for place, request in enumerate(requests):
            yield {place: SampledGroup(np.array([int(request.problem.problem_id), request.seed]), ())}


def test_the_order_and_seeds_of_the_data_do_not_depend_on_the_ranks() -> None:
    problems = [Problem(str(index), "", (), "", "", {}) for index in range(10)]
    seen = {}
    for world in (1, 2, 4):
        stream = ProblemStream(10, seed=3, taken=12)
        requests = sample_requests([problems[i] for i in stream.take(8)], 4, seed=7, batch="3")
        ranks = EchoRanks(world)
        groups = in_order(SamplerGroup(RankRange(ranks, 0, world)).generate(requests))
        seen[world] = [group.prompt_token_ids.tolist() for group in groups]
        assert ranks.loads == [8 // world] * world
    assert seen[1] == seen[2] == seen[4]
    assert len({problem for problem, _ in seen[1]}) > 1
