"""Evaluate a policy on the validation problems, cached by the policy's and the dataset's content."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from infra.logs import get_logger
from infra.settings import Settings
from rlcore.artifacts import CheckpointRef, DatasetRef, EndpointRef, EvalReport, EvalReports, ModelRef
from rlcore.config import ExperimentConfig, build_experiment
from rlcore.config.experiment import FREE_SETTINGS
from rlcore.errors import ConfigError, StorageError
from rlcore.evaluation.records import as_step_record, own_digests, suite_digest
from rlcore.segment.spec import SegmentManifest
from rlcore.specs import EvaluateSpec, EvaluationPart
from tasks.driver.jobs import new_result_path, run_job, tell_shortage
from tasks.experiments import load_experiment
from tasks.registered import checkpoint_model, log_metrics_of
from tasks.retries import step
from tasks.run import Run, tracker_of
from tasks.store.made import content_key, fetch, made

_REPORT = "report.json"
CODE = (
    *(
        "rlcore/jobs/evaluate.py",
        "rlcore/endpoint.py",
        "rlcore/evaluation",
        "rlcore/sampler",
        "rlcore/rollout",
        "rlcore/rewards",
    ),
    *("rlcore/models", "rlcore/families", "rlcore/data"),
)
_CONFIG = {"seed", "rollout", "data", "resources", "model"}


def suite_of(
    run: Run, benchmark: str | None, overrides: Sequence[str] | None = None, workers: int | None = None
) -> ExperimentConfig:
    """The run's experiment with data, reward and evaluation of the experiment called ``benchmark`` (None: its own), on
    ``workers`` devices (None: as many as the run)."""
    if benchmark is None:
        suite = build_experiment(run.experiment.model_dump(mode="json"), overrides or [])
    else:
        wanted = load_experiment(benchmark, overrides or [])
        parts = {"data": wanted.data, "reward": wanted.reward, "evaluation": wanted.evaluation}
        suite = run.experiment.model_copy(update=parts)
    if workers is None:
        return suite
    return suite.model_copy(update={"resources": suite.resources.model_copy(update={"workers": workers})})


def evaluation_content(
    experiment: ExperimentConfig, policy: CheckpointRef | ModelRef, base: ModelRef, dataset: DatasetRef
) -> str:
    """Everything that the numbers depend on, except code and packages."""
    which = policy.manifest_sha256 if isinstance(policy, CheckpointRef) else policy.digest
    config = experiment.model_dump(mode="json", include=_CONFIG) | {"evaluation": experiment.evaluation.suite()}
    # Without the free ones, so that a raised budget of a judge continues the evaluation that it ended.
    reward = {key: value for key, value in experiment.flat().items() if key.startswith("reward.")}
    config |= {key: value for key, value in reward.items() if not key.startswith(FREE_SETTINGS)}
    return json.dumps([which, base.digest, dataset.digest, config, own_digests(experiment)], sort_keys=True)


@step("evaluate-policy", others=(10,), timeout_seconds=12 * 3600)
def evaluate_policy(
    experiment: ExperimentConfig, policy: CheckpointRef | ModelRef, base: ModelRef, dataset: DatasetRef
) -> EvalReport:
    """pass@1 and mean reward with intervals, and a table of every completion."""
    key = content_key("evaluate", evaluation_content(experiment, policy, base, dataset), *CODE)
    (report,) = evaluate_parts({key: (experiment, dataset)}, policy, base)
    return report


def evaluate_parts(
    parts: Mapping[str, tuple[ExperimentConfig, DatasetRef]],
    policy: CheckpointRef | ModelRef | EndpointRef,
    base: ModelRef | None,
) -> list[EvalReport]:
    """The report of each part, by its key. Those that do not exist yet are made with one start of the engines."""
    settings = Settings()
    jobs = {
        key: EvaluationPart(experiment=experiment, dataset=dataset, out_dir=settings.evaluations_dir / key)
        for key, (experiment, dataset) in parts.items()
    }
    for part in jobs.values():
        fetch(part.out_dir, settings)
    missing = tuple(part for part in jobs.values() if _read_report(part.out_dir) is None)
    if missing and isinstance(policy, CheckpointRef) and not Path(policy.path).is_dir():
        raise ConfigError(
            f"the checkpoint {policy.path} was removed before it was evaluated. Evaluate a newer one, or raise "
            "segment.keep_checkpoints for the next run."
        )
    if missing:
        spec = EvaluateSpec(result=new_result_path(settings, "evaluate"), policy=policy, base=base, parts=missing)
        get_logger().info("eval: %s", policy.path)
        if not (settings.ray_address or isinstance(policy, EndpointRef)):
            first = missing[0].experiment
            tell_shortage("eval", first, first.resources.devices, settings)
        run_job("rlcore.jobs.evaluate", spec, EvalReports, settings, quiet=True)
    return [
        made(key, part.out_dir, partial(_finished_report, part.out_dir), EvalReport).model_copy(
            update={"policy": policy.path}
        )
        for key, part in jobs.items()
    ]


def _finished_report(out_dir: Path) -> EvalReport:
    report = _read_report(out_dir)
    if report is None:
        raise StorageError(f"{out_dir} lacks the report or the table of a finished evaluation. Run it again.")
    return report


def _read_report(out_dir: Path) -> EvalReport | None:
    """The report of an earlier evaluation, here or on the machine that the folder came from; None without its table."""
    if not (out_dir / _REPORT).exists():
        return None
    report = EvalReport.model_validate_json((out_dir / _REPORT).read_bytes())
    table = out_dir / Path(report.table).name
    return report.model_copy(update={"table": str(table)}) if table.exists() else None


def evaluate_and_log(
    run: Run,
    experiment: ExperimentConfig,
    policy: CheckpointRef | ModelRef,
    base: ModelRef,
    dataset: DatasetRef,
    benchmark: str | None = None,
) -> EvalReport:
    """Evaluate, and log the numbers to the run at the policy's step, under the name of ``benchmark`` if given. What the
    run's trainer has evaluated in the same way is not evaluated again."""
    known = evaluation_while_training(run, experiment, policy, base, dataset)
    report = known or evaluate_policy(experiment, policy, base, dataset)
    if benchmark or known is None:  # the trainer's own is published with its step
        log_evaluation(run, report, f"eval/{benchmark}" if benchmark else "eval", policy)
    return report


