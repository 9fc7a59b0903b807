"""From text to score. A tagged union: ``name`` selects the reward, and each has its own fields."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from rlcore.config.base import Frozen, named_by_default


class OverlongPenalty(Frozen):
    """DAPO's soft punishment (arXiv:2503.14476, equation 13): 0 up to the last ``buffer_tokens`` of the completion
    budget (rollout.max_completion_tokens), then a linear decrease to -``penalty`` at its end."""

    buffer_tokens: int = Field(ge=1)
    """Tokens before the end of the budget at which the penalty starts."""
    penalty: float = Field(1.0, gt=0)
    """Penalty of a completion that fills the budget."""


class _AnyReward(Frozen):
    max_ungraded_share: float = Field(0.5, ge=0, le=1)
    """The step fails if more than this share of a round could not be graded. The evaluation of an endpoint fails if the
    endpoint fails more than this share of the requests."""
    thoughts: Literal["keep", "strip"] = "keep"
    """keep: grade the whole completion. strip: grade only the text after ``</think>``, for models that think. A
    thought that is never closed then counts as an empty, wrong answer; their share is logged as ``unclosed_thought``. A
    thought that the chat template opens in the prompt is recognised."""
    overlong: OverlongPenalty | None = None
    """Length penalty that is added to any reward. Its unweighted part, in [-1, 0], is logged as ``overlong``."""


class _Reward(_AnyReward):
    """A function that runs in grading processes."""

    deadline_seconds: float = Field(10.0, gt=0)
    """A grading that takes longer is killed, and the completion is ungraded: it gets no advantage."""
    processes: int = Field(1, ge=1)
    """Number of grading processes. Use more for a slow reward."""


class FormattedReward(_Reward):
    format_weight: float = Field(0.1, ge=0, le=1)
    """The reward is (1 - format_weight) * accuracy + format_weight * format."""


class MathReward(FormattedReward):
    """MathRuler compares the last \\boxed{}. Format: one think block, then the box."""

    name: Literal["math"] = "math"


class MathVerifyReward(FormattedReward):
    """As ``math``, but math-verify compares."""

    name: Literal["math_verify"] = "math_verify"


class _AnswerTagReward(FormattedReward):
    format_weight: float = Field(0.5, ge=0, le=1)
    """The reward is (1 - format_weight) * accuracy + format_weight * format."""


class R1vReward(_AnswerTagReward):
    """MathRuler compares the answer tag. Format: a think block, then an answer block, and nothing else."""

    name: Literal["r1v"] = "r1v"


class DapoReward(_Reward):
    """+1 or -1 for the last "Answer:" line of the last 300 characters. Set ``overlong`` for DAPO's length penalty."""

    name: Literal["dapo"] = "dapo"


class Gsm8kReward(_Reward):
    """1 if the final number is right."""

    name: Literal["gsm8k"] = "gsm8k"
    method: Literal["strict", "flexible"] = "strict"
    """strict: the number after the last "####". flexible: the last number of the text."""


class CountdownReward(_Reward):
    """1 if the expression in the answer tag uses each of the problem's ``nums`` once and equals its ``target``."""

    name: Literal["countdown"] = "countdown"
    format_score: float = Field(0.1, ge=0, le=1)
    """Reward of a wrong answer tag."""


class ClevrCountReward(_AnswerTagReward):
    """The answer tag must have the right integer. Format as ``r1v``."""

    name: Literal["clevr_count"] = "clevr_count"


class GeoqaReward(_AnswerTagReward):
    """The answer tag must have the right number, expression, or letter of a choice. Format as ``r1v``."""

    name: Literal["geoqa"] = "geoqa"


class MultipleChoiceReward(FormattedReward):
    """The letter of the choice, A to J, in a box, answer tags or an "Answer:" line. Format as ``math`` or ``r1v``."""

    name: Literal["multiple_choice"] = "multiple_choice"


class ChoiceOrValueReward(FormattedReward):
    """For benchmarks that mix kinds of problems. The answer is in a box, answer tags or an "Answer:" line. With choices
    it is a letter or the text of a choice; otherwise MathRuler compares it. Format as ``math`` or ``r1v``."""

    name: Literal["choice_or_value"] = "choice_or_value"


class UserReward(_Reward):
    """Your own function in a Python file. It runs in the same grading processes."""

    name: Literal["user"] = "user"
    file: Path
    """The Python file. A relative path starts at the current directory."""
    function: str = "reward"
    """Called as function(text, problem, num_tokens, finish_reason, **arguments), with lists of the first four if
    ``batch`` is true. Returns a float, a Score, or a mapping with "reward" and named parts; with ``batch``, a list of
    these."""
    batch: bool = False
    """The function takes and returns lists."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of the function."""
    environment: tuple[str, ...] = ()
    """Names of the environment variables that the function may read. Grading processes get no others of yours."""

    @field_validator("file")
    @classmethod
    def _make_absolute(cls, file: Path) -> Path:
        """So that every process uses the same file."""
        return file.expanduser().absolute()

    @field_validator("environment")
    @classmethod
    def _check_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if wrong := [name for name in names if not _is_variable(name)]:
            raise ValueError(f"{wrong} are not names of environment variables. Use letters, digits and _ only.")
        return names


class JudgeBudget(Frozen):
    """What the judge may cost. When it is spent, the run stops with an error, and continues once it is raised."""

    calls: int | None = Field(None, ge=1)
    """Calls that the judge may answer in the whole run, repeated ones included. null: no limit."""
    tokens: int | None = Field(None, ge=1)
    """Tokens of prompts and answers in the whole run, as the judge reports them. Calls that have begun when it is
    reached are finished, so the last ``concurrency`` calls may exceed it. null: no limit."""


