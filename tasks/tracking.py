"""Describe the run in MLflow: parameters, tags, dataset inputs, and where this start of it comes from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra import provenance
from infra.logs import get_logger
from infra.settings import Settings
from infra.tracking import Tracker
from rlcore.artifacts import DatasetRef, ModelRef
from rlcore.job import write_json_atomically
from tasks.jobs import worth_retrying
from tasks.mirroring import mirrored
from tasks.origins import origins_dir, record_origin
from tasks.runs import Run, close_after_error, tracker_of


@task(
    name="describe-run",
    cache_policy=NO_CACHE,
    retries=2,
    retry_delay_seconds=[5, 30],
    retry_condition_fn=worth_retrying,
    timeout_seconds=600,
)
def describe_run(run: Run, train: DatasetRef, validation: DatasetRef, model: ModelRef) -> str:
    """Safe to repeat. Returns the MLflow run's id."""
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
            "rlflow.run_dir": str(run.run_dir),
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
    origin = record_origin(run, facts, train, validation, model)
    for name in origin.files:
        tracker.log_file(origins_dir(run.run_dir) / name, "origins")
    tracker.log_file(run.run_dir / "origins.jsonl")
    get_logger().info("mlflow: run %s of experiment %s", tracker.mlflow_run_id, run.experiment.name)
    return tracker.mlflow_run_id


@contextmanager
def tracked(run: Run) -> Iterator[Tracker]:
    """Hold the MLflow run open, and close it with the right status however the flow ends; meanwhile the run is mirrored
    to the store, where there is one."""
    settings = Settings()
    with mirrored(run, settings):
        tracker = tracker_of(run, settings)
        run.finished_marker.unlink(missing_ok=True)
        tracker.resume()
        try:
            yield tracker
        except Exception:  # raised again, once MLflow knows
            close_after_error(lambda: tracker, "FAILED")
            raise
        except BaseException:  # Ctrl-C or a cancelled flow
            close_after_error(lambda: tracker, "KILLED")
            raise
        tracker.finish("FINISHED")
        write_json_atomically(run.finished_marker, "")
