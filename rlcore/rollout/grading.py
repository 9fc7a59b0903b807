"""Completions at the grader: their future scores, how groups get them, and how many may stay without one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from rlcore.errors import UngradedError
from rlcore.process import Clock
from rlcore.rollout.groups import Group
from rlcore.types import Grader, Score


@dataclass(frozen=True, slots=True, eq=False)
class Grading:
    """Completions that were submitted to the grader together, and their future scores."""

    places: list[tuple[tuple[str, int], int | None]]  # key of the group, index of the completion (None: the baseline)
    scores: Future[list[Score]]


def with_scores(groups: Sequence[Group], gradings: Sequence[Grading], clock: Clock) -> list[Group]:
    """Wait for the grader, and add the scores to their groups."""
    with clock("reward"):  # only the time that grading takes beyond sampling
        results = [(grading.places, grading.scores.result()) for grading in gradings]
    scores: defaultdict[tuple[str, int], dict[int | None, Score]] = defaultdict(dict)
    for places, values in results:
        for (key, which), score in zip(places, values, strict=True):
            scores[key][which] = score
    return [group.scored(scores[group.key]) if group.key in scores else group for group in groups]


def require_graded(scores: Sequence[Score], max_share: float, grader: Grader) -> None:
    """
    Raises:
        UngradedError: more than ``max_share`` of ``scores`` are ungraded.
    """
    ungraded = sum(not score.graded for score in scores)
    if ungraded > max_share * len(scores):
        last = "\n- ".join(grader.last_failures())
        raise UngradedError(
            f"{ungraded} of {len(scores)} completions could not be graded, allowed is a share of {max_share:g} "
            f"(reward.max_ungraded_share). The last ones:\n- {last}\nFix the reward or the judge. If "
            "functions are too slow, raise reward.deadline_seconds or reward.processes. Or raise the share."
        )
