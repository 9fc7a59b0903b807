"""``python -m rlcore.jobs.evaluate spec.json``: sample validation problems, grade and summarise the completions."""

from __future__ import annotations

import hashlib
import io
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from itertools import groupby
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rlcore.artifacts import CheckpointRef, EvalReport
from rlcore.config import EvaluationConfig
from rlcore.errors import RewardError
from rlcore.evaluation import bootstrap_interval
from rlcore.files import write_atomically
from rlcore.jobs import job_main
from rlcore.process import making_what_stays
from rlcore.rollout.groups import in_order
from rlcore.specs import EvaluateSpec
from rlcore.types import Completion, FinishReason, Grader, Problem, Sampler, SampleRequest, Score


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


_TYPES = {"str": pa.string(), "FinishReason": pa.string(), "int": pa.int32(), "bool": pa.bool_()}
_SCHEMA = pa.schema([(column.name, _TYPES.get(str(column.type), pa.float64())) for column in fields(EvalRow)])


def run(spec: EvaluateSpec) -> EvalReport:
    """The job, with one sampler per device."""
    with making_what_stays():
        from rlcore.data.table import load_problems
        from rlcore.distributed.group import SamplerGroup
        from rlcore.distributed.ranks import RankRange
        from rlcore.distributed.worker import RolloutWorker, evaluation_worker
        from rlcore.training.assemble import graded_samplers

    started = time.perf_counter()
    settings = spec.experiment.evaluation
    trained = isinstance(spec.policy, CheckpointRef)
    step = spec.policy.step if isinstance(spec.policy, CheckpointRef) else 0
    make = partial(
        evaluation_worker,
        checkpoint=Path(spec.policy.path) if trained else None,
        version=step,
        temperature=settings.temperature,
        top_p=settings.top_p,
    )
    dataset = Path(spec.dataset.path)
    model = Path(spec.base.path if trained else spec.policy.path)
    with graded_samplers(spec.experiment, make, model=model, dataset=dataset) as (ranks, grader):
        samplers = RankRange[RolloutWorker](ranks, 0, ranks.size)
        sampler = SamplerGroup(samplers, spec.experiment.rollout.tensor_parallel)
        rows = evaluate(sampler, grader, load_problems(dataset), settings)
    table = spec.out_dir / "completions.parquet"
    write_rows(rows, table)
    return summarise(
        rows,
        policy=spec.policy.path,
        step=step,
        dataset_digest=spec.dataset.digest,
        table=str(table),
        seconds=time.perf_counter() - started,
        at=time.time(),
    )


def evaluate(sampler: Sampler, grader: Grader, problems: Sequence[Problem], config: EvaluationConfig) -> list[EvalRow]:
    """``config.samples`` completions of each of the first ``config.problems`` problems, graded.

    Rows are ordered by problem, then by sample. Temperature and top-p are the sampler's.

    Raises:
        RewardError: the reward has no part called accuracy.
    """
    chosen = problems[: config.problems]
    pairs = [(problem, sample) for problem in chosen for sample in range(config.samples)]
    # One request per sample, so that sample i of a problem does not depend on ``config.samples``.
    requests = [SampleRequest(p, 1, sample_seed(config.seed, p.problem_id, sample)) for p, sample in pairs]
    completions = [group.completions[0] for group in in_order(sampler.generate(requests))]
    scores = grader.submit([problem for problem, _ in pairs], completions).result()
    return [
        _row(problem, sample, completion, score)
        for (problem, sample), completion, score in zip(pairs, completions, scores, strict=True)
    ]


def sample_seed(seed: int, problem_id: str, sample: int) -> int:
    """31 bits of a hash of (evaluation seed, problem, sample), so it does not depend on what else is sampled."""
    digest = hashlib.blake2b(f"{seed}\n{sample}\n{problem_id}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def summarise(
    rows: Sequence[EvalRow], *, policy: str, step: int, dataset_digest: str, table: str, seconds: float, at: float
) -> EvalReport:
    """Means over problems with 95 % bootstrap intervals over problems.

    An ungraded completion does not count as right, so ``accuracy`` is a lower bound and ``accuracy + ungraded`` an
    upper one.

    Args:
        rows: as ``evaluate`` returns them, problem by problem.
        table: path of the written rows.
        at: time of the evaluation, seconds since the epoch.

    Raises:
        ValueError: no rows, or problems with different numbers of samples.
    """
    groups = [list(group) for _, group in groupby(rows, key=lambda row: row.problem_id)]
    sizes = sorted({len(group) for group in groups})
    if len(sizes) != 1:
        raise ValueError(f"every problem must have the same number of samples, found {sizes or 'no rows'}.")
    accuracy = [float(np.mean([row.accuracy or 0.0 for row in group])) for group in groups]
    reward = [float(np.mean([row.reward for row in group])) for group in groups]
    accuracy_low, accuracy_high = bootstrap_interval(accuracy)
    reward_low, reward_high = bootstrap_interval(reward)
    return EvalReport(
        policy=policy,
        step=step,
        dataset_digest=dataset_digest,
        num_problems=len(groups),
        samples_per_problem=sizes[0],
        accuracy=float(np.mean(accuracy)),
        accuracy_low=accuracy_low,
        accuracy_high=accuracy_high,
        reward=float(np.mean(reward)),
        reward_low=reward_low,
        reward_high=reward_high,
        truncated=float(np.mean([row.finish_reason == "length" for row in rows])),
        ungraded=float(np.mean([not row.graded for row in rows])),
        table=table,
        seconds=seconds,
        at=at,
    )


def _row(problem: Problem, sample: int, completion: Completion, score: Score) -> EvalRow:
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


if __name__ == "__main__":
    job_main(run, EvaluateSpec)
