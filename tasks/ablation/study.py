"""An ablation on disk: its plan, what each run has reached, and why one failed. What counts is these files, never
Prefect's state."""

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
from rlcore.ablation.halving import most_steps
from rlcore.ablation.plan import AblationPlan, Job, Point, make_plan
from rlcore.ablation.results import PointFailure, PointResult
from rlcore.artifacts import DatasetRef, EvalReport, ModelRef
from rlcore.config import AblationConfig
from rlcore.errors import ConfigError
from rlcore.failures import policy_of
from rlcore.files import write_json_atomically
from tasks.data import prepare_and_resize
from tasks.describe import describe_run
from tasks.driver.failures import failure_of
from tasks.experiments import load_experiment
from tasks.models import bootstrapped
from tasks.retries import step
from tasks.run import ABLATION_ID, Run, new_run_id, note_driver, tracker_of

MESSAGE_CHARACTERS = 2000


@dataclass(frozen=True, slots=True)
class Ablation:
    """A plan and its folder."""

    plan: AblationPlan
    folder: Path

    @property
    def run(self) -> Run:
        """The parent of all runs in MLflow, with the ablation's folder as its own."""
        return Run(run_id=self.plan.ablation_id, run_dir=self.folder, experiment=self.plan.points[0].experiment)

    def run_id(self, job: Job) -> str:
        return self.plan.run_id(job.point, job.seed)

    def result(self, job: Job) -> PointResult | None:
        path = self._file(job, "json")
        return PointResult.model_validate_json(path.read_text()) if path.exists() else None

    def failure(self, job: Job) -> PointFailure | None:
        path = self._file(job, "failed.json")
        return PointFailure.model_validate_json(path.read_text()) if path.exists() else None

    def results(self) -> list[PointResult]:
        paths = sorted((self.folder / "results").glob("*.json"))
        return [PointResult.model_validate_json(p.read_text()) for p in paths if not p.name.endswith(".failed.json")]

    def note(self, job: Job, run: Run, mlflow_run_id: str, report: EvalReport) -> PointResult:
        found = PointResult(
            point=job.point.name,
            seed=job.seed,
            steps=job.steps,
            run_id=run.run_id,
            mlflow_run_id=mlflow_run_id,
            report=report,
        )
        write_json_atomically(self._file(job, "json"), found.model_dump_json(indent=1))
        return found

    def run_dirs(self, point: Point) -> list[Path]:
        """Of its seeds, as far as they have begun."""
        folders = (Settings().runs_dir / self.plan.run_id(point, seed) for seed in self.plan.settings.seeds)
        return [folder for folder in folders if folder.exists()]

    def committed_steps(self) -> int:
        """Of all its runs together."""
        return sum(
            Run(run_id=folder.name, run_dir=folder, experiment=point.experiment).committed_step()
            for point in self.plan.points
            for folder in self.run_dirs(point)
        )

    def all_steps(self) -> int:
        """Of all its runs together in the end; with several rungs, if no point fails."""
        plan = self.plan
        if plan.settings.rungs == 1:
            return sum(job.steps for job in plan.jobs([point.name for point in plan.points], 0))
        rungs = tuple(plan.steps(plan.points[0], rung) for rung in range(plan.settings.rungs))
        return most_steps(rungs, len(plan.points), len(plan.settings.seeds), plan.settings.keep)

    @contextmanager
    def noted_failure(self, job: Job) -> Iterator[None]:
        """Around one try: what it raises is written down for the flow that waits, and for the table."""
        path = self._file(job, "failed.json")
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

    def _file(self, job: Job, ending: str) -> Path:
        return self.folder / "results" / f"{job.point.name}-s{job.seed}-step-{job.steps:06d}.{ending}"


def ablation_name() -> str:
    """Prefect's name of the flow run at work is its ablation's: the given one, else one that every retry finds."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None or context.parameters is None:
        raise RuntimeError("ablation_name() is for Prefect to call, when a flow run starts")
    return context.parameters.get("run_id") or f"{context.parameters['experiment']}-{context.flow_run.id.hex[:12]}"


def point_name() -> str:
    """Prefect's name of a point's flow run is its run's, which hooks and people find it by."""
    context = FlowRunContext.get()
    if context is None or context.parameters is None:
        raise RuntimeError("point_name() is for Prefect to call, when a flow run starts")
    given = context.parameters
    plan = existing_ablation(given["ablation"]).plan
    return plan.run_id(plan.point(given["point"]), given["seed"])


def open_ablation(experiment: str, overrides: Sequence[str] | None, run_id: str | None, **settings: Any) -> Ablation:
    """The planned ablation, on disk. This process is noted as the one that drives it.

    Args:
        settings: of ``AblationConfig``; None: its default.

    Raises:
        ConfigError: as ``plan_ablation``.
    """
    ablation = plan_ablation(experiment, overrides, run_id, **settings)
    if not (ablation.folder / "plan.json").exists():
        write_json_atomically(ablation.folder / "plan.json", ablation.plan.model_dump_json(indent=1))
    note_driver(ablation.run)
    return ablation


