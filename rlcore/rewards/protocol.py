"""What a grading process can be given: a reward of one completion, or one of many at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias, runtime_checkable

from rlcore.ports import RewardFn
from rlcore.types import FinishReason, Problem, Score

Job: TypeAlias = tuple[str, Problem, int, FinishReason]  # the arguments of a RewardFn


@runtime_checkable
class BatchRewardFn(Protocol):
    """A reward that is cheaper for many completions at once, such as a model that judges."""

    def score_batch(
        self,
        texts: Sequence[str],
        problems: Sequence[Problem],
        num_tokens: Sequence[int],
        finish_reasons: Sequence[FinishReason],
    ) -> Sequence[Score]:
        """Score completion i against problem i, for all i; one Score each, in order.

        Called with all that a grading process was sent at once (1 to ``pool.MAX_CHUNK`` completions).
        """


Reward: TypeAlias = RewardFn | BatchRewardFn
