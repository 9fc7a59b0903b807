"""DAPO's soft punishment of long completions (arXiv:2503.14476, equation 13), around any reward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlcore.ports import RewardFn
from rlcore.rewards.protocol import BatchRewardFn
from rlcore.types import FinishReason, Problem, Score


@dataclass(frozen=True, slots=True)
class LengthRule:
    """When a completion is too long, in tokens."""

    max_tokens: int  # L_max: what a completion may have
    buffer_tokens: int  # L_cache: the last tokens of it, in which the penalty grows
    penalty: float  # weight of the part

    def part(self, num_tokens: int) -> float:
        """0 up to max_tokens - buffer_tokens, -1 from max_tokens on, a straight line between: in [-1, 0]."""
        over = num_tokens - (self.max_tokens - self.buffer_tokens)
        return -min(1.0, max(0, over) / self.buffer_tokens) if over > 0 else 0.0

    def apply(self, score: Score, num_tokens: int) -> Score:
        """Add penalty * part to the reward, and the part, unweighted, as ``overlong``. No verdict stays none."""
        if not score.graded:
            return score
        part = self.part(num_tokens)
        return replace(score, reward=score.reward + self.penalty * part, parts={**score.parts, "overlong": part})


@dataclass(frozen=True, slots=True)
class OverlongReward:
    """A reward, less the penalty."""

    inner: RewardFn
    rule: LengthRule

    def __call__(self, text: str, problem: Problem, num_tokens: int, finish_reason: FinishReason) -> Score:
        return self.rule.apply(self.inner(text, problem, num_tokens, finish_reason), num_tokens)


@dataclass(frozen=True, slots=True)
class OverlongBatchReward:
    """The same around a reward of many completions at once."""

    inner: BatchRewardFn
    rule: LengthRule

    def score_batch(
        self,
        texts: Sequence[str],
        problems: Sequence[Problem],
        num_tokens: Sequence[int],
        finish_reasons: Sequence[FinishReason],
    ) -> Sequence[Score]:
        scores = self.inner.score_batch(texts, problems, num_tokens, finish_reasons)
        return [self.rule.apply(score, tokens) for score, tokens in zip(scores, num_tokens, strict=True)]
