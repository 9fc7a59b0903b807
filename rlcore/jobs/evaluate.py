"""``python -m rlcore.jobs.evaluate spec.json``: sample problems of one or more datasets, grade and summarise."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rlcore.artifacts import CheckpointRef, EndpointRef, EvalReport, EvalReports, ModelRef
from rlcore.config import ExperimentConfig
from rlcore.evaluation.report import summarise
from rlcore.evaluation.rows import evaluate, write_rows
from rlcore.files import VERDICTS, write_json_atomically
from rlcore.jobs import job_main
from rlcore.process import making_what_stays
from rlcore.specs import EvaluateSpec, EvaluationPart
from rlcore.types import Grader, Sampler

if TYPE_CHECKING:
    from rlcore.distributed.ranks import Ranks

logger = logging.getLogger(__name__)
_TINY = Path("tiny")  # whose processor prepared an endpoint's problems


def run(spec: EvaluateSpec) -> EvalReports:
    """The job. Each part writes its rows and report when it is done, so that a repeated job need not repeat it."""
    policy = spec.policy
    if isinstance(policy, EndpointRef):
        return EvalReports(reports=tuple(_with_endpoint(spec, policy)))
    return EvalReports(reports=tuple(_with_engines(spec, policy)))


def _with_engines(spec: EvaluateSpec, policy: CheckpointRef | ModelRef) -> Iterator[EvalReport]:
    """With one sampler per device, started once."""
    with making_what_stays():
        from rlcore.distributed.group import SamplerGroup
        from rlcore.distributed.ranks import RankRange
        from rlcore.distributed.worker import RolloutWorker, evaluation_worker
        from rlcore.training.assemble import graded_samplers, make_grader

    trained = isinstance(policy, CheckpointRef)
    make = partial(evaluation_worker, checkpoint=Path(policy.path) if trained else None, version=_step(spec))
    model = Path(spec.base.path if trained and spec.base is not None else policy.path)
    config, (first, *others) = engine_experiment(spec.parts), spec.parts
    started = time.perf_counter()
    dataset, verdicts = Path(first.dataset.path), first.out_dir / VERDICTS
    with graded_samplers(config, make, model=model, dataset=dataset, verdicts=verdicts) as (ranks, grader):
        samplers = RankRange[RolloutWorker](ranks, 0, ranks.size)
        sampler = SamplerGroup(samplers, config.rollout.tensor_parallel)
        yield _evaluate(spec, first, sampler, grader, started)
        for part in others:
            started = time.perf_counter()
            _read_problems(ranks, part)
            with closing(make_grader(part.experiment, model, part.out_dir / VERDICTS)) as own:
                yield _evaluate(spec, part, sampler, own, started)


def _with_endpoint(spec: EvaluateSpec, endpoint: EndpointRef) -> Iterator[EvalReport]:
    from rlcore.data.pixels import ImageStore
    from rlcore.sampler.endpoint import EndpointSampler
    from rlcore.training.assemble import make_grader

    for part in spec.parts:
        started = time.perf_counter()
        sampler = EndpointSampler(endpoint, part.experiment, ImageStore(Path(part.dataset.path)))
        grading = make_grader(part.experiment, _TINY, part.out_dir / VERDICTS)
        with closing(sampler), closing(grading) as grader:
            yield _evaluate(spec, part, sampler, grader, started)


def engine_experiment(parts: Sequence[EvaluationPart]) -> ExperimentConfig:
    """The first part's experiment, with limits on prompts, images and videos that hold for the problems of all parts.
    Nothing replays an evaluation, so its experts are not recorded."""
    every, first = [part.experiment.data for part in parts], parts[0].experiment
    limits = {
        "max_prompt_tokens": max(part.dataset.max_prompt_tokens for part in parts),
        "max_images": max(data.max_images for data in every),
        "min_pixels": min(data.min_pixels for data in every),
        "max_pixels": max(data.max_pixels for data in every),
        "video_input": max((data.video_input for data in every), key=lambda how: how == "native"),
    }
    rollout = first.rollout.model_copy(update={"replay_routes": False})
    return first.model_copy(update={"data": first.data.model_copy(update=limits), "rollout": rollout})


def _read_problems(ranks: Ranks, part: EvaluationPart) -> None:
    dataset, data = Path(part.dataset.path), part.experiment.data
    ranks.call(lambda worker, own: worker.read_problems(*own), [(dataset, data)] * ranks.size)


def _evaluate(spec: EvaluateSpec, part: EvaluationPart, sampler: Sampler, grader: Grader, started: float) -> EvalReport:
    from rlcore.data.table import load_problems

    rows = evaluate(sampler, grader, load_problems(Path(part.dataset.path)), part.experiment.evaluation)
    table = part.out_dir / "completions.parquet"
    write_rows(rows, table)
    report = summarise(
        rows,
        policy=spec.policy.path,
        step=_step(spec),
        dataset_digest=part.dataset.digest,
        table=str(table),
        seconds=time.perf_counter() - started,
        at=time.time(),
    )
    write_json_atomically(part.out_dir / "report.json", report.model_dump_json(indent=1))
    logger.info("%s: accuracy %.3f, in %.1f s", part.dataset.source, report.accuracy, report.seconds)
    return report


def _step(spec: EvaluateSpec) -> int:
    return spec.policy.step if isinstance(spec.policy, CheckpointRef) else 0


if __name__ == "__main__":
    job_main(run, EvaluateSpec)
