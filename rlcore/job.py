"""Work that runs in the trainer's interpreter: ``python -m <module> spec.json``, one result, one error.

The process that asks (a Prefect task) never imports torch. It writes a spec, starts the module and reads
``spec.result`` (the artifact as JSON) or, after a non-zero exit, ``spec.result + ".error"``.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict

from rlcore import errors
from rlcore.algorithms.estimate import Architecture
from rlcore.artifacts import CheckpointRef, DatasetRef, ModelRef
from rlcore.config import DataConfig, ExperimentConfig, ModelConfig
from rlcore.files import write_json_atomically
from rlcore.segment.spec import EXIT_BAD_CONFIG


class JobSpec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    result: Path


class PrepareSpec(JobSpec):
    """rlcore.data.problems: source -> DatasetRef with original images."""

    source: str  # the experiment's words, for the record
    source_path: Path | None  # local file or folder; None: ``source`` is a Hugging Face id with @split, or synthetic
    split: Literal["train", "validation"]
    data: DataConfig
    model: ModelConfig
    datasets_dir: Path


class ResizeSpec(JobSpec):
    """rlcore.data.images: DatasetRef with original images -> DatasetRef with images on the model's patch grid."""

    dataset: DatasetRef
    data: DataConfig
    model: ModelConfig
    datasets_dir: Path
    processes: int


class BootstrapSpec(JobSpec):
    """rlcore.models.bootstrap: ModelConfig -> ModelRef, a local folder."""

    model: ModelConfig
    models_dir: Path


class ArchitectureSpec(JobSpec):
    """rlcore.models.architecture: ModelConfig -> ArchitectureRef, from config.json alone."""

    model: ModelConfig


class ArchitectureRef(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    architecture: Architecture


class EvaluateSpec(JobSpec):
    """rlcore.evaluation: policy and dataset -> EvalReport."""

    experiment: ExperimentConfig
    policy: CheckpointRef | ModelRef
    base: ModelRef  # tokenizer, processor and architecture of the policy
    dataset: DatasetRef
    out_dir: Path


class MergeSpec(JobSpec):
    """rlcore.models.merge: checkpoint -> ModelRef, verified with transformers and vLLM."""

    experiment: ExperimentConfig
    checkpoint: CheckpointRef
    base: ModelRef
    dataset: DatasetRef  # holds the pictures of the canary
    models_dir: Path

    @property
    def out(self) -> Path:
        """The folder of the merged model."""
        return self.models_dir / f"merged-{self.checkpoint.run_id}-step-{self.checkpoint.step}"


class JobError(BaseModel):
    """What a failed job leaves behind, so that the asker can raise the same error."""

    model_config = ConfigDict(frozen=True)

    kind: str  # class name in rlcore.errors, or another exception's name
    message: str
    traceback: str


S = TypeVar("S", bound=JobSpec)


def job_main(run: Callable[[S], BaseModel], spec_type: type[S]) -> None:
    """Entry point of a job module: read the spec named on the command line, run, write the result or the error."""
    if len(sys.argv) != 2:
        sys.exit(f"usage: python -m {run.__module__} SPEC.json")
    spec = spec_type.model_validate_json(Path(sys.argv[1]).read_text())
    try:
        result = run(spec)
    except Exception as error:  # noqa: BLE001 - the boundary: every failure is handed to the asker whole
        report = JobError(kind=type(error).__name__, message=str(error), traceback=traceback.format_exc())
        write_json_atomically(Path(f"{spec.result}.error"), report.model_dump_json())
        traceback.print_exc()
        sys.exit(EXIT_BAD_CONFIG if isinstance(error, errors.ConfigError | errors.DataError) else 1)
    write_json_atomically(spec.result, result.model_dump_json())


def read_error(result: Path) -> JobError | None:
    """The error a failed job left beside ``result``, or None."""
    path = Path(f"{result}.error")
    return JobError.model_validate(json.loads(path.read_text())) if path.exists() else None
