"""An ablation on disk: its plan, results and failures. These files decide, never Prefect's state."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from prefect.context import FlowRunContext
from pydantic import ValidationError

from infra.logs import redact
from infra.settings import Settings
from rlcore.ablation.plan import AblationPlan, Build, Job, Point, make_plan, most_steps
from rlcore.ablation.results import PointFailure, PointResult
from rlcore.artifacts import DatasetRef, EvalReport, ModelRef
from rlcore.config import AblationConfig, ExperimentConfig, build_experiment
from rlcore.errors import ConfigError
from rlcore.failures import policy_of
from rlcore.files import write_json_atomically
from tasks.data import prepare_and_resize
from tasks.driver.failures import failure_of
from tasks.experiments import load_experiment
from tasks.fork import checkpoint_at, fork_run
from tasks.models import bootstrap_policy, bootstrap_teacher, check_model
from tasks.open import describe_run, open_run
from tasks.retries import step
from tasks.run import ABLATION_ID, Run, existing_run, flow_run_name, new_run_id, note_driver, tracker_of

MESSAGE_CHARACTERS = 2000


@dataclass(frozen=True, slots=True)
class Ablation:
    """A plan and its folder."""

    plan: AblationPlan
    folder: Path

    @property
    def run(self) -> Run:
        """The parent of all runs in MLflow; its folder is the ablation's."""
        return Run(run_id=self.plan.ablation_id, run_dir=self.folder, experiment=self.plan.points[0].experiment)

    @property
    def trunk(self) -> Run | None:
        """The run of which all points are forks."""
        return trunk_of(self.plan.settings)

    def run_id(self, job: Job) -> str:
        return self.plan.run_id(job.point, job.seed)

    def result(self, job: Job) -> PointResult | None:
        path = self.file(job, "json")
        return PointResult.model_validate_json(path.read_text()) if path.exists() else None

    def failure(self, job: Job) -> PointFailure | None:
        path = self.file(job, "failed.json")
        return PointFailure.model_validate_json(path.read_text()) if path.exists() else None

    def results(self) -> list[PointResult]:
        paths = sorted((self.folder / "results").glob("*.json"))
        return [PointResult.model_validate_json(p.read_text()) for p in paths if not p.name.endswith(".failed.json")]

    def run_dirs(self, point: Point) -> list[Path]:
        """Folders of the point's runs that have started, one per seed."""
        folders = (Settings().runs_dir / self.plan.run_id(point, seed) for seed in self.plan.settings.seeds)
        return [folder for folder in folders if folder.exists()]

    def committed_steps(self) -> int:
        """Committed steps, summed over all runs."""
        return sum(
            Run(run_id=folder.name, run_dir=folder, experiment=point.experiment).committed_step()
            for point in self.plan.points
            for folder in self.run_dirs(point)
        )

    def all_steps(self) -> int:
        """Planned steps, summed over all runs; with several rungs, the number if no point fails."""
        plan = self.plan
        if plan.settings.rungs == 1:
            return sum(job.steps for job in plan.jobs([point.name for point in plan.points], 0))
        rungs = tuple(plan.steps(plan.points[0], rung) for rung in range(plan.settings.rungs))
        return most_steps(rungs, len(plan.points), len(plan.settings.seeds), plan.settings.keep)

    @contextmanager
    def note_failure(self, job: Job) -> Iterator[None]:
        """Around one try: write its error to a file, for the waiting flow and for the table."""
        path = self.file(job, "failed.json")
        path.unlink(missing_ok=True)
        try:
            yield
        except Exception as error:
            failure = failure_of(error)
            final = failure is not None and not policy_of(failure).delays
            message = redact(str(error))[-MESSAGE_CHARACTERS:]
            noted = PointFailure(kind=type(error).__name__, message=message, final=final)
            write_json_atomically(path, noted.model_dump_json(indent=1))
            raise

    def file(self, job: Job, ending: str) -> Path:
        return self.folder / "results" / f"{job.point.name}-s{job.seed}-step-{job.steps:06d}.{ending}"


