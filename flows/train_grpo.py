"""grpo-geo3k: from raw data to a merged, verified, registered model. The order of steps; each is a task."""

from __future__ import annotations

import time

from prefect import flow

from infra.settings import Settings
from rlcore.config import ExperimentConfig, build_experiment
from tasks import foreground
from tasks.cancelling import end_what_is_left
from tasks.data import prepare_and_resize
from tasks.evaluation import evaluate_and_log
from tasks.merging import merged, register
from tasks.models import bootstrapped
from tasks.page import RunSummary
from tasks.preflight import preflight
from tasks.reporting import report
from tasks.runs import flow_run_name, open_run, tracked
from tasks.tracking import describe_run
from tasks.training import train_all_segments


@flow(name="grpo-geo3k", flow_run_name=flow_run_name, on_cancellation=[end_what_is_left])
def grpo_geo3k(
    experiment: ExperimentConfig,
    overrides: list[str] | None = None,
    run_id: str | None = None,
    allow_changes: bool = False,
) -> RunSummary:
    """Train, or continue the run called ``run_id``; every step that is done already is found done. A retry without
    a name continues the run of its flow run. With ``allow_changes`` it may go on with other values than before."""
    started = time.monotonic()
    experiment = build_experiment(experiment.model_dump(mode="json"), overrides or [])
    preflight(experiment)
    run = open_run(experiment, run_id, Settings(), allow_changes=allow_changes)

    train = prepare_and_resize(experiment, "train")
    validation = prepare_and_resize(experiment, "validation")
    start = bootstrapped(experiment.model)
    with tracked(run) as tracker:
        describe_run(run, train, validation, start)
        before = evaluate_and_log(experiment, start, start, validation, tracker)
        segments = train_all_segments(run, train, start)
        last = segments[-1].checkpoint
        after = evaluate_and_log(experiment, last, start, validation, tracker)
        model = register(run, merged(experiment, last, start, train), last, after)
        return report(run, validation, before, after, segments, model, time.monotonic() - started)


if __name__ == "__main__":
    foreground.main(grpo_geo3k, command="flows.train_grpo", may_change=True)
