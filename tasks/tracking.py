"""Describe the run in MLflow: parameters, tags, dataset inputs, and the uncommitted changes it ran with."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra import provenance
from infra.logs import get_logger
from infra.settings import Settings
from rlcore.artifacts import DatasetRef, ModelRef
from tasks.jobs import worth_retrying
from tasks.runs import Run, tracker_of


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
    if facts.patch:
        tracker.log_text(facts.patch, "uncommitted.patch")
    get_logger().info("mlflow: run %s of experiment %s", tracker.mlflow_run_id, run.experiment.name)
    return tracker.mlflow_run_id
