"""ablate: compare points around an experiment over several seeds, and report what differs by more than chance."""

from __future__ import annotations

from prefect import flow

from rlcore.ablation.results import AblationSummary
from tasks import experiments as form
from tasks.ablation.runners import cancel_points
from tasks.ablation.steps import choose_points, report_ablation, train_points
from tasks.ablation.study import describe_ablation, open_ablation, share_inputs
from tasks.open import track_run
from tasks.run import flow_run_name


@flow(name="ablate", flow_run_name=flow_run_name, on_cancellation=[cancel_points])
def ablate(
    experiment: form.Experiment,
    grid: form.Grid = None,
    points: form.Points = None,
    seeds: form.Seeds = None,
    rungs: form.Rungs = None,
    keep: form.Keep = None,
    retries: form.Retries = None,
    trunk: form.Trunk = None,
    overrides: form.Overrides = None,
    run_id: form.NewAblation = None,
) -> AblationSummary:
    """Compare, or continue the ablation called ``run_id``, which skips the points that have a result."""
    ablation = open_ablation(
        experiment, overrides, run_id, grid=grid, points=points, seeds=seeds, rungs=rungs, keep=keep, retries=retries,
        trunk=trunk,
    )  # fmt: skip
    share_inputs(ablation)
    with track_run(ablation.run):
        describe_ablation(ablation)
        names = [point.name for point in ablation.plan.points]
        for rung in range(ablation.plan.settings.rungs):
            train_points(ablation, names, rung)
            names = choose_points(ablation, names, rung)
        return report_ablation(ablation)
