"""The steps that find, open, describe and close a run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prefect.context import FlowRunContext

from infra import processes, provenance
from infra.logs import get_logger
from infra.settings import Settings
from infra.tracking.system import system_metrics
from rlcore.artifacts import CheckpointRef, DatasetRef, ModelRef
from rlcore.config import ExperimentConfig
from rlcore.errors import CheckpointError
from rlcore.files import write_json_atomically
from rlcore.segment.store import LocalCheckpointStore
from tasks import experiments as form
from tasks import run as runs
from tasks.driver.failures import note_outage, note_outages, outage_of, unopened_run
from tasks.driver.jobs import jobs_mark
from tasks.driver.mirror import mirror_run
from tasks.lineage import origins_dir, record_origin
from tasks.retries import step
from tasks.run import Run, close_after_error, note_end, read_fork, tracker_of
from tasks.store.made import key_of, store_of
from tasks.store.restore import restore_checkpoint


@contextmanager
def note_if_unopened(run_id: str | None) -> Iterator[None]:
    """Around the steps before a run has a folder: an outage is noted below ``data/unopened``, where ``recover`` looks.

    Any other end of these steps removes the note. A flow that was started in a terminal leaves none: no worker can
    start it again.
    """
    context = FlowRunContext.get()
    flow_run = context.flow_run if context is not None else None
    unopened = unopened_run(run_id or runs.flow_run_name())
    try:
        yield
    except Exception as error:
        if flow_run is not None and flow_run.deployment_id is not None:
            run = unopened.model_copy(update={"run_dir": Settings().runs_dir / unopened.run_id})
            if str(flow_run.id) in [driver.flow_run_id for driver in runs.drivers(run)]:
                note_outage(run, error)
            elif outage_of(error) is not None:
                runs.note_driver(unopened)  # first: recover ignores outages from before the driver's start
                note_outage(unopened, error)
        if outage_of(error) is None:
            shutil.rmtree(unopened.run_dir, ignore_errors=True)
        raise
    shutil.rmtree(unopened.run_dir, ignore_errors=True)


@step("choose-experiment")
def choose_experiment(run_id: str | None, **parameters: Any) -> ExperimentConfig:
    """What a flow run trains: on a retry what it started with, else what its parameters say."""
    return runs.experiment_of_retry(run_id) or form.configure(run_id=run_id, **parameters)


@step("open-run")
def open_run(experiment: ExperimentConfig, run_id: str | None, *, allow_changes: bool = False) -> Run:
    """A new run, or the run called ``run_id``, which is fetched from the store if it is not on this machine."""
    run = runs.open_run(experiment, run_id, Settings(), allow_changes=allow_changes)
    for driver in runs.drivers(run):
        if driver.flow_run_id is not None and driver.is_running() is False:
            # A killed flow could not remove the temporary folders of its jobs.
            processes.kill_all(jobs_mark(driver.flow_run_id))
    return run


@step("find-run")
def find_run(run_id: str) -> Run:
    return runs.existing_run(run_id, Settings())


@step("find-checkpoint")
def find_checkpoint(run: Run) -> CheckpointRef:
    """The newest whole checkpoint of the run, fetched from the store if this machine lacks it.

    Raises:
        CheckpointError: the run has no whole checkpoint.
    """
    restore_checkpoint(run.run_dir, Settings())
    newest = LocalCheckpointStore(run.run_dir, run.run_id).latest()
    if newest is None:
        raise CheckpointError(f"run {run.run_id} has no whole checkpoint yet. Train at least one segment.")
    return newest


@step("describe-run", others=(5, 30))
def describe_run(
    run: Run, train: DatasetRef, validation: DatasetRef, model: ModelRef, teacher: ModelRef | None = None
) -> str:
    """Log parameters, tags, datasets and origin of the run to MLflow. Safe to repeat. Returns the MLflow run's id."""
    tracker = tracker_of(run, Settings())
    facts = provenance.collect()
    tracker.log_params(run.experiment.flat())
    tracker.set_tags(
        {
            **facts.tags(),
            "rlflow.experiment_digest": run.experiment.digest(),
            "rlflow.dataset_digest": train.digest,
            "rlflow.validation_digest": validation.digest,
            "rlflow.model": model.path,
            "rlflow.model_digest": model.digest,
            **({} if teacher is None else {"rlflow.teacher": teacher.path, "rlflow.teacher_digest": teacher.digest}),
            "rlflow.run_dir": str(run.run_dir),
            **_fork_tags(run),
        }
    )
    for dataset, context in ((train, "training"), (validation, "validation")):
        tracker.log_dataset(
            name=dataset.source,
            digest=dataset.digest,
            path=dataset.path,
            context=context,
            profile={"num_problems": dataset.num_problems, "num_images": dataset.num_images},
        )
    tracker.log_text(run.experiment.model_dump_json(indent=1), "experiment.json")
    origin = record_origin(run, facts, train, validation, model, teacher)
    for name in origin.files:
        tracker.log_file(origins_dir(run.run_dir) / name, "origins")
    tracker.log_file(run.run_dir / "origins.jsonl")
    get_logger().info("mlflow: run %s of experiment %s", tracker.mlflow_run_id, run.experiment.name)
    return tracker.mlflow_run_id


def _fork_tags(run: Run) -> dict[str, str]:
    """MLflow's page shows a fork below the run that it was forked from."""
    origin = read_fork(run)
    if origin is None:
        return {}
    tags = {"rlflow.forked_from": str(origin)}
    if origin.mlflow_run_id and not run.ablation_marker.exists():  # a point of an ablation stands below the ablation
        tags["mlflow.parentRunId"] = origin.mlflow_run_id
    return tags


@step("open-tracking")
def open_tracking(run: Run) -> str:
    """Open the MLflow run, also one that was closed before. Returns its id."""
    tracker = tracker_of(run, Settings())
    run.finished_marker.unlink(missing_ok=True)
    tracker.resume()
    return tracker.mlflow_run_id


@step("finish-run")
def finish_run(run: Run) -> None:
    """Close the MLflow run, then mark the run as finished in the store and in its folder."""
    settings = Settings()
    tracker_of(run, settings).finish("FINISHED")
    store, key = store_of(settings), key_of(run.finished_marker, settings)
    if store is not None and key is not None:
        store.put(key, b"")
    write_json_atomically(run.finished_marker, "")


@contextmanager
def track_run(run: Run) -> Iterator[None]:
    """Keep the MLflow run open and mirror the run to the store, and close both with the right status however the flow
    ends. The run is finished once the store has all of it."""
    settings = Settings()
    with note_outages(run):
        mlflow_run_id = open_tracking(run)
        load = system_metrics(settings.tracking_uri, mlflow_run_id, settings.system_metrics_seconds)
        try:
            with mirror_run(run, settings), load:
                yield
        except BaseException as error:  # raised again, once MLflow knows
            # KILLED: by Ctrl-C, or the flow is cancelled
            status = "FAILED" if isinstance(error, Exception) else "KILLED"
            note_end(run, status, error)
            close_after_error(run, settings, status)
            raise
        finish_run(run)