def evaluation_while_training(
    run: Run, experiment: ExperimentConfig, policy: CheckpointRef | ModelRef, base: ModelRef, dataset: DatasetRef
) -> EvalReport | None:
    """The report of this policy that the run's trainer made, on these problems and with these settings. None: it made
    none, or its table is gone."""
    if policy.run_id != run.run_id if isinstance(policy, CheckpointRef) else policy.digest != base.digest:
        return None
    step, suite = policy.step if isinstance(policy, CheckpointRef) else 0, suite_digest(experiment, dataset, base)
    for record in run.evaluations():
        if (record.report.step, record.suite) == (step, suite) and Path(record.report.table).exists():
            return record.report.model_copy(update={"policy": policy.path})
    return None


@step("log-validation", others=(5, 30))
def log_validation(run: Run, segments: Sequence[SegmentManifest]) -> None:
    """Log the tables of the evaluations that the trainer made, once training is over: an outage of MLflow must not stop
    it. Safe to repeat.

    Each segment's checkpoint becomes a logged model of MLflow: metadata without weights. Evaluations of that step
    belong to it.

    Their numbers are published with the steps. Those that MLflow lacks are logged here: of a step that was committed
    before its evaluation, because the trainer had to stop. The others are not logged again, because a trainer that
    repeats steps after a damaged checkpoint evaluates them at another time."""
    tracker = tracker_of(run, Settings())
    published = tracker.steps_of("eval/accuracy")
    models = {item.checkpoint.step: checkpoint_model(run, item.checkpoint, tracker) for item in segments}
    for report in (record.report for record in run.evaluations()):
        if report.step <= segments[-1].last_step:
            if report.step not in published:
                record = as_step_record(report)
                tracker.log_metrics(record.metrics, step=report.step, timestamp_ms=record.timestamp_ms)
            if report.step in models:
                log_metrics_of(tracker, report, "eval", models[report.step])
            tracker.log_file(Path(report.table), f"eval/step-{report.step:06d}")
            _tell(report)


@step("log-evaluation", task_run_name="log-evaluation-of-step-{report.step}")
def log_evaluation(run: Run, report: EvalReport, where: str, policy: CheckpointRef | ModelRef) -> None:
    """Log the numbers and the table to MLflow under ``where``, the numbers as those of the policy's logged model. Safe
    to repeat."""
    tracker = tracker_of(run, Settings())
    log_metrics_of(tracker, report, where, checkpoint_model(run, policy, tracker))
    tracker.log_file(Path(report.table), f"{where}/step-{report.step:06d}")
    _tell(report)


def _tell(report: EvalReport) -> None:
    get_logger().info(
        "eval: step %d: accuracy %.3f [%.3f, %.3f], reward %.3f, %d problems x %d",
        report.step,
        report.accuracy,
        report.accuracy_low,
        report.accuracy_high,
        report.reward,
        report.num_problems,
        report.samples_per_problem,
    )
