"""``reward.thoughts: strip``: any reward then grades only the text after the thought."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlcore.rewards.extract import EMPTY_THOUGHT, ThoughtParts, thought_parts
from rlcore.rewards.protocol import BatchRewardFn, Job, RewardFn
from rlcore.types import FinishReason, Problem, Score


@dataclass(frozen=True, slots=True)
class ThoughtRule:
    """What a reward gets of a completion with a thought."""

    opened: bool  # prompts end with <think>, so that completions begin inside a thought; a row may say otherwise
    grades_format: bool  # the reward looks for a think block: an empty one stands for a well-formed thought

    def read(self, text: str, problem: Problem) -> ThoughtParts:
        own = problem.opens_thought
        return thought_parts(text, opened=self.opened if own is None else own)

    def graded_text(self, thought: ThoughtParts) -> str:
        """The text after the thought; empty if the thought is not closed, which no reward takes for an answer."""
        return EMPTY_THOUGHT + thought.after if self.grades_format and thought.well_formed else thought.after

    def add_part(self, score: Score, thought: ThoughtParts) -> Score:
        """Add the part ``unclosed_thought``, 1 or 0. Ungraded scores stay."""
        if not score.graded:
            return score
        return replace(score, parts={**score.parts, "unclosed_thought": float(not thought.closed)})


@dataclass(frozen=True, slots=True)
class StrippedReward:
    """A reward of the text after the thought."""

    inner: RewardFn
    rule: ThoughtRule

    def __call__(self, text: str, problem: Problem, num_tokens: int, finish_reason: FinishReason) -> Score:
        thought = self.rule.read(text, problem)
        score = self.inner(self.rule.graded_text(thought), problem, num_tokens, finish_reason)
        return self.rule.add_part(score, thought)


@dataclass(frozen=True, slots=True)
class StrippedBatchReward:
    """A batch reward of the texts after the thoughts."""

    inner: BatchRewardFn
    rule: ThoughtRule

    def score_batch(self, jobs: Sequence[Job]) -> Sequence[Score]:
        thoughts = [self.rule.read(text, problem) for text, problem, *_ in jobs]
        stripped = [
            (self.rule.graded_text(thought), problem, num_tokens, finish_reason)
            for thought, (_, problem, num_tokens, finish_reason) in zip(thoughts, jobs, strict=True)
        ]
        scores = self.inner.score_batch(stripped)
        return [self.rule.add_part(score, thought) for score, thought in zip(scores, thoughts, strict=True)]
