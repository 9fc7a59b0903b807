"""Describe the run in MLflow: parameters, tags, dataset inputs, and where this start of it comes from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from infra import provenance
from infra.logs import get_logger
from infra.settings import Settings
from rlcore.artifacts import DatasetRef, ModelRef
from rlcore.files import write_json_atomically
from tasks.driver.mirror import mirrored
from tasks.driver.outages import noted_outages
from tasks.provenance.origins import origins_dir, record_origin
from tasks.retries import step
from tasks.run import Run, close_after_error, tracker_of
from tasks.store.made import key_of, store_of


@step("describe-run", others=(5, 30))
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


@step("open-tracking")
def open_tracking(run: Run) -> None:
    """Open the MLflow run, again where an earlier end of it has been overtaken."""
    tracker = tracker_of(run, Settings())
    run.finished_marker.unlink(missing_ok=True)
    tracker.resume()


@step("finish-run")
def finish_run(run: Run) -> None:
    """Close the MLflow run and, when everything else is done, mark the run as finished."""
    settings = Settings()
    tracker_of(run, settings).finish("FINISHED")
    store, key = store_of(settings), key_of(run.finished_marker, settings)
    if store is not None and key is not None:
        store.put(key, b"")
    write_json_atomically(run.finished_marker, "")


@contextmanager
def tracked(run: Run) -> Iterator[None]:
    """Hold the MLflow run open, and close it with the right status however the flow ends. Meanwhile the run is mirrored
    to the store, where there is one; it is finished once the store has all of it."""
    settings = Settings()
    with noted_outages(run):
        open_tracking(run)
        try:
            with mirrored(run, settings):
                yield
        except Exception:  # raised again, once MLflow knows
            close_after_error(lambda: tracker_of(run, settings), "FAILED")
            raise
        except BaseException:  # Ctrl-C or a cancelled flow
            close_after_error(lambda: tracker_of(run, settings), "KILLED")
            raise
        finish_run(run)
