"""Where a run stands: with the sharded weights and optimizer it is all that a resume needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rlcore.data.curriculum import PassRates
from rlcore.errors import CheckpointError
from rlcore.rollout.collect import to_sample
from rlcore.rollout.in_flight import GroupInFlight
from rlcore.training.advantages import ScoredGroup
from rlcore.types import Completion, Floats, Problem, Rollout, RolloutGroup, Score

PASS_RATES = "pass_rates.json"
BUFFER = "buffer.parquet"
AHEAD = "ahead.parquet"
IN_FLIGHT = "in_flight.parquet"


@dataclass(frozen=True, slots=True)
class TrainState:
    step: int = 0  # optimizer steps taken; also the version of the weights
    problems_seen: int = 0  # of the stream: trained on, left out as without signal, resting, postponed, or in flight
    postponed: tuple[int, ...] = ()  # indices of problems that the stream repeated too early for the last batch
    nonfinite_in_a_row: int = 0
    kl_coefficient: float | None = None  # None: the configured one
    pass_rates: PassRates = PassRates()
    buffer: tuple[ScoredGroup, ...] = ()  # groups with signal that a step had no room for
    ahead: tuple[ScoredGroup, ...] = ()  # the next rollout batch, where training.max_staleness lets it be there
    in_flight: tuple[GroupInFlight, ...] = ()  # what partial rollouts carry over, in the order of the stream

    def scalars(self) -> dict[str, Any]:
        """What fits into a line of JSON; the rest is in the files of ``save``."""
        return {
            "step": self.step,
            "problems_seen": self.problems_seen,
            "postponed": list(self.postponed),
            "nonfinite_in_a_row": self.nonfinite_in_a_row,
            "kl_coefficient": self.kl_coefficient,
        }

    def save(self, folder: Path) -> None:
        """Write the pass rates and the groups that wait beside the weights."""
        (folder / PASS_RATES).write_text(self.pass_rates.to_json())
        pq.write_table(_table(self.buffer), folder / BUFFER, compression="zstd")
        if self.ahead:
            pq.write_table(_table(self.ahead), folder / AHEAD, compression="zstd")
        if self.in_flight:
            rows = [_row_in_flight(group) for group in self.in_flight]
            table = pa.Table.from_pylist(rows, schema=_SCHEMA_IN_FLIGHT)
            pq.write_table(table, folder / IN_FLIGHT, compression="zstd")

    @classmethod
    def load(
        cls, folder: Path, scalars: Mapping[str, Any], problems: Sequence[Problem], *, mask_truncated: bool
    ) -> Self:
        """Read what ``save`` and ``scalars`` wrote.

        Args:
            problems: of the dataset that the run trains on.

        Raises:
            CheckpointError: a group is of a problem that the dataset does not have.
        """
        by_id = {problem.problem_id: index for index, problem in enumerate(problems)}

        def groups(name: str) -> tuple[ScoredGroup, ...]:
            found = _rows(folder / name, by_id)
            return tuple(_from_row(row, problems[index], mask_truncated) for index, row in found)

        in_flight = _rows(folder / IN_FLIGHT, by_id)
        return cls(
            # checkpoints of older versions have none postponed
            **{**scalars, "postponed": tuple(scalars.get("postponed", ()))},
            pass_rates=PassRates.from_json((folder / PASS_RATES).read_text()),
            buffer=groups(BUFFER),
            ahead=groups(AHEAD),
            in_flight=tuple(_in_flight(row, index, problems[index]) for index, row in in_flight),
        )


def _rows(path: Path, index: Mapping[str, int]) -> list[tuple[int, dict[str, Any]]]:
    """The groups of a file, each with its problem's place in the dataset."""
    if not path.exists():  # of a whole checkpoint, which is known by its manifest, only what was not written is missing
        return []
    rows = pq.read_table(path).to_pylist()
    missing = sorted({row["problem_id"] for row in rows} - index.keys())
    if missing:
        raise CheckpointError(
            f"{path} holds completions of {len(missing)} problems that the dataset lacks, such as {missing[0]!r}. "
            "Continue the run with the dataset that it was started with."
        )
    return [(index[row["problem_id"]], row) for row in rows]


