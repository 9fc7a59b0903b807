"""ablation-point: one run of an ablation, up to one rung. Started by ablate; merged later, if it is the one wanted."""

from __future__ import annotations

from prefect import flow

from rlcore.ablation.plan import Job
from rlcore.ablation.results import PointResult
from tasks import parameters as form
from tasks.ablation.study import describe_point, existing_ablation, point_name
from tasks.data import prepare_and_resize
from tasks.describe import tracked
from tasks.driver.jobs import end_what_is_left
from tasks.evaluate import evaluate_and_log
from tasks.models import bootstrapped
from tasks.open import open_run
from tasks.preflight import preflight
from tasks.train import train_all_segments


@flow(name="ablation-point", flow_run_name=point_name, on_cancellation=[end_what_is_left])
def ablation_point(
    ablation: form.ExistingAblation, point: form.PointName, seed: form.PointSeed, steps: form.PointSteps
) -> PointResult:
    """Train to ``steps``, or go on to there, and evaluate."""
    study = existing_ablation(ablation)
    job = Job(study.plan.point(point), seed, steps)
    with study.noted_failure(job):
        config = job.point.experiment_of(seed, steps)
        preflight(config)
        run = open_run(config, study.run_id(job))
        with tracked(run):
            train = prepare_and_resize(config, "train")
            validation = prepare_and_resize(config, "validation")
            start = bootstrapped(config.model)
            mlflow_run_id = describe_point(study, job, run, train, validation, start)
            segments = train_all_segments(run, train, start)
            report = evaluate_and_log(run, config, segments[-1].checkpoint, start, validation)
        return study.note(job, run, mlflow_run_id, report)