def point_name() -> str:
    """Name of a point's flow run, the same as its run's. Called by Prefect when the flow run starts."""
    context = FlowRunContext.get()
    if context is None or context.parameters is None:
        raise RuntimeError("point_name() needs a flow run: Prefect calls it when one starts")
    given = context.parameters
    plan = existing_ablation(given["ablation"]).plan
    return plan.run_id(plan.point(given["point"]), given["seed"])


@step("open-ablation")
def open_ablation(experiment: str, overrides: Sequence[str] | None, run_id: str | None, **settings: Any) -> Ablation:
    """Plan an ablation, write the plan to disk, and record this process as its driver.

    Args:
        settings: fields of ``AblationConfig``; None stands for the default.

    Raises:
        ConfigError: see ``plan_ablation``.
    """
    ablation = plan_ablation(experiment, overrides, run_id, **settings)
    if not (ablation.folder / "plan.json").exists():
        write_json_atomically(ablation.folder / "plan.json", ablation.plan.model_dump_json(indent=1))
    note_driver(ablation.run)
    return ablation


def plan_ablation(experiment: str, overrides: Sequence[str] | None, run_id: str | None, **settings: Any) -> Ablation:
    """A new ablation, or the one called ``run_id`` with the experiments that it started with. Writes nothing.

    Raises:
        ConfigError: the settings are invalid, or an ablation of this name has other settings.
        CheckpointError: the trunk has no checkpoint of its step.
    """
    try:
        wanted = AblationConfig(**{key: value for key, value in settings.items() if value is not None})
    except ValidationError as error:
        findings = [" ".join(("ablation", *map(str, item["loc"]))) + f": {item['msg']}" for item in error.errors()]
        raise ConfigError("\n".join(findings)) from None
    name = _check_name(run_id or (flow_run_name() if FlowRunContext.get() else new_run_id(experiment)))
    folder = Settings().ablations_dir / name
    request = (experiment, tuple(overrides or ()), wanted)
    if not (folder / "plan.json").exists():
        return Ablation(make_plan(name, *request, _builder(experiment, wanted)), folder)
    stored = existing_ablation(name)
    if stored.plan.request != request:
        raise ConfigError(
            f"ablation {name} was started with\n{_words(*stored.plan.request)}\nand now has\n{_words(*request)}\n"
            "Continue it with its own values, or leave the name out to start a new one."
        )
    return stored


def trunk_of(settings: AblationConfig) -> Run | None:
    """
    Raises:
        ConfigError: there is no run of this name.
    """
    return None if settings.trunk is None else existing_run(settings.trunk.rpartition("@")[0], Settings())


def _builder(experiment: str, settings: AblationConfig) -> Build:
    """What makes experiments from overrides: of the experiment called ``experiment``, or of the trunk's values."""
    trunk = trunk_of(settings)
    if trunk is None:
        return partial(load_experiment, experiment)
    if trunk.experiment.name != experiment:
        raise ConfigError(
            f"the ablation is of {experiment}, and its trunk {trunk.run_id} is a run of {trunk.experiment.name}. Name "
            "that experiment, or another run."
        )
    checkpoint_at(trunk, settings.trunk_step)
    return partial(build_experiment, trunk.experiment.model_dump(mode="json"))


def existing_ablation(name: str) -> Ablation:
    """
    Raises:
        ConfigError: there is no ablation of this name.
    """
    settings = Settings()
    path = settings.ablations_dir / _check_name(name) / "plan.json"
    if not path.exists():
        known = sorted(found.parent.name for found in settings.ablations_dir.glob("*/plan.json"))
        raise ConfigError(f"no ablation {name!r} under {settings.ablations_dir}. Found: {', '.join(known) or 'none'}.")
    return Ablation(AblationPlan.model_validate_json(path.read_text()), path.parent)


def _check_name(name: str) -> str:
    """Refuse a name that could lead out of the folder of ablations."""
    if not re.fullmatch(ABLATION_ID, name):
        raise ConfigError(
            f"{name!r} cannot be the name of an ablation. Allowed are up to 80 lower-case letters, digits and dashes; "
            "the first must be a letter or a digit."
        )
    return name


def _words(experiment: str, overrides: Sequence[str], settings: AblationConfig) -> str:
    return f"  {experiment} {' '.join(overrides)} {settings.model_dump_json(exclude_defaults=True)}"


