"""From the text of a completion to its Score. No torch here: a grading process has to start fast."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rlcore.config import RewardConfig
from rlcore.errors import RewardError
from rlcore.ports import RewardFn
from rlcore.rewards.format import FormatParts, format_parts, last_boxed
from rlcore.rewards.math import make_math_reward

__all__ = ["REWARDS", "FormatParts", "format_parts", "last_boxed", "make_reward"]

REWARDS: Mapping[str, Callable[[RewardConfig], RewardFn]] = {"math": make_math_reward}


def make_reward(config: RewardConfig) -> RewardFn:
    """The reward that the experiment names.

    Raises:
        RewardError: no reward has that name.
    """
    if config.name not in REWARDS:
        raise RewardError(
            f"reward.name is {config.name!r}. Known rewards: {', '.join(sorted(REWARDS))}. "
            "Use one of them, or add yours to rlcore.rewards.REWARDS."
        )
    return REWARDS[config.name](config)
