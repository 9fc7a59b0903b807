"""The steps that make models: the policy to start from, and the merged, verified and registered result."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from prefect.artifacts import create_markdown_artifact

from infra.logs import get_logger
from infra.provenance import describe_hardware
from infra.settings import Settings
from rlcore.artifacts import CheckpointRef, DatasetRef, EvalReport, ModelCheck, ModelRef
from rlcore.config import ExperimentConfig, ModelConfig, build_experiment
from rlcore.segment.store import read_manifest
from rlcore.specs import BootstrapSpec, CheckModelSpec, MergeSpec, tiny_folder
from tasks.driver.jobs import new_result_path, run_job, tell_shortage
from tasks.driver.outbox import prefect_outage_named
from tasks.lineage import artifact_name, lineage_of
from tasks.registered import log_metrics_of, pyfunc_of
from tasks.retries import step
from tasks.run import Run, tracker_of
from tasks.store.made import content_key, made

CHAMPION = "champion"  # alias of the best model of an experiment so far: tasks/champion.py
ALIAS = "verified"  # alias of a model whose log-probs agree in the trainer, transformers and vLLM

BOOTSTRAP_CODE = ("rlcore/jobs/bootstrap.py", "rlcore/models", "rlcore/families", "rlcore/data", "rlcore/batch.py")
MERGE_CODE = (
    *("rlcore/jobs/merge.py", "rlcore/jobs/bootstrap.py", "rlcore/models", "rlcore/families", "rlcore/sampler"),
    *("rlcore/algorithms/logprobs.py", "rlcore/batch.py"),
)
CHECK_CODE = (
    *("rlcore/jobs/check_model.py", "rlcore/jobs/merge.py", "rlcore/jobs/bootstrap.py", "rlcore/models"),
    *("rlcore/families", "rlcore/sampler", "rlcore/distributed/worker.py", "rlcore/data"),
    *("rlcore/algorithms/logprobs.py", "rlcore/batch.py"),
)


def bootstrap_key(model: ModelConfig) -> str:
    files = sorted(Path(model.path).glob("*")) if Path(model.path).is_dir() else []
    stamps = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return content_key("model", json.dumps([model.model_dump(mode="json"), stamps]), *BOOTSTRAP_CODE)


def teacher_key(teacher: ModelConfig, pupil: ModelRef) -> str:
    """The comparison of tokens depends on both models."""
    return content_key("model", json.dumps(["teacher", bootstrap_key(teacher), pupil.digest]), *BOOTSTRAP_CODE)


def merge_key(checkpoint: CheckpointRef, base: ModelRef) -> str:
    content = json.dumps([checkpoint.manifest_sha256, checkpoint.path, base.digest])
    return content_key("merge", content, *MERGE_CODE)


@step("bootstrap-policy", others=(5, 60), timeout_seconds=6 * 3600)
def bootstrap_policy(model: ModelConfig) -> ModelRef:
    """The policy to start from: a local folder with config, safetensors, tokenizer and processor.

    Raises:
        ModelError: the model's files are missing or unusable.
    """
    settings = Settings()
    spec = BootstrapSpec(result=new_result_path(settings, "bootstrap"), model=model, models_dir=settings.models_dir)
    # The tiny policy is shared through the store: its last bits depend on the processor that warms it up.
    folder = tiny_folder(settings.models_dir, model.tiny) if model.path == "tiny" else None
    ref = made(
        bootstrap_key(model), folder, lambda: run_job("rlcore.jobs.bootstrap", spec, ModelRef, settings), ModelRef
    )
    get_logger().info("model: %s, %.1f M parameters, %s", ref.source, ref.num_parameters / 1e6, ref.path)
    return ref


@step("bootstrap-teacher", others=(5, 60), timeout_seconds=6 * 3600)
def bootstrap_teacher(experiment: ExperimentConfig, pupil: ModelRef) -> ModelRef | None:
    """The model of algorithm.teacher in a local folder. None: the experiment has no teacher.

    Args:
        pupil: the policy to start from.

    Raises:
        ModelError: the teacher's files are missing or unusable, or it has other tokens than the policy.
    """
    if experiment.algorithm.teacher is None:
        return None
    settings, model = Settings(), experiment.algorithm.teacher.model
    spec = BootstrapSpec(
        result=new_result_path(settings, "bootstrap-teacher"),
        model=model,
        models_dir=settings.models_dir,
        pupil=pupil,
        trust_pupil=experiment.model.trust_remote_code,
    )
    folder = tiny_folder(settings.models_dir, model.tiny) if model.path == "tiny" else None
    key = teacher_key(model, pupil)
    ref = made(key, folder, lambda: run_job("rlcore.jobs.bootstrap", spec, ModelRef, settings), ModelRef)
    get_logger().info("teacher: %s, %.1f M parameters, %s", ref.source, ref.num_parameters / 1e6, ref.path)
    return ref


def check_key(experiment: ExperimentConfig, model: ModelRef, *, with_engine: bool) -> str:
    """Of the model's content, the devices, and the settings that change what the check computes."""
    settings = {
        "model": experiment.model.model_dump(mode="json", exclude={"path", "revision", "tiny", "check"}),
        "data": experiment.data.model_dump(mode="json"),
        "rollout": (experiment.rollout.dtype, experiment.rollout.tensor_parallel),
        "training": (experiment.training.optimizer, experiment.training.sequence_parallel),
        "longest": experiment.max_sequence_tokens,
        "device": (experiment.resources.device, sorted(set(describe_hardware().gpus))),
    }
    return content_key("check", json.dumps([model.digest, with_engine, settings], sort_keys=True), *CHECK_CODE)


