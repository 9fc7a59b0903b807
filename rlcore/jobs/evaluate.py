"""``python -m rlcore.jobs.evaluate spec.json``: sample validation problems, grade and summarise the completions."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

from rlcore.artifacts import CheckpointRef, EvalReport
from rlcore.evaluation.report import summarise
from rlcore.evaluation.rows import evaluate, write_rows
from rlcore.jobs import job_main
from rlcore.process import making_what_stays
from rlcore.rewards.verdicts import VERDICTS
from rlcore.specs import EvaluateSpec


def run(spec: EvaluateSpec) -> EvalReport:
    """The job, with one sampler per device."""
    with making_what_stays():
        from rlcore.data.table import load_problems
        from rlcore.distributed.group import SamplerGroup
        from rlcore.distributed.ranks import RankRange
        from rlcore.distributed.worker import RolloutWorker, evaluation_worker
        from rlcore.training.assemble import graded_samplers

    started = time.perf_counter()
    trained = isinstance(spec.policy, CheckpointRef)
    step = spec.policy.step if isinstance(spec.policy, CheckpointRef) else 0
    make = partial(
        evaluation_worker,
        checkpoint=Path(spec.policy.path) if trained else None,
        version=step,
    )
    dataset = Path(spec.dataset.path)
    model = Path(spec.base.path if trained else spec.policy.path)
    verdicts = spec.out_dir / VERDICTS
    with graded_samplers(spec.experiment, make, model=model, dataset=dataset, verdicts=verdicts) as (ranks, grader):
        samplers = RankRange[RolloutWorker](ranks, 0, ranks.size)
        sampler = SamplerGroup(samplers, spec.experiment.rollout.tensor_parallel)
        rows = evaluate(sampler, grader, load_problems(dataset), spec.experiment.evaluation)
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


if __name__ == "__main__":
    job_main(run, EvaluateSpec)
