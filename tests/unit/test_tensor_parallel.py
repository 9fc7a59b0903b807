"""Ranks that hold an engine together get the same requests; the first one answers, if all drew the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from rlcore.config import build_experiment
from rlcore.config.experiment import changes
from rlcore.distributed.group import SamplerGroup
from rlcore.distributed.ranks import RankRange
from rlcore.distributed.tensor_parallel import answers, fingerprint
from rlcore.errors import ConfigError, SamplerError
from rlcore.rollout.groups import in_order
from rlcore.types import Completion, Problem, SampledGroup, SampleRequest


def group(number: int, *completions: list[int]) -> SampledGroup:
    found = [Completion.one_turn(np.array(ids), np.zeros(len(ids), np.float32), "", "stop", 0) for ids in completions]
    return SampledGroup(np.array([number]), tuple(found))


class Engine:
    """One rank of an engine."""

    def __init__(self, rank: int, wrong: bool) -> None:
        self._rank, self._wrong = rank, wrong

    def generate(self, requests: Sequence[SampleRequest]) -> Iterator[dict[int, Any]]:
        return answers(self._ended(requests), self._rank, 2)

    def _ended(self, requests: Sequence[SampleRequest]) -> Iterator[dict[int, SampledGroup]]:
        for place, request in enumerate(requests):
            name = int(request.problem.problem_id)
            yield {place: group(name, [1, 2], [name + self._wrong])}


class FourRanks:
    """Two engines of two ranks; the ranks of each run at their own pace."""

    size = 4

    def __init__(self, wrong: int | None = None, silent: int | None = None) -> None:
        self._wrong, self._silent = wrong, silent
        self.asked: list[list[str]] = []

    def stream(
        self, action: Callable[[Engine, Any], Iterator[Any]], arguments: Sequence[Any], first: int = 0
    ) -> Iterator[tuple[int, Any]]:
        self.asked = [[request.problem.problem_id for request in requests] for requests in arguments]
        for rank in (3, 0, 2, 1):
            if rank != self._silent:
                for answer in action(Engine(rank, rank == self._wrong), arguments[rank]):
                    yield rank, answer


def generate(ranks: FourRanks) -> list[SampledGroup]:
    requests = [SampleRequest(Problem(str(n), "", (), "", ""), 2, n) for n in range(5)]
    return in_order(SamplerGroup(RankRange(ranks, 0, 4), 2).generate(requests))


def test_both_ranks_of_an_engine_get_its_requests_and_one_answers():
    ranks = FourRanks()
    found = generate(ranks)
    assert ranks.asked == [["0", "2", "4"], ["0", "2", "4"], ["1", "3"], ["1", "3"]]
    assert [int(g.prompt_token_ids[0]) for g in found] == [0, 1, 2, 3, 4]
    assert [g.completions[1].token_ids.tolist() for g in found] == [[0], [1], [2], [3], [4]]


@pytest.mark.parametrize("wrong", [2, 3])
def test_ranks_that_sampled_different_tokens_are_named(wrong: int):
    with pytest.raises(SamplerError, match=r"problem 1: rank 2 sampled tokens of crc \w{8}, rank 3 .* of crc \w{8}\."):
        generate(FourRanks(wrong=wrong))


def test_a_rank_that_does_not_answer_is_reported():
    with pytest.raises(SamplerError, match=r"of the 2 ranks that hold its engine only \[0\] answered"):
        generate(FourRanks(silent=1))


def test_the_fingerprint_depends_on_every_token_and_on_where_completions_end():
    same = fingerprint(group(1, [2, 3], [4]))
    assert fingerprint(group(1, [2, 3], [4])) == same
    others = [group(0, [2, 3], [4]), group(1, [2], [3, 4]), group(1, [2, 3], [5]), group(1, [4], [2, 3])]
    assert same not in {fingerprint(other) for other in others}


def built(**workers: object) -> object:
    rollout = {"tensor_parallel": 2}
    return build_experiment({"name": "toy", "rollout": rollout, "resources": workers})


def test_engines_that_do_not_fill_the_workers_are_refused():
    assert built(workers=4, rollout_workers=2)
    with pytest.raises(ConfigError, match=r"tensor_parallel \(2\) does not divide resources.workers \(1\)"):
        built(workers=1)
    with pytest.raises(ConfigError, match=r"tensor_parallel \(2\) does not divide resources.rollout_workers \(3\)"):
        built(workers=4, rollout_workers=3)


@pytest.mark.parametrize("rollout", [{"tensor_parallel": 2}, {"dtype": "float16"}])
def test_adapters_go_with_several_workers_and_with_another_dtype(rollout):
    settings = {"name": "toy", "rollout": rollout, "resources": {"workers": 2}, "model": {"lora": {}}}
    assert build_experiment(settings)


def test_a_run_may_go_on_with_engines_of_other_sizes():
    one = build_experiment({"name": "toy", "resources": {"workers": 2}})
    two = build_experiment({"name": "toy", "resources": {"workers": 2}, "rollout": {"tensor_parallel": 2}})
    assert [change.affects_results for change in changes(one, two)] == [False]
