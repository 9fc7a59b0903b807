"""evaluate: the newest whole checkpoint of a run on the validation problems."""

from __future__ import annotations

from prefect import flow

from infra.settings import Settings
from rlcore.artifacts import EvalReport
from rlcore.config import ExperimentConfig, build_experiment
from tasks import foreground
from tasks.data import prepare_and_resize
from tasks.evaluation import evaluate_and_log
from tasks.models import bootstrapped
from tasks.runs import existing_run, newest_checkpoint, tracker_of


@flow(name="evaluate", flow_run_name="evaluate-{run_id}")
def evaluate_run(experiment: ExperimentConfig, run_id: str, overrides: list[str] | None = None) -> EvalReport:
    """Data and evaluation come from ``experiment``, everything else from the run's own."""
    wanted = build_experiment(experiment.model_dump(mode="json"), overrides or [])
    run = existing_run(run_id, Settings())
    base = bootstrapped(run.experiment.model)
    suite = run.experiment.model_copy(update={"data": wanted.data, "evaluation": wanted.evaluation})
    validation = prepare_and_resize(suite, "validation")
    tracker = tracker_of(run, Settings())
    return evaluate_and_log(suite, newest_checkpoint(run), base, validation, tracker)


if __name__ == "__main__":
    foreground.main(evaluate_run, command="flows.evaluate")
