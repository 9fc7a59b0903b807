"""Reward ``user``: a function in the user's Python file.

The trainer sends the file's name and never runs the file. A grading process runs it before it reports that it can
grade, so that a file that does not load is refused at the start.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from numbers import Real
from pathlib import Path
from typing import Any

from rlcore.config.reward import UserReward
from rlcore.errors import RewardError
from rlcore.rewards.protocol import Job, Reward
from rlcore.types import FinishReason, Problem, Score

_CALLED_WITH = ("text", "problem", "num_tokens", "finish_reason")
_RETURNS = (
    'a finite number, a Score, or a mapping with "reward" and named parts, all finite numbers, where a part '
    '"accuracy" is in [0, 1]'
)


def user_reward(config: UserReward) -> Reward:
    """The reward in the configured file, which is not run here. Paths are relative to the current directory.

    Raises:
        RewardError: the file does not exist.
    """
    file = config.file.expanduser().resolve()
    if not file.is_file():
        raise RewardError(
            f"reward.file is {config.file}, and there is no file {file}. "
            "Name a Python file, absolute or relative to the current directory."
        )
    make = UserBatchReward if config.batch else UserSingleReward
    return make(file, config.function, dict(config.arguments))


@dataclass(frozen=True)
class UserFunction:
    file: Path
    function: str
    arguments: Mapping[str, Any]

    def __reduce__(self) -> tuple[Any, ...]:
        return _loaded, (type(self), self.file, self.function, self.arguments)


class UserSingleReward(UserFunction):
    """The function, called as function(text, problem, num_tokens, finish_reason, **arguments)."""

    def __call__(self, text: str, problem: Problem, num_tokens: int, finish_reason: FinishReason) -> Score:
        function = _load(self.file, self.function)
        value = function(text, problem, num_tokens, finish_reason, **self.arguments)
        return _score(value, f"{self.function} in {self.file}")


class UserBatchReward(UserFunction):
    """The function, called with lists: function(texts, problems, num_tokens, finish_reasons, **arguments)."""

    def score_batch(self, jobs: Sequence[Job]) -> Sequence[Score]:
        function = _load(self.file, self.function)
        values = function(*map(list, zip(*jobs, strict=True)), **self.arguments)
        where = f"{self.function} in {self.file}"
        if isinstance(values, str | Mapping) or not hasattr(values, "__len__") or not hasattr(values, "__iter__"):
            raise RewardError(
                f"{where} returned {_short(values)} for {len(jobs)} completions. With reward.batch it has to return "
                f"a list with one result for each, each {_RETURNS}."
            )
        if len(values) != len(jobs):
            raise RewardError(
                f"{where} returned {len(values)} results for {len(jobs)} completions. "
                "Return one for each completion, in order."
            )
        return [_score(value, where) for value in values]


def _loaded(make: type[UserFunction], file: Path, function: str, arguments: Mapping[str, Any]) -> UserFunction:
    """Unpickles a reward: runs the file and checks that the function accepts the call."""
    _check_call(_load(file, function), file, function, arguments)
    return make(file, function, arguments)


@lru_cache(maxsize=8)
def _load(file: Path, name: str) -> Callable[..., Any]:
    """Run the file and return its function. The file can import modules from its folder.

    Raises:
        RewardError: no such file or function. Exceptions of the file itself are not caught.
    """
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # last, so that it hides no library
    spec = importlib.util.spec_from_file_location(f"rlflow_user_reward_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise RewardError(f"reward.file {file} is not a Python file. Name a file that ends in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look up the module of a class
    spec.loader.exec_module(module)
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        defined = sorted(
            key
            for key, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__
        )
        raise RewardError(
            f"reward.function is {name!r}, but {file} has no such function. Functions defined there: "
            f"{', '.join(defined) or 'none'}. Set reward.function to one of them."
        )
    return function


def _check_call(function: Callable[..., Any], file: Path, name: str, arguments: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C: its signature is not known
        return
    try:
        signature.bind(*_CALLED_WITH, **arguments)
    except TypeError as error:
        call = ", ".join([*_CALLED_WITH, *(f"{key}={value!r}" for key, value in arguments.items())])
        raise RewardError(
            f"{file} defines {name}{signature}, which cannot be called as {name}({call}): {error}. "
            "Accept the first four arguments by position and every key of reward.arguments by name."
        ) from None


def _score(value: object, where: str) -> Score:
    """The return value of a user's function as a Score.

    Without a part ``accuracy``, the reward clipped to [0, 1] is the accuracy, because pass rates need one.

    Raises:
        RewardError: the value has another type, or holds other than finite numbers.
    """
    reward: Any
    parts: dict[str, Any]
    if isinstance(value, Score):
        if not value.graded:
            return value
        reward, parts = value.reward, dict(value.parts)
    elif isinstance(value, Mapping):
        parts = {str(key): part for key, part in value.items()}
        reward = parts.pop("reward", None)
    else:
        reward, parts = value, {}
    if not _is_number(reward) or not all(_is_number(part) for part in parts.values()):
        raise RewardError(f"{where} returned {_short(value)}. Return {_RETURNS}.")
    numbers = {"accuracy": min(1.0, max(0.0, float(reward))), **{key: float(part) for key, part in parts.items()}}
    if not 0 <= numbers["accuracy"] <= 1:
        raise RewardError(f"{where} returned {_short(value)}, whose accuracy is outside [0, 1]. Return {_RETURNS}.")
    return Score(float(reward), numbers, graded=True)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


def _short(value: object) -> str:
    return f"{type(value).__name__} {repr(value)[:200]}"
