"""Requests to a sampler as those of a rollout batch."""

from __future__ import annotations

from collections.abc import Sequence

from rlcore.rollout.groups import new_groups
from rlcore.types import Problem, SampleRequest


def sample_requests(problems: Sequence[Problem], group_size: int, *, seed: int, batch: str) -> list[SampleRequest]:
    places: dict[str, int] = {}  # a problem that comes again is the same
    indexed = [(places.setdefault(problem.problem_id, len(places)), problem) for problem in problems]
    groups = new_groups(indexed, group_size, batch=batch, epoch=0, policy_version=0)
    return [request for group in groups for _, request in group.requests(seed, None)]
