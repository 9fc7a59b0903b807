"""Scores of single completions, for the tests of the rewards."""

from __future__ import annotations

from rlcore.config.reward import RewardConfig
from rlcore.rewards import make_reward
from rlcore.types import Problem, Score


def score(config: RewardConfig, text: str, answer: str, num_tokens: int = 5, **extra: object) -> Score:
    problem = Problem("p", "What is it?", (), answer, "test", extra)
    return make_reward(config, max_completion_tokens=100)(text, problem, num_tokens, "stop")


def accuracy(config: RewardConfig, text: str, answer: str, **extra: object) -> float:
    return score(config, text, answer, **extra).parts["accuracy"]
