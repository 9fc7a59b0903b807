"""Evaluate a run, a model folder or an endpoint on benchmark suites."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from prefect import runtime
from prefect.artifacts import create_markdown_artifact
from pydantic import BaseModel, ConfigDict

from infra.logs import get_logger
from infra.settings import Settings
from infra.tracking.tracker import Tracker
from rlcore.artifacts import CheckpointRef, DatasetRef, EndpointRef, EvalReport, ModelRef, SuiteReport, SuiteReports
from rlcore.config import ExperimentConfig, build_experiment
from rlcore.config.build import refuse_secret
from rlcore.data.contamination import read_pairs
from rlcore.errors import ConfigError
from rlcore.evaluation.report import clean_metrics, metrics_of, whole_and_clean
from rlcore.evaluation.rows import read_rows
from rlcore.evaluation.suites import suites_called
from tasks.data import duplicates_between
from tasks.driver.outbox import prefect_outage_named
from tasks.evaluate import CODE, evaluate_parts, evaluation_content
from tasks.lineage import read_origins
from tasks.models import bootstrap_policy
from tasks.open import find_checkpoint, find_run
from tasks.retries import step
from tasks.run import Run, existing_run, tracker_of
from tasks.store.made import content_key

MLFLOW_EXPERIMENT = "suites"  # of models that are no run
KEY_VARIABLE = "OPENAI_API_KEY"
CONCURRENCY = 16
_MORE_THAN_ANY_PROMPT = 1_000_000  # tokens; an endpoint has its own limit


class SuiteOptions(BaseModel):
    """What ``rlflow evaluate MODEL --suite`` was asked for."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str  # a run, a folder or Hugging Face id, or the address of an endpoint
    suites: tuple[str, ...]  # names of suites and groups
    served_name: str | None = None  # of the model behind an endpoint
    key_variable: str = KEY_VARIABLE
    concurrency: int = CONCURRENCY
    problems: int | None = None  # of each suite; None: all
    data: str | None = None  # folder with local copies; None: the hub
    overrides: tuple[str, ...] = ()


class Policy(BaseModel):
    """What is evaluated."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    policy: CheckpointRef | ModelRef | EndpointRef
    base: ModelRef | None  # None: an endpoint
    run: Run | None  # None: of no run


def base_experiment(options: SuiteOptions, settings: Settings) -> ExperimentConfig:
    """The settings around those of the suites: the run's own, or the defaults.

    Raises:
        ConfigError: no such run, or an address without the name of a model.
    """
    if _is_run(options.model):
        return existing_run(options.model, settings).experiment
    _endpoint(options)  # raises
    path = "tiny" if _is_endpoint(options.model) else options.model
    values = {"name": MLFLOW_EXPERIMENT, "model": {"path": path}}
    return build_experiment(values, [text for text in options.overrides if text.startswith("model.")])


def suite_experiments(options: SuiteOptions, base: ExperimentConfig) -> dict[str, ExperimentConfig]:
    """The experiment that evaluates each suite, by the suite's name.

    Raises:
        ConfigError: no such suite, no copy of one, or an override that breaks a rule.
    """
    overrides = list(options.overrides)
    if _is_endpoint(options.model):
        overrides.append(f"data.max_prompt_tokens={_MORE_THAN_ANY_PROMPT}")
    return {
        suite.name: suite.experiment(base, folder=options.data, problems=options.problems, overrides=overrides)
        for suite in suites_called(options.suites)
    }


def find_policy(options: SuiteOptions, base: ExperimentConfig) -> Policy:
    """The newest checkpoint of a run, a model's folder, or an endpoint."""
    if _is_run(options.model):
        run = find_run(options.model)
        start = bootstrap_policy(run.experiment.model)
        return Policy(name=run.run_id, policy=find_checkpoint(run), base=start, run=run)
    endpoint = _endpoint(options)
    if endpoint is not None:
        host = urlsplit(endpoint.url).netloc
        return Policy(name=_slug(f"{endpoint.model}-{host}"), policy=endpoint, base=None, run=None)
    model = bootstrap_policy(base.model)
    name = _slug(f"{Path(options.model).name}-{model.digest[:8]}")
    return Policy(name=name, policy=model, base=model, run=None)


def _is_endpoint(model: str) -> bool:
    return model.startswith(("http://", "https://"))


def _is_run(model: str) -> bool:
    """A folder or an id has a slash; the name of a run has none."""
    return "/" not in model


