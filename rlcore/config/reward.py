"""From text to score. A tagged union: ``name`` picks the reward, its fields are its own; one file each under
rlcore/rewards."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from rlcore.config.base import Frozen, named_by_default


class OverlongPenalty(Frozen):
    """DAPO's soft punishment (arXiv:2503.14476, equation 13): 0 up to the last ``buffer_tokens`` of the completion
    budget (rollout.max_completion_tokens), then falling in a straight line to -``penalty`` at its end."""

    buffer_tokens: int = Field(ge=1)
    """Tokens before the end of the budget at which the penalty begins."""
    penalty: float = Field(1.0, gt=0)
    """Taken off the reward of a completion that fills the budget."""


class _Reward(Frozen):
    deadline_seconds: float = Field(10.0, gt=0)
    """A grading that takes longer is killed and counted as ungraded: left out of the advantage."""
    processes: int = Field(1, ge=1)
    """Grading processes; more where a reward is slow."""
    max_ungraded_share: float = Field(0.5, ge=0, le=1)
    """A round of sampling of which more than this share could not be graded fails the step."""
    overlong: OverlongPenalty | None = None
    """Added to the reward, whichever it is; its part, unweighted in [-1, 0], is named ``overlong``."""


class MathReward(_Reward):
    """MathRuler on the last \\boxed{}; format: one think block, then the box."""

    name: Literal["math"] = "math"
    format_weight: float = Field(0.1, ge=0, le=1)
    """The reward is (1 - format_weight) * accuracy + format_weight * format."""


class MathVerifyReward(_Reward):
    """As ``math``, with math-verify deciding equality."""

    name: Literal["math_verify"] = "math_verify"
    format_weight: float = Field(0.1, ge=0, le=1)
    """The reward is (1 - format_weight) * accuracy + format_weight * format."""


class R1vReward(_Reward):
    """MathRuler on the answer tag; format: a think block, then an answer block, and nothing else."""

    name: Literal["r1v"] = "r1v"
    format_weight: float = Field(0.5, ge=0, le=1)
    """The reward is (1 - format_weight) * accuracy + format_weight * format."""


class DapoReward(_Reward):
    """The last "Answer:" line of the last 300 characters, +1 or -1; set ``overlong`` for DAPO's length penalty."""

    name: Literal["dapo"] = "dapo"


class Gsm8kReward(_Reward):
    """The number after the last "####" (strict), or the last number of the text (flexible)."""

    name: Literal["gsm8k"] = "gsm8k"
    method: Literal["strict", "flexible"] = "strict"
    """Which number of the text is the answer."""


class CountdownReward(_Reward):
    """The answer tag holds an expression that uses each of the problem's ``nums`` once and equals its ``target``."""

    name: Literal["countdown"] = "countdown"
    format_score: float = Field(0.1, ge=0, le=1)
    """Reward of an answer tag that holds something wrong."""


class ClevrCountReward(_Reward):
    """An integer in the answer tag; format as ``r1v``."""

    name: Literal["clevr_count"] = "clevr_count"
    format_weight: float = Field(0.5, ge=0, le=1)
    """The reward is (1 - format_weight) * accuracy + format_weight * format."""


class GeoqaReward(_Reward):
    """A number or expression in the answer tag, or the letter of a choice; format as ``r1v``."""

    name: Literal["geoqa"] = "geoqa"
    format_weight: float = Field(0.5, ge=0, le=1)
    """The reward is (1 - format_weight) * accuracy + format_weight * format."""


class MultipleChoiceReward(_Reward):
    """The letter of the choice, A to J, in a box, answer tags or an "Answer:" line; format as ``math`` or ``r1v``."""

    name: Literal["multiple_choice"] = "multiple_choice"
    format_weight: float = Field(0.1, ge=0, le=1)
    """The reward is (1 - format_weight) * accuracy + format_weight * format."""


class UserReward(_Reward):
    """A function of yours in a Python file of yours, run in the same killable processes."""

    name: Literal["user"] = "user"
    file: Path
    """Made absolute where the experiment is read, so that every process means the same file."""
    function: str = "reward"
    """Called as function(text, problem, num_tokens, finish_reason, **arguments), or, with ``batch``, with lists of
    the first four; returns a float, a Score, or a mapping with "reward" and named parts (a list of them)."""
    batch: bool = False
    """The function takes lists."""
    arguments: dict[str, Any] = {}
    """Given to the function by name."""
    environment: tuple[str, ...] = ()
    """Environment variables that the function may read, by name; a grading process has no others of yours."""

    @field_validator("file")
    @classmethod
    def _absolute(cls, file: Path) -> Path:
        return file.expanduser().absolute()

    @field_validator("environment")
    @classmethod
    def _names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if wrong := [name for name in names if not name.isascii() or not name.isidentifier()]:
            raise ValueError(f"{wrong} are no names of environment variables. Use letters, digits and _ only.")
        return names


RewardConfig = Annotated[
    MathReward
    | MathVerifyReward
    | R1vReward
    | DapoReward
    | Gsm8kReward
    | CountdownReward
    | ClevrCountReward
    | GeoqaReward
    | MultipleChoiceReward
    | UserReward,
    Field(discriminator="name"),
    named_by_default("math"),
]
