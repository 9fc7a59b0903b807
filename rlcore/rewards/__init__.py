"""From the text of a completion to its Score. No torch here, so that a grading process starts fast."""

from __future__ import annotations

from functools import partial
from typing import assert_never

from rlcore.config.reward import (
    CountdownReward,
    DapoReward,
    FormattedReward,
    FunctionReward,
    Gsm8kReward,
    RewardConfig,
    UserReward,
)
from rlcore.errors import RewardError
from rlcore.rewards.arithmetic import countdown_reward, gsm8k_reward
from rlcore.rewards.dapo import LengthRule, OverlongBatchReward, OverlongReward, dapo_reward
from rlcore.rewards.formatted import formatted_reward
from rlcore.rewards.protocol import BatchRewardFn, Reward
from rlcore.rewards.thoughts import StrippedBatchReward, StrippedReward, ThoughtRule
from rlcore.rewards.user import user_reward


def environment_of(config: FunctionReward) -> tuple[str, ...]:
    """Names of the environment variables that the reward may read. Built-in rewards read none."""
    return config.environment if isinstance(config, UserReward) else ()


def make_reward(config: FunctionReward, *, max_completion_tokens: int, prompt_opens_thought: bool = False) -> Reward:
    """The configured reward. It can be pickled and sent to a grading process.

    Args:
        max_completion_tokens: budget of a completion, where the overlong penalty is largest.
        prompt_opens_thought: prompts end with <think>. Matters only for ``config.thoughts: strip``.

    Raises:
        RewardError: a user's file does not exist, or the overlong buffer is larger than the budget.
    """
    reward = _reward(config)
    if (strip := thought_rule(config, prompt_opens_thought=prompt_opens_thought)) is not None:
        if isinstance(reward, BatchRewardFn):
            reward = StrippedBatchReward(reward, strip)
        else:
            reward = StrippedReward(reward, strip)
    if (length := length_rule(config, max_completion_tokens)) is None:
        return reward
    return OverlongBatchReward(reward, length) if isinstance(reward, BatchRewardFn) else OverlongReward(reward, length)


def thought_rule(config: RewardConfig, *, prompt_opens_thought: bool) -> ThoughtRule | None:
    """How thoughts are stripped. None: they are not."""
    if config.thoughts == "keep":
        return None
    return ThoughtRule(opened=prompt_opens_thought, grades_format=isinstance(config, FormattedReward))


def length_rule(config: RewardConfig, max_completion_tokens: int) -> LengthRule | None:
    """The length penalty. None: there is none.

    Raises:
        RewardError: its buffer is larger than the budget.
    """
    overlong = config.overlong
    if overlong is None:
        return None
    if overlong.buffer_tokens > max_completion_tokens:
        raise RewardError(
            f"reward.overlong.buffer_tokens is {overlong.buffer_tokens}, and a completion has at most "
            f"{max_completion_tokens} tokens (rollout.max_completion_tokens). Lower the first, or raise the second."
        )
    return LengthRule(max_completion_tokens, overlong.buffer_tokens, overlong.penalty)


def _reward(config: FunctionReward) -> Reward:
    match config:
        case FormattedReward():
            return partial(formatted_reward, name=config.name, format_weight=config.format_weight)
        case DapoReward():
            return dapo_reward
        case Gsm8kReward():
            return partial(gsm8k_reward, method=config.method)
        case CountdownReward():
            return partial(countdown_reward, format_score=config.format_score)
        case UserReward():
            return user_reward(config)
    assert_never(config)