_SCORE = pa.struct([("reward", pa.float64()), ("parts", pa.map_(pa.string(), pa.float64())), ("graded", pa.bool_())])
_COMPLETION = [
    ("token_ids", pa.list_(pa.int32())),
    ("logprobs", pa.list_(pa.float32())),
    ("text", pa.string()),
    ("finish_reason", pa.string()),
    ("policy_version", pa.int64()),
    ("score", _SCORE),
]
_ROLLOUT = pa.struct(
    [
        *_COMPLETION,
        ("old_logprobs", pa.list_(pa.float32())),  # of the completion alone, as those below
        ("log_kept", pa.list_(pa.float32())),
        ("ref_logprobs", pa.list_(pa.float32())),
    ]
)
_SCHEMA = pa.schema(
    [
        ("problem_id", pa.string()),
        ("prompt_token_ids", pa.list_(pa.int32())),
        ("baseline", _SCORE),
        ("rollouts", pa.list_(_ROLLOUT)),
    ]
)
_SCHEMA_IN_FLIGHT = pa.schema(
    [
        ("problem_id", pa.string()),
        ("batch", pa.int64()),
        ("epoch", pa.int64()),
        ("occurrence", pa.int64()),
        ("prompt_token_ids", pa.list_(pa.int32())),
        ("completions", pa.list_(pa.struct(_COMPLETION))),  # without a score where it has not ended
    ]
)


def _table(groups: Sequence[ScoredGroup]) -> pa.Table:
    return pa.Table.from_pylist([_row(group) for group in groups], schema=_SCHEMA)


def _row(scored: ScoredGroup) -> dict[str, Any]:
    group = scored.group
    start = len(group.prompt_token_ids)
    return {
        "problem_id": group.problem.problem_id,
        "prompt_token_ids": group.prompt_token_ids,
        "baseline": None if scored.baseline is None else _score_row(scored.baseline),
        "rollouts": [
            {
                **_completion_row(rollout.completion, rollout.score),
                "old_logprobs": None if sample.old_logprobs is None else sample.old_logprobs[start:],
                "log_kept": None if sample.log_kept is None else sample.log_kept[start:],
                "ref_logprobs": None if sample.ref_logprobs is None else sample.ref_logprobs[start:],
            }
            for rollout, sample in zip(group.rollouts, scored.samples, strict=True)
        ],
    }


def _row_in_flight(group: GroupInFlight) -> dict[str, Any]:
    return {
        "problem_id": group.problem.problem_id,
        "batch": group.batch,
        "epoch": group.epoch,
        "occurrence": group.occurrence,
        "prompt_token_ids": group.prompt_token_ids,
        "completions": [_completion_row(*pair) for pair in zip(group.completions, group.scores, strict=True)],
    }


def _completion_row(completion: Completion, score: Score | None) -> dict[str, Any]:
    return {
        "token_ids": completion.token_ids,
        "logprobs": completion.logprobs,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "policy_version": completion.policy_version,
        "score": None if score is None else _score_row(score),
    }


def _score_row(score: Score) -> dict[str, Any]:
    return {"reward": score.reward, "parts": list(score.parts.items()), "graded": score.graded}


def _from_row(row: Mapping[str, Any], problem: Problem, mask_truncated: bool) -> ScoredGroup:
    prompt = np.asarray(row["prompt_token_ids"], np.int32)
    rollouts, samples = [], []
    for found in row["rollouts"]:
        completion = _completion(found)
        rollouts.append(Rollout(completion, _score(found["score"])))
        samples.append(
            replace(
                to_sample(problem, prompt, completion, mask_truncated=mask_truncated),
                old_logprobs=_behind_prompt(found["old_logprobs"], len(prompt)),
                log_kept=_behind_prompt(found["log_kept"], len(prompt)),
                ref_logprobs=_behind_prompt(found["ref_logprobs"], len(prompt)),
            )
        )
    baseline = None if row["baseline"] is None else _score(row["baseline"])
    return ScoredGroup(RolloutGroup(problem, prompt, tuple(rollouts)), tuple(samples), baseline)


def _in_flight(row: Mapping[str, Any], index: int, problem: Problem) -> GroupInFlight:
    return GroupInFlight(
        index=index,
        problem=problem,
        batch=row["batch"],
        epoch=row["epoch"],
        occurrence=row.get("occurrence", 0),  # checkpoints of older versions have no such column
        prompt_token_ids=np.asarray(row["prompt_token_ids"], np.int32),
        completions=tuple(_completion(found) for found in row["completions"]),
        scores=tuple(None if found["score"] is None else _score(found["score"]) for found in row["completions"]),
    )


def _completion(row: Mapping[str, Any]) -> Completion:
    return Completion(
        token_ids=np.asarray(row["token_ids"], np.int32),
        logprobs=np.asarray(row["logprobs"], np.float32),
        text=row["text"],
        finish_reason=row["finish_reason"],
        policy_version=row["policy_version"],
    )


def _score(row: Mapping[str, Any]) -> Score:
    return Score(row["reward"], dict(row["parts"]), row["graded"])


def _behind_prompt(values: Sequence[float] | None, start: int) -> Floats | None:
    if values is None:
        return None
    return np.concatenate([np.zeros(start, np.float32), np.asarray(values, np.float32)])