class JudgeConfig(Frozen):
    """The endpoint of a judge model, and how it is asked."""

    url: str
    """Address of an OpenAI-compatible server up to its version, such as http://judge:8000/v1. It may not hold a
    password."""
    model: str
    """Name of the model, as the server lists it."""
    rubric: str = "correctness"
    """What the judge is asked: a name under rlcore/rewards/rubrics, or the path of a Jinja file that uses
    ``completion``."""
    pictures: bool = True
    """Send the pictures of the problem. Set it to false for a judge that takes text only."""
    temperature: float | None = Field(0.0, ge=0)
    """Sampling temperature of the judge. null: the server's own."""
    max_tokens: int = Field(512, ge=16)
    """Longest answer of the judge, its thoughts included."""
    concurrency: int = Field(16, ge=1)
    """Calls at the same time."""
    retries: int = Field(3, ge=0)
    """How often a call is repeated whose answer is invalid, or that fails although the server is up. After that the
    completion is ungraded."""
    timeout_seconds: float = Field(120.0, gt=0)
    """Longest time of one call."""
    outage_minutes: float = Field(30.0, gt=0)
    """How long the run waits for a server that does not answer at all. After that it stops with an error."""
    budget: JudgeBudget = JudgeBudget()
    key_variable: str | None = None
    """Name of the environment variable that holds the key of the endpoint. null: it needs none."""

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError("reward.judge.url is no address such as http://judge:8000/v1, without ? and #.")
        if "@" in parts.netloc:
            raise ValueError(
                "reward.judge.url holds a user or password, which would be logged. Put the key into an environment "
                "variable, and its name into reward.judge.key_variable."
            )
        return url.rstrip("/")

    @field_validator("rubric")
    @classmethod
    def _make_absolute(cls, rubric: str) -> str:
        """So that every process uses the same file."""
        path = Path(rubric).expanduser()
        return str(path.absolute()) if path.suffix or len(path.parts) > 1 else rubric

    @field_validator("key_variable")
    @classmethod
    def _check_name(cls, name: str | None) -> str | None:
        if name is not None and not _is_variable(name):  # most likely the key itself, so it is not repeated
            raise ValueError(
                "reward.judge.key_variable is no name of an environment variable. Give the name, not the key."
            )
        return name


class JudgeReward(_AnyReward):
    """A score in [0, 1] that a judge model gives, over HTTP (docs/howto/judge.md)."""

    name: Literal["judge"] = "judge"
    judge: JudgeConfig


class ScoringModelConfig(Frozen):
    """A reward model of Hugging Face, and how its score becomes a reward."""

    path: Path
    """Folder of a sequence-classification model with one label, its tokenizer and chat template. A relative path starts
    at the current directory."""
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda:\d+)$")
    """auto: the first GPU that the run does not use, else the CPU. cpu, or a GPU such as cuda:0, which may be one
    of the policy's if both fit."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the weights."""
    batch_size: int = Field(8, ge=1)
    """Most conversations in one pass. The size changes a score by rounding only."""
    max_tokens: int = Field(8192, ge=1)
    """Longest conversation in tokens. A completion of a longer one is ungraded."""
    mean: float = 0.0
    """Subtracted from the model's score."""
    std: float = Field(1.0, gt=0)
    """The difference is divided by it."""
    scale: Literal["raw", "sigmoid"] = "raw"
    """raw: the result is the score. sigmoid: 1 / (1 + exp(-result)), between 0 and 1."""
    format: Literal["math", "r1v"] = "math"
    """Whose format counts: that of the reward ``math`` or ``r1v``."""
    format_weight: float = Field(0.0, ge=0, le=1)
    """The reward is (1 - format_weight) * score + format_weight * format."""

    @field_validator("path")
    @classmethod
    def _make_absolute(cls, path: Path) -> Path:
        """So that every process uses the same folder."""
        return path.expanduser().absolute()


class ModelReward(_AnyReward):
    """The score of a reward model, which runs in a process of its own (docs/howto/reward-model.md)."""

    name: Literal["model"] = "model"
    model: ScoringModelConfig


def _is_variable(name: str) -> bool:
    return name.isascii() and name.isidentifier()


FunctionReward = (
    MathReward
    | MathVerifyReward
    | R1vReward
    | DapoReward
    | Gsm8kReward
    | CountdownReward
    | ClevrCountReward
    | GeoqaReward
    | MultipleChoiceReward
    | ChoiceOrValueReward
    | UserReward
)
RewardConfig = Annotated[
    FunctionReward | JudgeReward | ModelReward,
    Field(discriminator="name"),
    named_by_default("math"),
]


def own_file(reward: RewardConfig) -> Path | None:
    """The file of the user that the reward depends on, if any."""
    match reward:
        case UserReward():
            return reward.file
        case JudgeReward() if Path(reward.judge.rubric).is_absolute():
            return Path(reward.judge.rubric)
    return None


def own_digest(reward: RewardConfig) -> str | None:
    """Hash of the user's own files that the reward depends on, if any: a file, or the folder of a reward model.

    Raises:
        OSError: it cannot be read.
    """
    if isinstance(reward, ModelReward):
        return folder_fingerprint(reward.model.path)
    file = own_file(reward)
    return None if file is None else hashlib.sha256(file.read_bytes()).hexdigest()


def folder_fingerprint(folder: Path) -> str:
    """Hash of the names and contents of a folder's files, without hidden ones. Changed files are read again."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.startswith(".")]
    states = [(path, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return _content_hash(folder, tuple(states))


@cache
def _content_hash(folder: Path, states: tuple[tuple[Path, int, int], ...]) -> str:
    digest = hashlib.sha256()
    for path, _, _ in states:
        with path.open("rb") as file:
            digest.update(f"{path.relative_to(folder).as_posix()} ".encode())
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
