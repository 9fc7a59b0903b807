"""ablation-point: train and evaluate one point of an ablation, up to one rung. Started by ablate."""

from __future__ import annotations

from prefect import flow

from rlcore.ablation.plan import Job
from rlcore.ablation.results import PointResult
from tasks import experiments as form
from tasks.ablation.study import describe_point, existing_ablation, note_result, open_point, point_name
from tasks.data import prepare_and_resize
from tasks.driver.jobs import end_what_is_left
from tasks.evaluate import evaluate_and_log, log_validation
from tasks.models import bootstrap_policy, bootstrap_teacher, check_model
from tasks.open import track_run
from tasks.preflight import preflight
from tasks.train import train_all_segments


@flow(name="ablation-point", flow_run_name=point_name, on_cancellation=[end_what_is_left])
def ablation_point(
    ablation: form.ExistingAblation, point: form.PointName, seed: form.PointSeed, steps: form.PointSteps
) -> PointResult:
    """Train from the last checkpoint to ``steps``, and evaluate. The run is not merged."""
    study = existing_ablation(ablation)
    job = Job(study.plan.point(point), seed, steps)
    with study.note_failure(job):
        config = job.point.experiment_of(seed, steps)
        preflight(config)
        run = open_point(study, job, config)
        with track_run(run):
            train, validation = prepare_and_resize(config, "train"), prepare_and_resize(config, "validation")
            start = bootstrap_policy(config.model)
            teacher = bootstrap_teacher(config, start) if config.algorithm.teacher else None
            check_model(config, start)
            mlflow_run_id = describe_point(study, job, run, train, validation, start, teacher)
            segments = train_all_segments(run, train, start, validation, teacher)
            log_validation(run, segments)
            report = evaluate_and_log(run, config, segments[-1].checkpoint, start, validation)
        return note_result(study, job, run, mlflow_run_id, report)
