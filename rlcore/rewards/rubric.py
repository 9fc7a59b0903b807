"""From a problem and a completion to the question that a judge gets, and from its answer to a score."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
import jinja2.sandbox
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlcore.config.reward import JudgeConfig
from rlcore.errors import RewardError
from rlcore.types import ImageRef, Problem

RUBRICS = Path(__file__).parent / "rubrics"
MAX_REASON_CHARS = 500
VARIABLES = ("question", "answer", "completion", "problem", "num_pictures", "fence")
_MARKER = "<image>|<video>"


class Opinion(BaseModel):
    """The answer of a judge."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    reason: str
    score: float = Field(ge=0, le=1, allow_inf_nan=False)


# The reason comes first, so that the judge writes it before it decides.
SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {"reason": {"type": "string"}, "score": {"type": "number", "minimum": 0, "maximum": 1}},
    "required": ["reason", "score"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Question:
    """One request to a judge."""

    problem_id: str
    text: str
    images: tuple[ImageRef, ...]
    settings: Mapping[str, Any]  # fields of the request that do not depend on the completion

    @property
    def key(self) -> str:
        """Hash of everything that the judge is asked."""
        content = [dict(self.settings), self.text, [image.sha256 for image in self.images]]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]

    def body(self) -> bytes:
        """The request as JSON: the pictures, then the text. Reads the picture files.

        Raises:
            FileNotFoundError: a picture is missing.
        """
        pictures = [
            {
                "type": "image_url",
                "image_url": {"url": f"data:image/png;base64,{base64.b64encode(image.read()).decode()}"},
            }
            for image in self.images
        ]
        content = [*pictures, {"type": "text", "text": self.text}] if pictures else self.text
        return json.dumps({**self.settings, "messages": [{"role": "user", "content": content}]}).encode()


class Rubric:
    """The rubric of a config.

    Raises:
        RewardError: there is no such rubric, or it is no Jinja template that uses ``completion``.
    """

    def __init__(self, config: JudgeConfig) -> None:
        text = rubric_text(config.rubric)
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
        )
        try:
            used = jinja2.meta.find_undeclared_variables(environment.parse(text))
            self._template = environment.from_string(text)
        except jinja2.TemplateError as error:
            raise RewardError(f"reward.judge.rubric {config.rubric} is no Jinja template: {error}. Fix it.") from None
        unknown = sorted(used - {*VARIABLES})
        if unknown or "completion" not in used:
            raise RewardError(
                f"reward.judge.rubric {config.rubric} uses {', '.join(sorted(used)) or 'no variable'}. It must use "
                f"completion, and may use {', '.join(VARIABLES)}."
            )
        self._name = config.rubric
        self._pictures = config.pictures
        self._settings: dict[str, Any] = {
            "model": config.model,
            "max_completion_tokens": config.max_tokens,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "verdict", "strict": True, "schema": SCHEMA},
            },
        }
        if config.temperature is not None:
            self._settings["temperature"] = config.temperature

    def question(self, problem: Problem, completion: str) -> Question:
        """What the judge is asked about one completion.

        Raises:
            RewardError: the rubric does not render for this problem.
        """
        images = problem.images if self._pictures else ()
        numbers = count(1)
        question = re.sub(_MARKER, lambda _: f"[picture {next(numbers)}]", problem.conversation)
        try:
            text = self._template.render(
                question=question,
                answer=problem.answer,
                completion=completion,
                problem=problem,
                num_pictures=len(images),
                # A line that the completion cannot hold, because it depends on the whole completion.
                fence=f"----- {hashlib.sha256(completion.encode(errors='replace')).hexdigest()[:16]} -----",
            )
        except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise RewardError(
                f"reward.judge.rubric {self._name} does not render for problem {problem.problem_id} with columns "
                f"{sorted(problem.extra)}: {type(error).__name__}: {error}. Fix the rubric."
            ) from None
        return Question(problem.problem_id, text, images, self._settings)


def rubric_text(name_or_path: str) -> str:
    """Text of a rubric: a name under ``rubrics``, or the path of a file.

    Raises:
        RewardError: no such rubric; lists the known names.
    """
    known = {path.stem: path for path in sorted(RUBRICS.glob("*.jinja"))}
    path = known.get(name_or_path, Path(name_or_path))
    if not path.is_file():
        raise RewardError(
            f"reward.judge.rubric {name_or_path!r} is neither a known rubric nor a file. "
            f"Allowed: {', '.join(known)}, or the path of a Jinja file that uses completion."
        )
    return path.read_text(encoding="utf-8")


def opinion_in(text: str, *, cut: bool) -> Opinion | str:
    """The answer of a judge, or what is wrong with it. A cut answer is no opinion, even if it can be read."""
    if cut:
        return f"it was cut at reward.judge.max_tokens; the answer begins with {text[:200]!r}"
    try:
        opinion = Opinion.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the answer"
        return f"{where}: {first['msg']}; the answer is {text[:200]!r}"
    return opinion.model_copy(update={"reason": opinion.reason[:MAX_REASON_CHARS]})
