"""What MLflow gets of a run's models: the files of a registered version, and the metadata of checkpoints."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path

from infra.tracking.models import Pyfunc
from infra.tracking.tracker import Tracker
from rlcore.artifacts import CheckpointRef, EvalReport, ModelRef
from rlcore.data.table import load_problems
from rlcore.errors import RlflowError
from rlcore.inference.stored import store_settings
from rlcore.types import Problem
from tasks.lineage import read_origins
from tasks.run import Run

LOADER = "rlcore.inference.pyfunc"
_REQUIRED = ("transformers", "torch")


def pyfunc_of(run: Run, model: ModelRef, versions: Mapping[str, str], folder: Path) -> Pyfunc:
    """What ``mlflow.pyfunc.load_model`` needs of a merged model. Fills ``folder``, which is empty.

    Args:
        versions: of the packages that trained it.
    """
    stored = store_settings(folder, run.experiment, model)
    return Pyfunc(
        loader_module=LOADER,
        data=folder,
        config={"folder": stored.folder, "dtype": "auto", "verify": True},
        example=example_of(run),
        params={
            "temperature": 0.0, "top_p": 1.0, "max_completion_tokens": stored.max_completion_tokens, "seed": 0,
        },
        requirements=[
            "mlflow>=3.17,<4",
            *(f"{name}=={versions[name].partition('+')[0]}" for name in _REQUIRED if name in versions),
        ],
    )  # fmt: skip


def example_of(run: Run) -> dict[str, object]:
    """A problem as ``predict`` takes it: the first validation problem with an image and no video, or the first one of
    all."""
    problems: list[Problem] = []
    for origin in reversed(read_origins(run.run_dir)):
        try:
            problems = list(load_problems(Path(origin.validation.path)))
            break
        except (OSError, RlflowError):  # the dataset was removed
            continue
    problems = [problem for problem in problems if not any(image.is_video for image in problem.images)]
    chosen = next((problem for problem in problems if problem.images), problems[0] if problems else None)
    if chosen is None:
        return {"question": "How many sides does a hexagon have?"}
    return row_of(chosen)


def row_of(problem: Problem) -> dict[str, object]:
    """A problem as a row of ``predict``, with its resized images as base64."""
    row: dict[str, object] = {"question": problem.question}
    if problem.images:
        row["images"] = [base64.b64encode(image.read()).decode() for image in problem.images]
    if problem.context:
        row["context"] = [{"role": message.role, "text": message.text} for message in problem.context]
    if problem.chat_template_arguments:
        row["chat_template_arguments"] = json.dumps(dict(problem.chat_template_arguments))
    if problem.source_name:
        row["source"] = problem.source_name
    return row


def checkpoint_model(run: Run, policy: CheckpointRef | ModelRef, tracker: Tracker) -> str:
    """The id of the logged model that stands for a policy of the run in MLflow. A ``ModelRef``: where it started."""
    step = policy.step if isinstance(policy, CheckpointRef) else 0
    return tracker.checkpoint_model(
        name=f"{run.experiment.name}-step-{step:06d}",
        step=step,
        manifest=policy.manifest_sha256 if isinstance(policy, CheckpointRef) else policy.digest,
        tags={"rlflow.run_id": run.run_id, "rlflow.path": policy.path},
    )


def log_metrics_of(tracker: Tracker, report: EvalReport, where: str, model_id: str | None) -> None:
    """Log the numbers of an evaluation under ``where``, as those of a logged model if one is named."""
    from rlcore.evaluation.report import metrics_of

    tracker.log_metrics(
        {f"{where}/{name}": value for name, value in metrics_of(report).items()},
        step=report.step,
        timestamp_ms=round(report.at * 1000),
        model_id=model_id,
    )
