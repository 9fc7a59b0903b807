"""Specs of the jobs that run in the trainer's interpreter: ``python -m <module> spec.json``.

A Prefect task, which never imports torch, writes a spec, starts the module and reads ``spec.result`` (the artifact as
JSON) or, after a non-zero exit, ``spec.result + ".error"``.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from rlcore.artifacts import CheckpointRef, DatasetRef, EndpointRef, ModelRef
from rlcore.config import DataConfig, ExperimentConfig, ModelConfig, TinyModelConfig


class JobSpec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    result: Path


class PrepareSpec(JobSpec):
    """rlcore.jobs.prepare: source -> DatasetRef with original images."""

    source: str  # as written in the experiment
    source_path: Path | None  # local file or folder; None: ``source`` is a Hugging Face id with @split, or synthetic
    split: Literal["train", "validation"]
    data: DataConfig
    model: ModelConfig
    datasets_dir: Path


class ResizeSpec(JobSpec):
    """rlcore.jobs.resize: DatasetRef with original images -> DatasetRef with images on the model's patch grid."""

    dataset: DatasetRef
    data: DataConfig
    model: ModelConfig
    datasets_dir: Path
    processes: int


class MixSpec(JobSpec):
    """rlcore.jobs.mix: the resized dataset of each source of a mixture -> one DatasetRef."""

    parts: dict[str, DatasetRef]  # by name of the source
    data: DataConfig
    datasets_dir: Path


class DuplicatesSpec(JobSpec):
    """rlcore.jobs.duplicates: training and evaluation data -> DuplicatesRef."""

    train: DatasetRef
    evaluation: DatasetRef
    out_dir: Path
    threads: int


class BootstrapSpec(JobSpec):
    """rlcore.jobs.bootstrap: ModelConfig -> ModelRef, a local folder."""

    model: ModelConfig
    models_dir: Path
    pupil: ModelRef | None = None  # the policy that the model teaches: both must have the same tokens
    trust_pupil: bool = False  # run Python code that comes with the policy


class CheckModelSpec(JobSpec):
    """rlcore.jobs.check_model: ModelRef -> ModelCheck."""

    experiment: ExperimentConfig
    model: ModelRef
    with_engine: bool = True  # compare vLLM as well


class EvaluationPart(BaseModel):
    """One dataset of an evaluation."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    experiment: ExperimentConfig  # parts differ only in data, reward and evaluation
    dataset: DatasetRef
    out_dir: Path  # gets completions.parquet and then report.json


class EvaluateSpec(JobSpec):
    """rlcore.jobs.evaluate: policy and datasets -> EvalReports, with one start of the engines."""

    policy: CheckpointRef | ModelRef | EndpointRef
    base: ModelRef | None  # tokenizer, processor and architecture of the policy; None: an endpoint
    parts: tuple[EvaluationPart, ...]


class MergeSpec(JobSpec):
    """rlcore.jobs.merge: checkpoint -> ModelRef, verified with transformers and vLLM."""

    experiment: ExperimentConfig
    checkpoint: CheckpointRef
    base: ModelRef
    dataset: DatasetRef  # has the images of the probe
    models_dir: Path

    @property
    def out(self) -> Path:
        """The folder of the merged model."""
        return self.models_dir / f"merged-{self.checkpoint.run_id}-step-{self.checkpoint.step}"


class ServeSpec(JobSpec):
    """rlcore.jobs.serve: vLLM's OpenAI-compatible server of a model. Its files are next to ``result``; it has none."""

    experiment: ExperimentConfig  # prompts, limits, precision
    model: str  # a merged model, or the model that the run of ``checkpoint`` started from
    checkpoint: CheckpointRef | None = None  # has adapters; None: the model alone
    name: str
    host: str
    port: int
    key_variable: str | None = None  # environment variable with the key that clients must send
    plain: bool = False  # without the prompt template and the system prompt of training
    gpu_memory_utilization: float
    words: tuple[str, ...] = ()  # further options of vLLM's server


class ExportSpec(JobSpec):
    """rlcore.jobs.export: a merged model -> ModelRef, a folder in another dtype."""

    model: ModelRef
    out: Path
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    trust_remote_code: bool = False


class JobError(BaseModel):
    """The error of a failed job, so that the task can raise it."""

    model_config = ConfigDict(frozen=True)

    kind: str  # class name in rlcore.errors, or another exception's name
    message: str
    traceback: str


def read_error(result: Path) -> JobError | None:
    """The error that a failed job wrote next to ``result``, or None."""
    path = Path(f"{result}.error")
    return JobError.model_validate(json.loads(path.read_text())) if path.exists() else None


_TINY_SOURCES = ("models/tiny*.py", "data/tiny.py", "data/synthetic/*.py")


def tiny_folder(models_dir: Path, config: TinyModelConfig) -> Path:
    """The folder of the tiny policy with this configuration, made by this version of the code."""
    digest = hashlib.sha256(config.model_dump_json().encode())
    for pattern in _TINY_SOURCES:
        for file in sorted(Path(__file__).parent.glob(pattern)):
            digest.update(file.read_bytes())
    return models_dir / f"tiny-{digest.hexdigest()[:16]}"
