"""The kinds of rewards, and the JSON that the trainer and a grading process exchange. JSON holds no code."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any, Protocol, TypeAlias, runtime_checkable

from rlcore.types import FinishReason, ImageRef, Problem, Score

MAX_GIVEN_CHARS = 2000  # of the answer that a score tells

Job: TypeAlias = tuple[str, Problem, int, FinishReason]  # the arguments of a RewardFn


class RewardFn(Protocol):
    def __call__(self, text: str, problem: Problem, num_tokens: int, finish_reason: FinishReason) -> Score:
        """Score one completion. A pure function that runs in a process that can be killed."""


@runtime_checkable
class BatchRewardFn(Protocol):
    """A reward that is cheaper for many completions at once, such as a judge model."""

    def score_batch(self, jobs: Sequence[Job]) -> Sequence[Score]:
        """Score 1 to ``pool.MAX_CHUNK`` completions: one Score each, in order."""


Reward: TypeAlias = RewardFn | BatchRewardFn


def jobs_to_json(jobs: Sequence[Job]) -> bytes:
    """The jobs as JSON. A tuple in a problem's ``extra`` becomes a list.

    Raises:
        TypeError, ValueError: a problem holds a value that JSON cannot.
    """
    return json.dumps(
        [
            (
                text,
                (
                    *(p.problem_id, p.question, [astuple(image) for image in p.images], p.answer, p.source),
                    *(dict(p.extra), p.source_name, dict(p.chat_template_arguments), p.opens_thought),
                ),
                num_tokens,
                finish_reason,
            )
            for text, p, num_tokens, finish_reason in jobs
        ]
    ).encode()


def jobs_from_json(data: bytes) -> list[Job]:
    return [(text, _problem(*problem), tokens, reason) for text, problem, tokens, reason in json.loads(data)]


def _problem(
    problem_id: str,
    question: str,
    images: list[list[Any]],
    answer: str,
    source: str,
    extra: dict[str, object],
    *named: Any,
) -> Problem:
    refs = tuple(ImageRef(*image) for image in images)
    names = ("source_name", "chat_template_arguments", "opens_thought")
    return Problem(problem_id, question, refs, answer, source, extra, **dict(zip(names, named, strict=True)))


def answer_to_json(answer: Score | str) -> bytes:
    """A score, or the reason why there is none."""
    if isinstance(answer, str):
        return json.dumps({"error": answer}).encode()
    values = {"reward": answer.reward, "parts": dict(answer.parts), "graded": answer.graded, "answer": answer.answer}
    return json.dumps(values).encode()


def answer_from_json(data: bytes) -> Score | str:
    """The answer of a grading process. It is checked, because a completion may have taken over the process.

    Raises:
        ValueError: it is neither a score of finite numbers nor an error.
    """
    try:
        answer = json.loads(data)
        if isinstance(answer, dict) and answer.keys() == {"error"} and isinstance(answer["error"], str):
            return str(answer["error"])
        parts = {name: _number(part) for name, part in answer["parts"].items()}
        if isinstance(answer["graded"], bool) and isinstance(given := answer.get("answer"), str | None):
            if given is not None:  # half a surrogate pair cannot be written to a file
                given = given[:MAX_GIVEN_CHARS].encode(errors="replace").decode()
            return Score(_number(answer["reward"]), parts, answer["graded"], given)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        pass
    raise ValueError(f"a grading process answered {data[:200]!r}, which is neither a score nor an error")


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a finite number")
    return float(value)
