"""What the groups of a step were worth: counted, never dropped silently."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

GroupOutcome = Literal["all_right", "all_wrong", "mixed", "ungraded"]


def group_outcome(accuracy: Sequence[float], graded: Sequence[bool]) -> GroupOutcome:
    """Say whether the graded members of a group are all right (accuracy 1), all wrong (0) or mixed.

    Fewer than two graded members are ``ungraded``: no comparison was possible.

    Args:
        accuracy: [G], the accuracy part of each score. Entries of ungraded members may hold anything.
        graded: [G].
    """
    counted = [value for value, ok in zip(accuracy, graded, strict=True) if ok]
    if len(counted) < 2:
        return "ungraded"
    if all(value >= 1 for value in counted):
        return "all_right"
    return "all_wrong" if all(value <= 0 for value in counted) else "mixed"


@dataclass(frozen=True, slots=True)
class OutcomeCounts:
    """Groups of a step by outcome."""

    groups: int
    all_right: int
    all_wrong: int
    ungraded: int
    zero_signal: int  # groups that contribute nothing; an all-wrong group can still have signal from its format


def count_outcomes(groups: Iterable[tuple[GroupOutcome, bool]]) -> OutcomeCounts:
    """Count (outcome, signal) pairs, one per group."""
    pairs = list(groups)
    outcomes = [outcome for outcome, _ in pairs]
    return OutcomeCounts(
        groups=len(pairs),
        all_right=outcomes.count("all_right"),
        all_wrong=outcomes.count("all_wrong"),
        ungraded=outcomes.count("ungraded"),
        zero_signal=sum(not signal for _, signal in pairs),
    )
