"""ablate: compare points around an experiment over several seeds. ablation-point: one run of it, up to one rung."""

from __future__ import annotations

from prefect import flow

from rlcore.ablation.plan import Job
from rlcore.ablation.results import AblationSummary, PointResult
from tasks import experiments as form
from tasks.ablation.runners import cancel_points
from tasks.ablation.steps import choose_points, open_ablation, report_ablation, train_points
from tasks.ablation.study import (
    describe_ablation,
    describe_point,
    existing_ablation,
    note_result,
    point_name,
    share_inputs,
)
from tasks.data import prepare_and_resize
from tasks.driver.jobs import end_what_is_left
from tasks.evaluate import evaluate_and_log
from tasks.models import bootstrap_policy
from tasks.open import open_run, track_run
from tasks.preflight import preflight
from tasks.run import flow_run_name
from tasks.train import train_all_segments


@flow(name="ablate", flow_run_name=flow_run_name, on_cancellation=[cancel_points])
def ablate(
    experiment: form.Experiment,
    grid: form.Grid = None,
    points: form.Points = None,
    seeds: form.Seeds = None,
    rungs: form.Rungs = None,
    keep: form.Keep = None,
    retries: form.Retries = None,
    overrides: form.Overrides = None,
    run_id: form.NewAblation = None,
) -> AblationSummary:
    """Compare, or continue the ablation called ``run_id``, which skips the points that have a result."""
    ablation = open_ablation(
        experiment, overrides, run_id, grid=grid, points=points, seeds=seeds, rungs=rungs, keep=keep, retries=retries
    )
    share_inputs(ablation)
    with track_run(ablation.run):
        describe_ablation(ablation)
        names = [point.name for point in ablation.plan.points]
        for rung in range(ablation.plan.settings.rungs):
            train_points(ablation, names, rung)
            names = choose_points(ablation, names, rung)
        return report_ablation(ablation)


@flow(name="ablation-point", flow_run_name=point_name, on_cancellation=[end_what_is_left])
def ablation_point(
    ablation: form.ExistingAblation, point: form.PointName, seed: form.PointSeed, steps: form.PointSteps
) -> PointResult:
    """Train from the last checkpoint to ``steps``, and evaluate. Started by ablate; the run is not merged."""
    study = existing_ablation(ablation)
    job = Job(study.plan.point(point), seed, steps)
    with study.note_failure(job):
        config = job.point.experiment_of(seed, steps)
        preflight(config)
        run = open_run(config, study.run_id(job))
        with track_run(run):
            train, validation = prepare_and_resize(config, "train"), prepare_and_resize(config, "validation")
            start = bootstrap_policy(config.model)
            mlflow_run_id = describe_point(study, job, run, train, validation, start)
            segments = train_all_segments(run, train, start)
            report = evaluate_and_log(run, config, segments[-1].checkpoint, start, validation)
        return note_result(study, job, run, mlflow_run_id, report)
