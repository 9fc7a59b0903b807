"""Completions of validation problems, graded: one row each, as a table in a file. No torch."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, fields
from itertools import groupby
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rlcore.config import EvaluationConfig
from rlcore.errors import ConfigError, RewardError
from rlcore.files import write_atomically
from rlcore.types import Completion, Decoding, FinishReason, Grader, Problem, Sampler, SampleRequest, Score


@dataclass(frozen=True, slots=True)
class EvalRow:
    """One completion of one problem."""

    problem_id: str
    sample: int  # 0 .. samples - 1
    question: str
    answer: str
    completion: str
    reward: float
    accuracy: float | None  # None: not graded
    format: float | None  # None: not graded, or the reward has no such part
    graded: bool
    finish_reason: FinishReason
    num_tokens: int
    group: str | None = None  # the problem's value in ``evaluation.group_column``
    given: str | None = None  # the answer that was graded; None: there is none, or the reward tells none
    failure: str | None = None  # why an endpoint gave no completion; the row is ungraded


_TEXT = ("str", "str | None", "FinishReason")
_TYPES = {**dict.fromkeys(_TEXT, pa.string()), "int": pa.int32(), "bool": pa.bool_()}
_SCHEMA = pa.schema([(column.name, _TYPES.get(str(column.type), pa.float64())) for column in fields(EvalRow)])


def evaluate(sampler: Sampler, grader: Grader, problems: Sequence[Problem], config: EvaluationConfig) -> list[EvalRow]:
    """``config.samples`` completions of each of the first ``config.problems`` problems, graded while others are
    sampled. A request that an endpoint fails gives an ungraded row with its message.

    Rows are ordered by problem, then by sample.

    Raises:
        ConfigError: no problem has a column ``config.group_column``.
        RewardError: the reward has no part called accuracy.
    """
    chosen = problems[: config.problems]
    groups = _groups(chosen, config.group_column)
    pairs = [(problem, sample) for problem in chosen for sample in range(config.samples)]
    how = Decoding(config.temperature, config.top_p)
    # One request per sample, so that sample i of a problem does not depend on ``config.samples``.
    requests = [
        SampleRequest(problem, 1, sample_seed(config.seed, problem.problem_id, sample), decoding=how)
        for problem, sample in pairs
    ]
    completions: dict[int, Completion] = {}
    failures: dict[int, str] = {}
    gradings: list[tuple[list[int], Future[list[Score]]]] = []
    for ended in sampler.generate(requests):
        failures |= {place: group.failure for place, group in ended.items() if group.failure}
        places = [place for place in ended if place not in failures]
        if not places:
            continue
        completions |= {place: ended[place].completions[0] for place in places}
        gradings.append((places, grader.submit([pairs[i][0] for i in places], [completions[i] for i in places])))
    scores = {i: score for places, grading in gradings for i, score in zip(places, grading.result(), strict=True)}
    return [
        _failed_row(problem, sample, failures[i], groups.get(problem.problem_id))
        if i in failures
        else _row(problem, sample, completions[i], scores[i], groups.get(problem.problem_id))
        for i, (problem, sample) in enumerate(pairs)
    ]


def _groups(problems: Sequence[Problem], column: str | None) -> dict[str, str]:
    """The value of each problem in ``column``, by the problem's id. None: the name of its source, if it has one."""
    if column is None:
        return {problem.problem_id: problem.source_name for problem in problems if problem.source_name}
    groups = {problem.problem_id: str(problem.extra[column]) for problem in problems if column in problem.extra}
    if not groups:
        known = ", ".join(sorted({name for problem in problems for name in problem.extra})) or "none"
        raise ConfigError(
            f"evaluation.group_column is {column!r}, and no validation problem has this column. Columns besides the "
            f"problem's own: {known}. Name one of them, or set evaluation.group_column to null."
        )
    return groups


def sample_seed(seed: int, problem_id: str, sample: int) -> int:
    """31 bits of a hash of (evaluation seed, problem, sample), so it does not depend on what else is sampled."""
    digest = hashlib.blake2b(f"{seed}\n{sample}\n{problem_id}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def _row(problem: Problem, sample: int, completion: Completion, score: Score, group: str | None) -> EvalRow:
    if score.graded and "accuracy" not in score.parts:
        raise RewardError(
            f"the reward of {problem.problem_id} has the parts {sorted(score.parts)}; evaluation needs one "
            "called accuracy, 1 for a right answer. Add it to the reward's parts."
        )
    parts = score.parts if score.graded else {}
    return EvalRow(
        problem_id=problem.problem_id,
        sample=sample,
        question=problem.conversation,
        answer=problem.answer,
        completion=completion.text,
        reward=score.reward,
        accuracy=parts.get("accuracy"),
        format=parts.get("format"),
        graded=score.graded,
        finish_reason=completion.finish_reason,
        num_tokens=len(completion.token_ids),
        group=group,
        given=score.answer,
    )


def _failed_row(problem: Problem, sample: int, failure: str, group: str | None) -> EvalRow:
    return EvalRow(
        problem_id=problem.problem_id,
        sample=sample,
        question=problem.conversation,
        answer=problem.answer,
        completion="",
        reward=0.0,
        accuracy=None,
        format=None,
        graded=False,
        finish_reason="stop",
        num_tokens=0,
        group=group,
        failure=failure,
    )


def write_rows(rows: Sequence[EvalRow], path: Path) -> None:
    """Write the rows as parquet, one per completion. Replaces an older file atomically."""
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist([asdict(row) for row in rows], schema=_SCHEMA), buffer)
    write_atomically(path, buffer.getvalue())


def read_rows(path: Path) -> list[EvalRow]:
    """What ``write_rows`` wrote."""
    return [EvalRow(**row) for row in pq.read_table(path, schema=_SCHEMA).to_pylist()]


def accuracy_per_problem(rows: Iterable[EvalRow]) -> dict[str, float]:
    """Share of right samples per problem; an ungraded sample is not right. ``rows`` must be ordered by problem."""
    grouped = groupby(rows, key=lambda row: row.problem_id)
    return {name: float(np.mean([row.accuracy or 0.0 for row in group])) for name, group in grouped}