def plan_ablation(experiment: str, overrides: Sequence[str] | None, run_id: str | None, **settings: Any) -> Ablation:
    """A new ablation, or the one called ``run_id`` continued, with the experiments that it began with. Writes nothing.

    Raises:
        ConfigError: it makes no sense, or another one of this name was asked for before.
    """
    try:
        wanted = AblationConfig(**{key: value for key, value in settings.items() if value is not None})
    except ValidationError as error:
        findings = [" ".join(("ablation", *map(str, item["loc"]))) + f": {item['msg']}" for item in error.errors()]
        raise ConfigError("\n".join(findings)) from None
    name = _checked(run_id or (ablation_name() if FlowRunContext.get() else new_run_id(experiment)))
    folder = Settings().ablations_dir / name
    request = (experiment, tuple(overrides or ()), wanted)
    if not (folder / "plan.json").exists():
        return Ablation(make_plan(name, *request, partial(load_experiment, experiment)), folder)
    stored = existing_ablation(name)
    if stored.plan.request != request:
        raise ConfigError(
            f"ablation {name} was asked for as\n{_words(*stored.plan.request)}\nand now as\n{_words(*request)}\n"
            "Continue it with its own values, or leave the name out to start a new one."
        )
    return stored


def existing_ablation(name: str) -> Ablation:
    """
    Raises:
        ConfigError: there is no ablation of this name.
    """
    settings = Settings()
    path = settings.ablations_dir / _checked(name) / "plan.json"
    if not path.exists():
        known = sorted(found.parent.name for found in settings.ablations_dir.glob("*/plan.json"))
        raise ConfigError(f"no ablation {name!r} under {settings.ablations_dir}. Found: {', '.join(known) or 'none'}.")
    return Ablation(AblationPlan.model_validate_json(path.read_text()), path.parent)


def _checked(name: str) -> str:
    """An ablation's name is that of a folder below the ablations', and of nothing else."""
    if not re.fullmatch(ABLATION_ID, name):
        raise ConfigError(
            f"{name!r} cannot be the name of an ablation. Allowed are up to 80 lower-case letters, digits and dashes; "
            "the first is a letter or a digit."
        )
    return name


def _words(experiment: str, overrides: Sequence[str], settings: AblationConfig) -> str:
    return f"  {experiment} {' '.join(overrides)} {settings.model_dump_json(exclude_defaults=True)}"


def share_inputs(ablation: Ablation) -> None:
    """Datasets and policies of all points, made once before the points start side by side: they find them done."""
    asked = {
        (point.experiment.data.model_dump_json(), point.experiment.model.model_dump_json()): point.experiment
        for point in ablation.plan.points
    }
    for experiment in asked.values():
        prepare_and_resize(experiment, "train")
        prepare_and_resize(experiment, "validation")
        bootstrapped(experiment.model)


def describe_point(
    ablation: Ablation, job: Job, run: Run, train: DatasetRef, validation: DatasetRef, start: ModelRef
) -> str:
    """The run in MLflow, below the ablation's: named after what differs, with the steps of the whole, which the
    parameters say once and for all. Returns the MLflow run's id."""
    write_json_atomically(run.ablation_marker, ablation.plan.ablation_id)
    whole = run.model_copy(update={"experiment": job.point.experiment_of(job.seed)})
    mlflow_run_id = describe_run(whole, train, validation, start)
    place_below(ablation, job, run)
    return mlflow_run_id


@step("place-below-ablation")
def place_below(ablation: Ablation, job: Job, run: Run) -> None:
    """The run of a point below the ablation's in MLflow. Safe to repeat."""
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
def describe_parent(ablation: Ablation) -> None:
    """What was asked for, as parameters and tags of the parent run. Safe to repeat."""
    plan, tracker = ablation.plan, tracker_of(ablation.run, Settings())
    asked = plan.settings.model_dump(mode="json")
    tracker.log_params({f"ablation.{key}": value for key, value in asked.items()} | {
        "ablation.experiment": plan.experiment,
        "ablation.overrides": " ".join(plan.overrides),
    })  # fmt: skip
    tracker.set_tags({"rlflow.ablation": plan.ablation_id, "rlflow.ablation_point": "(all)"})
    tracker.log_text(plan.model_dump_json(indent=1), "ablation/plan.json")


@step("mark-point", task_run_name="mark-{status}")
def mark(ablation: Ablation, job: Job, status: str) -> None:
    """How a run of the ablation stands, as a tag in MLflow. A dropped one is committed and closed; it did not fail."""
    folder = Settings().runs_dir / ablation.run_id(job)
    if (folder / "mlflow.json").exists():
        run = Run(run_id=folder.name, run_dir=folder, experiment=job.point.experiment)
        tracker_of(run, Settings()).set_tags({"rlflow.ablation_status": status})