def _endpoint(options: SuiteOptions) -> EndpointRef | None:
    if not _is_endpoint(options.model):
        if options.served_name is not None:
            raise ConfigError(
                f"--model names the model behind an address, and {options.model!r} is none. Leave it out, or give "
                "http://HOST:PORT/v1 as MODEL."
            )
        return None
    refuse_secret("the endpoint's address", options.model)
    if options.served_name is None:
        raise ConfigError(f"{options.model} may serve several models. Name one with --model, as the server calls it.")
    return EndpointRef(
        url=options.model.rstrip("/"),
        model=options.served_name,
        key_variable=options.key_variable,
        concurrency=options.concurrency,
    )


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")[:120]


@step("evaluate-suites", others=(10,), timeout_seconds=48 * 3600)
def evaluate_on(
    policy: Policy, experiments: Mapping[str, ExperimentConfig], datasets: Mapping[str, DatasetRef]
) -> SuiteReports:
    """Evaluate on every suite, with one start of the engines."""
    parts = {
        _key(policy, experiment, datasets[name]): (experiment, datasets[name])
        for name, experiment in experiments.items()
    }
    reports = evaluate_parts(parts, policy.policy, policy.base)
    return SuiteReports(
        model=policy.policy.path,
        suites=tuple(
            SuiteReport(
                suite=name,
                report=report,
                set_aside=datasets[name].num_rejected,
                clean=clean_part(policy.run, datasets[name], report),
            )
            for name, report in zip(experiments, reports, strict=True)
        ),
    )


def clean_part(run: Run | None, dataset: DatasetRef, report: EvalReport) -> dict[str, float]:
    """The numbers of the suite's problems that the run's training data lacks. Empty: no run, it does not want to know,
    or its training data is not on this machine."""
    if run is None or not run.experiment.evaluation.find_duplicates:
        return {}
    trains = [origin.train for origin in read_origins(run.run_dir)]
    if not trains or not Path(trains[-1].path).is_dir():
        return {}
    pairs = read_pairs(Path(duplicates_between(trains[-1], dataset).path))
    parts = whole_and_clean(read_rows(Path(report.table)), {pair.evaluation_id for pair in pairs})
    return clean_metrics(parts.get("clean"))


def _key(policy: Policy, experiment: ExperimentConfig, dataset: DatasetRef) -> str:
    which = policy.policy
    if isinstance(which, EndpointRef):
        # Nobody knows which weights answer, so only a retry of this flow run finds the numbers again.
        stand_in = ModelRef(path="", digest=f"{which.path} {runtime.flow_run.id}", source="", num_parameters=0)
        return content_key("evaluate", evaluation_content(experiment, stand_in, stand_in, dataset), *CODE)
    assert policy.base is not None
    return content_key("evaluate", evaluation_content(experiment, which, policy.base, dataset), *CODE)


@step("log-suites")
def log_suites(policy: Policy, reports: SuiteReports) -> None:
    """Log numbers, tables of rows and the table of suites to MLflow, and show the latter in Prefect. Safe to repeat.

    A run's numbers go to its own MLflow run, those of other models to a run of the MLflow experiment ``suites``.
    """
    settings = Settings()
    if policy.run is not None:
        tracker = tracker_of(policy.run, settings)
    else:
        tracker = Tracker.open(
            uri=settings.tracking_uri,
            artifacts_uri=settings.artifacts_uri,
            experiment=MLFLOW_EXPERIMENT,
            run_id=policy.name,
            run_dir=settings.evaluations_dir / "models" / policy.name,
        )
        tracker.set_tags({"rlflow.model": policy.policy.path})
    for item in reports.suites:
        report, where = item.report, f"eval/{item.suite}"
        tracker.log_metrics(
            {f"{where}/{name}": value for name, value in _metrics(report, item).items()},
            step=report.step,
            timestamp_ms=round(report.at * 1000),
        )
        tracker.log_file(Path(report.table), f"{where}/step-{report.step:06d}")
    text = reports.markdown()
    tracker.log_text(text, "eval/suites.md")
    if policy.run is None:
        tracker.finish("FINISHED")
    digest = hashlib.sha256(policy.name.encode()).hexdigest()[:8]
    with prefect_outage_named():
        create_markdown_artifact(text, key=f"suites-{digest}", description=policy.name)
    get_logger().info("suites: %s", text)


def _metrics(report: EvalReport, item: SuiteReport) -> dict[str, float]:
    return (
        metrics_of(report) | item.clean | {"problems": float(report.num_problems), "set_aside": float(item.set_aside)}
    )
