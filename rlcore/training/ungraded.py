"""Where too little of a batch could be graded, there is nothing to learn from: stop, and say what the graders said."""

from __future__ import annotations

from collections.abc import Sequence

from rlcore.errors import UngradedError
from rlcore.ports import Grader
from rlcore.types import Score


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
            f"(reward.max_ungraded_share). The last ones:\n- {last}\nMend the reward, give it more "
            "reward.deadline_seconds or reward.processes, or raise the share."
        )