@step("check-model", others=(10,), timeout_seconds=3600)
def check_model(experiment: ExperimentConfig, model: ModelRef) -> ModelCheck | None:
    """Compare the trainer, transformers and vLLM on the model, unless they were compared before. None: not compared.

    Raises:
        ModelError: they differ.
    """
    asked = experiment.model.check
    if asked == "off":
        get_logger().info("model: not compared with transformers and vLLM (model.check is off)")
        return None
    settings = Settings()
    with_engine = asked == "on" or experiment.model.path != "tiny"
    key = check_key(experiment, model, with_engine=with_engine)
    check = made(key, None, lambda: _compared(experiment, model, settings, with_engine=with_engine), ModelCheck)
    with prefect_outage_named():
        create_markdown_artifact(check.markdown(), key=f"{experiment.name}-model")
    get_logger().info("model: %d comparisons agree, the worst by %s; %s", len(check.rows), check.worst, check.took)
    return check


def _compared(experiment: ExperimentConfig, model: ModelRef, settings: Settings, *, with_engine: bool) -> ModelCheck:
    spec = CheckModelSpec(
        result=new_result_path(settings, "check-model"), experiment=experiment, model=model, with_engine=with_engine
    )
    get_logger().info("model: comparing trainer and transformers%s", " and vLLM" if with_engine else "")
    tell_shortage("model", experiment, 1, settings)
    return run_job("rlcore.jobs.check_model", spec, ModelCheck, settings, quiet=True)


def check_path(path: str, overrides: Sequence[str]) -> ModelCheck:
    """Compare the trainer, transformers and vLLM on a folder or a Hugging Face id, also if they were compared before.

    Args:
        overrides: ``key=value`` settings that differ from the defaults.

    Raises:
        ConfigError: an override is unusable.
        ModelError: the model cannot be used, or they differ.
    """
    settings = Settings()
    experiment = build_experiment({"name": "check-model", "model": {"path": path}}, overrides)
    return _compared(experiment, bootstrap_policy.fn(experiment.model), settings, with_engine=True)


@step("merge-checkpoint", others=(10,), timeout_seconds=6 * 3600)
def merge_checkpoint(
    experiment: ExperimentConfig, checkpoint: CheckpointRef, base: ModelRef, dataset: DatasetRef
) -> ModelRef:
    """Write a sharded checkpoint as safetensors, and compare transformers and vLLM on it with the policy.

    Args:
        dataset: the training data; the images of the fixed inputs for the comparison are in its folder.

    Raises:
        ModelError: the merged model and the policy give different log-probs.
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

    def make() -> ModelRef:
        get_logger().info("merge: %s, then compare with transformers and vLLM", checkpoint.path)
        tell_shortage("merge", experiment, experiment.rollout.tensor_parallel, settings)
        return run_job("rlcore.jobs.merge", spec, ModelRef, settings, quiet=True)

    return made(merge_key(checkpoint, base), spec.out, make, ModelRef)


@step("register-model", others=(5, 30))
def register_model(
    run: Run,
    model: ModelRef,
    checkpoint: CheckpointRef,
    report: EvalReport | None,
    alias: str = ALIAS,
    benchmark: str | None = None,
) -> ModelRef:
    """Register the folder of a verified model and move the alias to it. Safe to repeat: it finds its own version.

    MLflow gets no weights, but what ``mlflow.pyfunc.load_model`` needs besides them: docs/howto/registered-model.md.

    Args:
        report: its numbers become those of the model; ``benchmark`` names its problems, unless they are the run's own.
    """
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
    with tempfile.TemporaryDirectory(prefix="rlflow-") as folder:
        registered = tracker.register_model(
            name=run.experiment.name,
            path=Path(model.path),
            tags=tags,
            alias=alias,
            description=f"{origin}. Files: {model.path}",
            pyfunc=pyfunc_of(run, model, read_manifest(checkpoint).versions, Path(folder)),
        )
    version = registered.version
    if report is not None:
        log_metrics_of(tracker, report, f"eval/{benchmark}" if benchmark else "eval", registered.model_id)
    get_logger().info("model: registered %s version %s @%s", run.experiment.name, version, alias)
    known = model.model_copy(update={"registered_name": run.experiment.name, "registered_version": version})
    lineage = lineage_of(run, known, checkpoint, tracker.mlflow_run_id)
    tracker.log_text(lineage.model_dump_json(indent=1), artifact_name(run.experiment.name, version))
    return known
