"""What each rank is given when ranks compute rows together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlcore.config import build_experiment
from rlcore.distributed.group import WorkerGroup, with_high_entropy
from rlcore.distributed.ranks import LocalRanks
from rlcore.flops import ModelShape
from rlcore.types import ScoredTokens, TrainingSample
from tests.numerics import toy
from tests.unit.toy_rank import ToyRank

SHAPE = ModelShape(parameters=1000, head_parameters=500, layers=2, width=8, weights_train=True, tower=None)


class Policy:
    """Of one rank: its log-probs say which rank it is."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.seen: list[list[bytes]] = []
        self.policy = self

    def model_shape(self) -> ModelShape:
        return SHAPE

    def logprobs(
        self, microbatches: Sequence[Sequence[TrainingSample]], *, reference: bool
    ) -> list[list[ScoredTokens]]:
        self.seen = [[s.token_ids.tobytes() for s in micro] for micro in microbatches]
        return [
            [ScoredTokens(s.token_ids + self._rank / 10, s.token_ids * 0.0) for s in micro] for micro in microbatches
        ]


class FourRanks:
    size = 4

    def __init__(self) -> None:
        self._workers = [Policy(rank) for rank in range(self.size)]

    @property
    def seen(self) -> list[list[list[bytes]]]:
        return [worker.seen for worker in self._workers]

    def call(self, action: Callable[[Any, Any], Any], arguments: Sequence[Any], first: int = 0) -> list[Any]:
        return [action(worker, own) for worker, own in zip(self._workers, arguments, strict=True)]


def test_ranks_of_a_sequence_group_get_the_same_rows_and_the_first_answers():
    config = build_experiment(
        {
            "name": "toy",
            "data": {"max_prompt_tokens": 200},
            "rollout": {"group_size": 4, "max_completion_tokens": 32},
            "training": {"sequence_parallel": 2, "tokens_per_microbatch": 300},
            "resources": {"workers": 4},
        }
    )
    ranks = FourRanks()
    samples = toy.samples(12, text_only=True)
    found = WorkerGroup(ranks, config).logprobs(samples)
    assert ranks.seen[0] == ranks.seen[1] != ranks.seen[2] == ranks.seen[3]
    every = [tokens for rank in ranks.seen[::2] for micro in rank for tokens in micro]
    assert sorted(every) == sorted(s.token_ids.tobytes() for s in samples)
    longest = max(sum(len(np.frombuffer(t, np.int32)) for t in micro) for rank in ranks.seen for micro in rank)
    assert longest > 300  # a row of two ranks holds what two of one hold
    for sample, scored in zip(samples, found, strict=True):
        rank = round(float(scored.logprobs[0] - sample.token_ids[0]) * 10)
        assert rank in (0, 2)
        np.testing.assert_allclose(scored.logprobs, sample.token_ids + rank / 10)


def _with_entropies(*entropies: float) -> TrainingSample:
    mask = np.array([False, *(value > 0 for value in entropies)])
    return TrainingSample(
        token_ids=np.zeros(len(mask), np.int32),
        loss_mask=mask,
        sampler_logprobs=np.zeros(len(mask), np.float32),
        images=(),
        policy_version=0,
        entropies=np.array([9.0, *entropies], np.float32),  # of the prompt: never looked at
    )


def test_the_entropy_mask_compares_all_trained_tokens_of_the_step():
    # trained: 0.3 1.5 | 2.0 0.1 0.2; the two highest of five are 1.5 and 2.0
    one, two = _with_entropies(0.3, 0.0, 1.5), _with_entropies(2.0, 0.1, 0.2)
    for samples in ([one, two], [two, one]):
        masks = {len(s.token_ids) * s.entropies[1]: s.high_entropy for s in with_high_entropy(samples, 0.4)}
        assert masks[4 * one.entropies[1]].tolist() == [False, False, False, True]
        assert masks[4 * two.entropies[1]].tolist() == [False, True, False, False]
    assert one.loss_mask.tolist() == [False, True, False, True]  # the sample itself is as it was


def test_an_entropy_mask_without_entropies_says_what_to_do():
    one = _with_entropies(0.3)
    with pytest.raises(ValueError, match=r"1 of 2 samples have no entropies.*old log-probs"):
        with_high_entropy([one, replace(one, entropies=None)], 0.4)


@pytest.mark.parametrize("sleeps", [True, False])
def test_samplers_that_sleep_while_a_checkpoint_is_made_have_the_weights_again_after_it(sleeps: bool):
    rank = ToyRank(sleeps=sleeps)
    workers = WorkerGroup(LocalRanks(rank), build_experiment({"name": "toy"}))
    workers.sync_weights(7)
    with workers.samplers_released():
        assert rank.asleep == sleeps
    assert not rank.asleep
    assert rank.calls == ["sync_weights 7"] * (1 + sleeps)
