"""evaluate: the newest whole checkpoint of a run on validation problems. evaluate-suites: any model on benchmarks."""

from __future__ import annotations

from prefect import flow

from infra.settings import Settings
from rlcore.artifacts import EvalReport, SuiteReports
from tasks import experiments as form
from tasks.data import prepare_and_resize
from tasks.evaluate import evaluate_and_log, suite_of
from tasks.models import bootstrap_policy
from tasks.open import find_checkpoint, find_run
from tasks.suites import (
    CONCURRENCY,
    KEY_VARIABLE,
    SuiteOptions,
    base_experiment,
    evaluate_on,
    find_policy,
    log_suites,
    suite_experiments,
)


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


@flow(name="evaluate-suites", flow_run_name="suites-{model}")
def evaluate_suites(
    model: form.EvaluatedModel,
    suites: form.Suites,
    problems: form.ProblemsOfSuite = None,
    data: form.SuiteData = None,
    served_name: form.ServedName = None,
    key_variable: form.KeyVariable = KEY_VARIABLE,
    concurrency: form.Concurrency = CONCURRENCY,
    overrides: form.Overrides = None,
) -> SuiteReports:
    """All suites with one start of the engines. The numbers go to MLflow."""
    options = SuiteOptions(
        model=model, suites=tuple(suites), problems=problems, data=data, served_name=served_name,
        key_variable=key_variable, concurrency=concurrency, overrides=tuple(overrides or ()))  # fmt: skip
    base = base_experiment(options, Settings())
    experiments = suite_experiments(options, base)
    policy = find_policy(options, base)
    datasets = {name: prepare_and_resize(experiment, "validation") for name, experiment in experiments.items()}
    reports = evaluate_on(policy, experiments, datasets)
    log_suites(policy, reports)
    return reports