def share_inputs(ablation: Ablation) -> None:
    """Prepare the datasets and policies of all points once, and check the policies, before the points start in
    parallel."""
    distinct = {
        (
            *(part.model_dump_json() for part in (point.experiment.data, point.experiment.model)),
            str(point.experiment.algorithm.teacher),
        ): point.experiment
        for point in ablation.plan.points
    }
    for experiment in distinct.values():
        prepare_and_resize(experiment, "train")
        prepare_and_resize(experiment, "validation")
        start = bootstrap_policy(experiment.model)
        if experiment.algorithm.teacher is not None:
            bootstrap_teacher(experiment, start)
        check_model(experiment, start)


def describe_point(
    ablation: Ablation,
    job: Job,
    run: Run,
    train: DatasetRef,
    validation: DatasetRef,
    start: ModelRef,
    teacher: ModelRef | None = None,
) -> str:
    """Describe the run in MLflow, below the ablation's run. Returns the MLflow run's id.

    Parameters in MLflow cannot change, so the logged number of steps is the one after the last rung.
    """
    place_below(ablation, job, run)
    whole = run.model_copy(update={"experiment": job.point.experiment_of(job.seed)})
    return describe_run(whole, train, validation, start, teacher)


def open_point(ablation: Ablation, job: Job, experiment: ExperimentConfig) -> Run:
    """The run of a job. If the ablation has a trunk, a new run is a fork of it.

    Raises:
        CheckpointError: the trunk's checkpoint is gone.
    """
    trunk, run_id = ablation.trunk, ablation.run_id(job)
    if trunk is not None:
        fork_run(trunk, ablation.plan.settings.trunk_step, run_id, Settings())
    return open_run(experiment, run_id, allow_changes=trunk is not None)


@step("place-below-ablation")
def place_below(ablation: Ablation, job: Job, run: Run) -> None:
    """Mark the run as a point of the ablation, in its folder and in MLflow. Safe to repeat."""
    write_json_atomically(run.ablation_marker, ablation.plan.ablation_id)
    tracker = tracker_of(run, Settings())
    tracker.rename(f"{job.point.label}, seed {job.seed}")
    tracker.set_tags(
        {
            **tracker_of(ablation.run, Settings()).as_parent(),
            "rlflow.ablation": ablation.plan.ablation_id,
            "rlflow.ablation_point": job.point.label,
            "rlflow.ablation_seed": str(job.seed),
            "rlflow.ablation_status": "running",
        }
    )


@step("describe-ablation")
def describe_ablation(ablation: Ablation) -> None:
    """Log the plan as parameters and tags of the parent run. Safe to repeat."""
    plan, tracker = ablation.plan, tracker_of(ablation.run, Settings())
    settings = plan.settings.model_dump(mode="json")
    tracker.log_params({f"ablation.{key}": value for key, value in settings.items()} | {
        "ablation.experiment": plan.experiment,
        "ablation.overrides": " ".join(plan.overrides),
    })  # fmt: skip
    tracker.set_tags({"rlflow.ablation": plan.ablation_id, "rlflow.ablation_point": "(all)"})
    tracker.log_text(plan.model_dump_json(indent=1), "ablation/plan.json")


@step("mark-point", task_run_name="mark-{status}")
def mark_point(ablation: Ablation, job: Job, status: str) -> None:
    """Set the status tag of a point's run in MLflow: finished, dropped or failed."""
    folder = Settings().runs_dir / ablation.run_id(job)
    if (folder / "mlflow.json").exists():
        run = Run(run_id=folder.name, run_dir=folder, experiment=job.point.experiment)
        tracker_of(run, Settings()).set_tags({"rlflow.ablation_status": status})


@step("note-result")
def note_result(ablation: Ablation, job: Job, run: Run, mlflow_run_id: str, report: EvalReport) -> PointResult:
    """Write the result of a job to its file, where the ablation looks for it. Safe to repeat."""
    result = PointResult(
        point=job.point.name,
        seed=job.seed,
        steps=job.steps,
        run_id=run.run_id,
        mlflow_run_id=mlflow_run_id,
        report=report,
    )
    write_json_atomically(ablation.file(job, "json"), result.model_dump_json(indent=1))
    return result
