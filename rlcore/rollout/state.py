"""The state of a run's rollouts, and its files in a checkpoint."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rlcore.data.mixture import MixturePosition, restored
from rlcore.data.stream import PassRates
from rlcore.errors import CheckpointError
from rlcore.rollout.groups import Group
from rlcore.types import Completion, Floats, Problem, Routes, Score, TrainingSample, Turn

PASS_RATES = "pass_rates.json"
GROUPS = "groups.parquet"


@dataclass(frozen=True, slots=True)
class RolloutState:
    problems_seen: int = 0  # taken from the stream: trained on, without signal, resting, postponed, or in ``groups``
    mixture: MixturePosition | None = None  # None: a single source, or no problem is taken yet
    postponed: tuple[int, ...] = ()  # indices of problems that the stream repeated too early for the last batch
    pass_rates: PassRates = PassRates()
    groups: tuple[Group, ...] = ()  # not trained yet: ready ones in training order, then others in stream order

    def with_pass_rates(self, groups: Iterable[Group]) -> RolloutState:
        """The state with the pass rates of newly graded ``groups``."""
        rates: defaultdict[int, dict[int, float]] = defaultdict(dict)
        for group in groups:
            graded = [rollout.score for rollout in group.rollouts if rollout.score.graded]
            if graded:
                right = sum(score.parts.get("accuracy", score.reward) >= 1 for score in graded)
                rates[group.epoch][group.index] = right / len(graded)
        pass_rates = self.pass_rates
        for epoch in sorted(rates):
            pass_rates = pass_rates.updated(rates[epoch], epoch)
        return replace(self, pass_rates=pass_rates)

    def save(self, folder: Path) -> None:
        """Write the pass rates and the groups."""
        (folder / PASS_RATES).write_text(self.pass_rates.to_json())
        if self.groups:
            table = pa.Table.from_pylist([_row(group) for group in self.groups], schema=_SCHEMA)
            pq.write_table(table, folder / GROUPS, compression="zstd")

    @classmethod
    def load(
        cls, folder: Path, scalars: Mapping[str, Any], problems: Sequence[Problem], *, mask_truncated: bool
    ) -> RolloutState:
        """Read what ``save`` wrote. Arguments and errors as ``TrainState.load``."""
        return cls(
            problems_seen=scalars["problems_seen"],
            mixture=restored(scalars.get("mixture"), problems, seen=scalars["problems_seen"]),
            postponed=tuple(scalars.get("postponed", ())),  # older checkpoints have none
            pass_rates=PassRates.from_json((folder / PASS_RATES).read_text()),
            groups=tuple(_groups(folder, scalars["step"], problems, mask_truncated)),
        )


def _groups(folder: Path, step: int, problems: Sequence[Problem], mask_truncated: bool) -> Iterable[Group]:
    """Read ``groups.parquet``, or the three files of older versions."""
    readers: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
        GROUPS: lambda row: row,
        "ahead.parquet": lambda row: _scored_row(row, str(step), surplus=False),
        "buffer.parquet": lambda row: _scored_row(row, str(row["rollouts"][0]["policy_version"]), surplus=True),
        "in_flight.parquet": _in_flight_row,
    }
    indices = {problem.problem_id: index for index, problem in enumerate(problems)}
    for name, read in readers.items():
        path = folder / name
        rows = pq.read_table(path).to_pylist() if path.exists() else []
        missing = sorted({row["problem_id"] for row in rows} - indices.keys())
        if missing:
            raise CheckpointError(
                f"{path} holds completions of {len(missing)} problems that the dataset lacks, such as {missing[0]!r}. "
                "Continue the run with the dataset that it was started with."
            )
        for row in rows:
            index = indices[row["problem_id"]]
            yield _group(read(row), index, problems[index], mask_truncated)


_SCORE = pa.struct([("reward", pa.float64()), ("parts", pa.map_(pa.string(), pa.float64())), ("graded", pa.bool_())])
_TURN = pa.struct([("token_ids", pa.list_(pa.int32())), ("logprobs", pa.list_(pa.float32())), ("given", pa.bool_())])
_ROUTES = pa.struct([("dtype", pa.string()), ("shape", pa.list_(pa.int32())), ("values", pa.large_binary())])
_COMPLETION = pa.struct(
    [
        ("turns", pa.list_(_TURN)),
        ("text", pa.string()),
        ("finish_reason", pa.string()),
        ("policy_version", pa.int64()),
        ("routes", _ROUTES),  # null: not recorded
        ("score", _SCORE),  # null until it is graded
        ("old_logprobs", pa.list_(pa.float32())),  # of the completion alone, as the next three
        ("log_kept", pa.list_(pa.float32())),
        ("ref_logprobs", pa.list_(pa.float32())),
        ("entropies", pa.list_(pa.float32())),
    ]
)
_SCHEMA = pa.schema(
    [
        ("problem_id", pa.string()),
        ("seed_key", pa.string()),
        ("epoch", pa.int64()),
        ("ready", pa.bool_()),
        ("surplus", pa.bool_()),
        ("prompt_token_ids", pa.list_(pa.int32())),
        ("baseline", _SCORE),
        ("completions", pa.list_(_COMPLETION)),
    ]
)
# Field of a sample -> column on disk, where truncation_logprobs keeps its first name.
_PER_TOKEN = {
    "old_logprobs": "old_logprobs",
    "truncation_logprobs": "log_kept",
    "ref_logprobs": "ref_logprobs",
    "entropies": "entropies",
}


def _row(group: Group) -> dict[str, Any]:
    samples = group.samples or (None,) * len(group.completions)
    return {
        "problem_id": group.problem.problem_id,
        "seed_key": group.seed_key,
        "epoch": group.epoch,
        "ready": group.state == "ready",
        "surplus": group.surplus,
        "prompt_token_ids": group.prompt_token_ids,
        "baseline": _score_row(group.baseline),
        "completions": [
            _completion_row(*parts, len(group.prompt_token_ids))
            for parts in zip(group.completions, group.scores, samples, strict=True)
        ],
    }


def _completion_row(
    completion: Completion, score: Score | None, sample: TrainingSample | None, prompt: int
) -> dict[str, Any]:
    values = {column: getattr(sample, field, None) for field, column in _PER_TOKEN.items()}
    return {
        "turns": [{"token_ids": t.token_ids, "logprobs": t.logprobs, "given": t.given} for t in completion.turns],
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "policy_version": completion.policy_version,
        "routes": _routes_row(completion.routes),
        "score": _score_row(score),
        **{column: None if row is None else row[prompt:] for column, row in values.items()},
    }


def _routes_row(routes: Routes | None) -> dict[str, Any] | None:
    return routes if routes is None else {"dtype": routes.dtype.name, "shape": routes.shape, "values": routes.tobytes()}


def _score_row(score: Score | None) -> dict[str, Any] | None:
    if score is None:
        return None
    return {"reward": score.reward, "parts": list(score.parts.items()), "graded": score.graded}


def _group(row: Mapping[str, Any], index: int, problem: Problem, mask_truncated: bool) -> Group:
    prompt, completions = np.asarray(row["prompt_token_ids"], np.int32), row["completions"]
    group = Group(
        index=index,
        problem=problem,
        seed_key=row["seed_key"],
        epoch=row["epoch"],
        prompt_token_ids=prompt,
        completions=tuple(_completion(completion) for completion in completions),
        scores=tuple(_score(completion["score"]) for completion in completions),
        baseline=_score(row["baseline"]),
        surplus=row["surplus"],
    )
    if not row["ready"]:
        return group
    admitted = group.admitted(mask_truncated=mask_truncated)
    samples = []
    for sample, completion in zip(admitted.samples, completions, strict=True):
        # files of older versions have no entropies
        rows = (_after_prompt(completion.get(column), len(prompt)) for column in _PER_TOKEN.values())
        old, kept, ref, entropies = rows
        samples.append(
            replace(sample, old_logprobs=old, truncation_logprobs=kept, ref_logprobs=ref, entropies=entropies)
        )
    return replace(admitted, samples=tuple(samples))


def _completion(row: Mapping[str, Any]) -> Completion:
    turns = [
        Turn(np.asarray(turn["token_ids"], np.int32), np.asarray(turn["logprobs"], np.float32), turn["given"])
        for turn in row["turns"]
    ]
    routes = _routes(row.get("routes"))  # files of older versions have none
    return Completion(tuple(turns), row["text"], row["finish_reason"], row["policy_version"], routes)


def _routes(row: Mapping[str, Any] | None) -> Routes | None:
    return None if row is None else np.frombuffer(row["values"], row["dtype"]).reshape(row["shape"])


def _score(row: Mapping[str, Any] | None) -> Score | None:
    return None if row is None else Score(row["reward"], dict(row["parts"]), row["graded"])


def _after_prompt(values: Sequence[float] | None, prompt: int) -> Floats | None:
    return None if values is None else np.asarray([*[0.0] * prompt, *values], np.float32)


def _scored_row(row: dict[str, Any], seed_key: str, *, surplus: bool) -> dict[str, Any]:
    """A row of an older version's surplus buffer or prefetched batch, whose groups are ready."""
    completions = [_one_turn(completion) for completion in row["rollouts"]]
    return {**row, "seed_key": seed_key, "epoch": 0, "ready": True, "surplus": surplus, "completions": completions}


def _in_flight_row(row: dict[str, Any]) -> dict[str, Any]:
    """A row of an older version's unfinished groups."""
    occurrence = row.get("occurrence", 0)
    seed_key = f"{row['batch']}#{occurrence}" if occurrence else str(row["batch"])
    completions = [_one_turn({**dict.fromkeys(_PER_TOKEN.values()), **completion}) for completion in row["completions"]]
    own = {"seed_key": seed_key, "ready": False, "surplus": False, "baseline": None}
    return {**row, **own, "completions": completions}


def _one_turn(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "turns": [{"token_ids": row["token_ids"], "logprobs": row["logprobs"], "given": False}]}
