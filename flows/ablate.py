"""ablate: points around an experiment, each with several seeds, and what differs by more than chance."""

from __future__ import annotations

from prefect import flow

from rlcore.ablation.results import AblationSummary
from tasks import parameters as form
from tasks.ablation.runners import cancel_points
from tasks.ablation.steps import choose_points, report_ablation, train_points
from tasks.ablation.study import ablation_name, describe_parent, open_ablation, share_inputs
from tasks.describe import tracked


@flow(name="ablate", flow_run_name=ablation_name, on_cancellation=[cancel_points])
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
    """Compare, or continue the ablation called ``run_id``: what is done is not done again."""
    ablation = open_ablation(
        experiment, overrides, run_id, grid=grid, points=points, seeds=seeds, rungs=rungs, keep=keep, retries=retries
    )
    share_inputs(ablation)
    with tracked(ablation.run):
        describe_parent(ablation)
        names = [point.name for point in ablation.plan.points]
        for rung in range(ablation.plan.settings.rungs):
            train_points(ablation, names, rung)
            names = choose_points(ablation, names, rung)
        return report_ablation(ablation)
