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
from rlcore.training.advantages import ScoredGroup
from rlcore.types import Completion, Floats, Problem, Rollout, RolloutGroup, Score

PASS_RATES = "pass_rates.json"
BUFFER = "buffer.parquet"


@dataclass(frozen=True, slots=True)
class TrainState:
    step: int = 0  # optimizer steps taken; also the version of the weights
    problems_seen: int = 0  # of the stream: trained on, left out as without signal, or resting
    nonfinite_in_a_row: int = 0
    kl_coefficient: float | None = None  # None: the configured one
    pass_rates: PassRates = PassRates()
    buffer: tuple[ScoredGroup, ...] = ()  # groups with signal that a step had no room for

    def scalars(self) -> dict[str, Any]:
        """What fits into a line of JSON; the rest is in the files of ``save``."""
        return {
            "step": self.step,
            "problems_seen": self.problems_seen,
            "nonfinite_in_a_row": self.nonfinite_in_a_row,
            "kl_coefficient": self.kl_coefficient,
        }

    def save(self, folder: Path) -> None:
        """Write the pass rates and the buffer beside the weights."""
        (folder / PASS_RATES).write_text(self.pass_rates.to_json())
        pq.write_table(_table(self.buffer), folder / BUFFER, compression="zstd")

    @classmethod
    def load(
        cls, folder: Path, scalars: Mapping[str, Any], problems: Sequence[Problem], *, mask_truncated: bool
    ) -> Self:
        """Read what ``save`` and ``scalars`` wrote.

        Args:
            problems: of the dataset that the run trains on.

        Raises:
            CheckpointError: the buffer holds a problem that the dataset does not.
        """
        by_id = {problem.problem_id: problem for problem in problems}
        rows = pq.read_table(folder / BUFFER).to_pylist()
        missing = sorted({row["problem_id"] for row in rows} - by_id.keys())
        if missing:
            raise CheckpointError(
                f"{folder / BUFFER} holds completions of {len(missing)} problems that the dataset lacks, such as "
                f"{missing[0]!r}. Continue the run with the dataset that it was started with."
            )
        return cls(
            **scalars,
            pass_rates=PassRates.from_json((folder / PASS_RATES).read_text()),
            buffer=tuple(_from_row(row, by_id[row["problem_id"]], mask_truncated) for row in rows),
        )


_SCORE = pa.struct([("reward", pa.float64()), ("parts", pa.map_(pa.string(), pa.float64())), ("graded", pa.bool_())])
_ROLLOUT = pa.struct(
    [
        ("token_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("text", pa.string()),
        ("finish_reason", pa.string()),
        ("policy_version", pa.int64()),
        ("score", _SCORE),
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
                "token_ids": rollout.completion.token_ids,
                "logprobs": rollout.completion.logprobs,
                "text": rollout.completion.text,
                "finish_reason": rollout.completion.finish_reason,
                "policy_version": rollout.completion.policy_version,
                "score": _score_row(rollout.score),
                "old_logprobs": None if sample.old_logprobs is None else sample.old_logprobs[start:],
                "log_kept": None if sample.log_kept is None else sample.log_kept[start:],
                "ref_logprobs": None if sample.ref_logprobs is None else sample.ref_logprobs[start:],
            }
            for rollout, sample in zip(group.rollouts, scored.samples, strict=True)
        ],
    }


def _score_row(score: Score) -> dict[str, Any]:
    return {"reward": score.reward, "parts": list(score.parts.items()), "graded": score.graded}


def _from_row(row: Mapping[str, Any], problem: Problem, mask_truncated: bool) -> ScoredGroup:
    prompt = np.asarray(row["prompt_token_ids"], np.int32)
    rollouts, samples = [], []
    for found in row["rollouts"]:
        completion = Completion(
            token_ids=np.asarray(found["token_ids"], np.int32),
            logprobs=np.asarray(found["logprobs"], np.float32),
            text=found["text"],
            finish_reason=found["finish_reason"],
            policy_version=found["policy_version"],
        )
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


def _score(row: Mapping[str, Any]) -> Score:
    return Score(row["reward"], dict(row["parts"]), row["graded"])


def _behind_prompt(values: Sequence[float] | None, start: int) -> Floats | None:
    if values is None:
        return None
    return np.concatenate([np.zeros(start, np.float32), np.asarray(values, np.float32)])
