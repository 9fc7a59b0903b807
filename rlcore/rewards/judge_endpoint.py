"""The endpoint of a judge: its key, its outages, and what its refusals mean for the run."""

from __future__ import annotations

from rlcore.config.reward import JudgeConfig
from rlcore.endpoint import Denied, Endpoint, Silence, key_in
from rlcore.errors import ConfigError, JudgeAwayError, RewardError


def judge_key(config: JudgeConfig) -> str | None:
    """The key in the environment variable that the config names.

    Raises:
        RewardError: the variable is not set, or holds what cannot be sent.
    """
    if config.key_variable is None:
        return None
    try:
        key = key_in(config.key_variable)
    except ConfigError as error:
        raise RewardError(str(error)) from None
    if key is None:
        raise RewardError(
            f"reward.judge.key_variable is {config.key_variable}, which is not set in this process's environment. "
            "Set it where flows and trainers run, or set key_variable to null."
        )
    return key


def judge_endpoint(config: JudgeConfig, key: str | None) -> Endpoint:
    """Make it inside the event loop that uses it."""
    return Endpoint(config.url, key, timeout_seconds=config.timeout_seconds, concurrency=config.concurrency)


def judge_silence(config: JudgeConfig) -> Silence:
    """Raises JudgeAwayError when an outage lasts too long."""

    def too_long(what: str) -> JudgeAwayError:
        return JudgeAwayError(
            f"{what}, and reward.judge.outage_minutes allows {config.outage_minutes:g} minutes. All verdicts are in "
            "the journal. Start the judge again and continue the run, or raise outage_minutes."
        )

    return Silence(f"the judge at {config.url}", config.outage_minutes, too_long, "Training waits")


def judge_denied(config: JudgeConfig, denied: Denied) -> RewardError:
    return RewardError(
        f"the judge at {config.url} refuses: {denied.why}. Check reward.judge.url, reward.judge.model "
        f"({config.model}) and the key in reward.judge.key_variable ({config.key_variable})."
    )
