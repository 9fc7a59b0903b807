"""The seams of the training loop: what it needs from the outside, and nothing about who provides it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from rlcore.types import Completion, FinishReason, Floats, Ints, Problem, Score


def _nothing() -> Ints:
    return np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class SampleRequest:
    """Ask for ``count`` completions of one problem. ``seed`` is distinct per (run, step, problem)."""

    problem: Problem
    count: int
    seed: int
    greedy: bool = False  # take the likeliest token each time; count is then 1
    max_tokens: int | None = None  # to draw now; None: to the end of the completion's own budget
    drawn: Ints = field(default_factory=_nothing)  # [D] tokens to go on from; count is then 1


@dataclass(frozen=True, slots=True, eq=False)
class SampledGroup:
    """What a sampler returns for one request: of a completion that was drawn in part before, the tokens and log-probs
    behind these, and the text of all."""

    prompt_token_ids: Ints  # [P], image tokens expanded; not what was drawn before
    completions: tuple[Completion, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ScoredTokens:
    """What a policy says about one sequence; 0 outside the loss mask."""

    logprobs: Floats  # [L], at the sampling temperature, of the whole distribution
    truncation_logprobs: Floats  # [L], log of the share of it that top-p and top-k left; 0 without them


class Sampler(Protocol):
    def generate(self, requests: Sequence[SampleRequest]) -> Iterator[dict[int, SampledGroup]]:
        """Sample every request with the current weights.

        Yields:
            What has ended since the last time, by its place in ``requests``: a group comes when its last completion
            ends, so that it can be graded while others are still drawn. What is drawn does not depend on the order.
            A completion that ``max_tokens`` cuts before its own budget is ``unfinished``.
        """


class RewardFn(Protocol):
    def __call__(self, text: str, problem: Problem, num_tokens: int, finish_reason: FinishReason) -> Score:
        """Score one completion. Pure; runs in a killable process."""


class Grader(Protocol):
    def submit(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> Future[list[Score]]:
        """Start grading completion i against problem i; the future holds the scores in the same order."""

    def last_failures(self) -> Sequence[str]:
        """What the latest gradings were lost to, in words, oldest first."""

    def close(self) -> None: ...


class MetricSink(Protocol):
    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one finished optimizer step, durably, before the next one starts."""
