"""evaluate: the newest whole checkpoint of a run on the validation problems."""

from __future__ import annotations

from prefect import flow

from rlcore.artifacts import EvalReport
from tasks import experiments as form
from tasks.data import prepare_and_resize
from tasks.evaluate import evaluate_and_log, suite_of
from tasks.models import bootstrap_policy
from tasks.open import find_checkpoint, find_run


@flow(name="evaluate", flow_run_name="evaluate-{run_id}")
def evaluate_run(
    run_id: form.ExistingRun, experiment: form.EvaluateOn = None, overrides: form.Overrides = None
) -> EvalReport:
    """Data, reward and evaluation settings are those of ``experiment``; everything else is the run's own."""
    run = find_run(run_id)
    suite = suite_of(run, experiment, overrides)
    base = bootstrap_policy(run.experiment.model)
    validation = prepare_and_resize(suite, "validation")
    return evaluate_and_log(run, suite, find_checkpoint(run), base, validation, experiment)
