"""Merge a checkpoint to a Hugging Face folder, verified by the job that makes it; then register it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from prefect.context import TaskRunContext

from infra.logs import get_logger
from infra.settings import Settings
from rlcore.artifacts import CheckpointRef, DatasetRef, EvalReport, ModelRef
from rlcore.config import ExperimentConfig
from rlcore.specs import MergeSpec
from tasks.driver.jobs import new_result_path, run_job
from tasks.provenance.lineage import artifact_name, lineage_of
from tasks.retries import step
from tasks.run import Run, tracker_of
from tasks.store.made import cache_key, kept, present

CHAMPION = "champion"  # the best of its experiment so far, by more than chance: tasks/champion.py
ALIAS = "verified"  # nothing gets it before transformers and vLLM have both agreed with the policy
_CODE = ("rlcore/jobs/bootstrap.py", "rlcore/models", "rlcore/families", "rlcore/rollout")


def _key(_: TaskRunContext, parameters: dict[str, Any]) -> str:
    checkpoint, base = parameters["checkpoint"], parameters["base"]
    return cache_key("merge", json.dumps([checkpoint.manifest_sha256, checkpoint.path, base.digest]), *_CODE)


@step(
    "merge-checkpoint",
    cache_key_fn=_key,
    persist_result=True,
    result_serializer="json",
    others=(10,),
    timeout_seconds=6 * 3600,
)
def merge(experiment: ExperimentConfig, checkpoint: CheckpointRef, base: ModelRef, dataset: DatasetRef) -> ModelRef:
    """Sharded checkpoint to safetensors, reloaded with transformers and vLLM and compared with the policy.

    ``dataset`` is the one trained on: the comparison's fixed inputs have their pictures there.

    Raises:
        ModelError: the merged model does not answer as the policy did.
    """
    settings = Settings()
    spec = MergeSpec(
        result=new_result_path(settings, "merge"),
        experiment=experiment,
        checkpoint=checkpoint,
        base=base,
        dataset=dataset,
        models_dir=settings.models_dir,
    )
    get_logger().info("merge: %s, then compare with transformers and vLLM", checkpoint.path)
    return kept(spec.out, settings, lambda: run_job("rlcore.jobs.merge", spec, ModelRef, settings, quiet=True))


def merged(experiment: ExperimentConfig, checkpoint: CheckpointRef, base: ModelRef, dataset: DatasetRef) -> ModelRef:
    return present(merge, lambda ref: Path(ref.path) / "config.json", experiment, checkpoint, base, dataset)


@step("register-model", others=(5, 30))
def register(
    run: Run, model: ModelRef, checkpoint: CheckpointRef, report: EvalReport | None, alias: str = ALIAS
) -> ModelRef:
    """Register the verified model by reference and move the alias; a repeat finds the version it made."""
    tags = {
        "rlflow.run_id": run.run_id,
        "rlflow.experiment_digest": run.experiment.digest(),
        "rlflow.checkpoint": checkpoint.path,
        "rlflow.step": str(checkpoint.step),
        "rlflow.model_digest": model.digest,
    }
    if report is not None:
        tags |= {"eval.accuracy": f"{report.accuracy:.4f}", "eval.dataset_digest": report.dataset_digest}
    origin = f"{model.source} after {checkpoint.step} GRPO steps of run {run.run_id}"
    tracker = tracker_of(run, Settings())
    registered = tracker.register_model(
        name=run.experiment.name,
        path=Path(model.path),
        tags=tags,
        alias=alias,
        description=f"{origin}. Files: {model.path}",
    )
    get_logger().info("model: registered %s version %s @%s", registered.name, registered.version, alias)
    known = model.model_copy(update={"registered_name": registered.name, "registered_version": registered.version})
    lineage = lineage_of(run, known, checkpoint, tracker.mlflow_run_id)
    tracker.log_text(lineage.model_dump_json(indent=1), artifact_name(registered.name, registered.version))
    return known
