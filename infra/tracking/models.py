"""Models in MLflow: the checkpoints of a run, and registered versions that ``mlflow.pyfunc`` loads.

MLflow holds no weights. A checkpoint is metadata alone; a registered version has a few small files that refer to the
folder with the weights.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlflow.pyfunc
from mlflow import MlflowClient
from mlflow.entities import LoggedModelOutput
from mlflow.exceptions import MlflowException
from mlflow.models import Model, ModelSignature
from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST, ErrorCode
from mlflow.types import ColSpec, DataType, ParamSchema, ParamSpec, Schema, TensorSpec
from mlflow.types.schema import Array, Object, Property
from mlflow.utils.mlflow_tags import MLFLOW_MODEL_IS_EXTERNAL

_PATH_TAG = "rlflow.path"
_CHECKPOINT_TAG = "rlflow.manifest"  # sha256 of a checkpoint's manifest
_PARAM_TYPES = {int: DataType.long, float: DataType.double}

# it warns in each registration that an environment made by uv has no pip
logging.getLogger("mlflow.utils.environment").setLevel(logging.ERROR)


@dataclass(frozen=True, slots=True)
class Pyfunc:
    """What ``mlflow.pyfunc.load_model`` reads of a registered version."""

    loader_module: str  # its ``_load_pyfunc`` gets a copy of ``data``, and ``config``
    data: Path  # a folder of small files
    config: Mapping[str, str | bool]  # the loader's options; callers may change their values
    example: Mapping[str, object]  # the columns of one input
    params: Mapping[str, int | float]  # of ``predict``, with their defaults
    requirements: Sequence[str]  # packages, as pip writes them


@dataclass(frozen=True, slots=True)
class Registered:
    """A version in the registry, and its logged model."""

    version: str
    model_id: str


class Models:
    """The models of one MLflow run."""

    def __init__(self, client: MlflowClient, experiment_id: str, mlflow_run_id: str) -> None:
        self._client, self._experiment_id, self._mlflow_run_id = client, experiment_id, mlflow_run_id

    def register(
        self, *, name: str, path: Path, tags: Mapping[str, str], alias: str, description: str, pyfunc: Pyfunc
    ) -> Registered:
        """The version of this run and folder, a new one if there is none, under ``alias``."""
        with contextlib.suppress(MlflowException):  # it exists; looking first would be a race
            self._client.create_registered_model(name)
        registered = self._find(name, path) or self._create(name, path, tags, description, pyfunc)
        self._client.set_registered_model_alias(name, alias, registered.version)
        return registered

    def checkpoint(self, *, name: str, step: int, manifest: str, tags: Mapping[str, str]) -> str:
        """The id of the logged model that stands for a checkpoint; the same one for the same manifest."""
        known = self._client.search_logged_models(
            [self._experiment_id],
            f"source_run_id = '{self._mlflow_run_id}' AND tags.`{_CHECKPOINT_TAG}` = '{manifest}'",
            max_results=1,
        )
        if known:
            return str(known[0].model_id)
        marks = {**tags, "rlflow.step": str(step), _CHECKPOINT_TAG: manifest, MLFLOW_MODEL_IS_EXTERNAL: "true"}
        model = self._client.create_logged_model(
            self._experiment_id, name=name, source_run_id=self._mlflow_run_id, tags=marks, model_type="checkpoint"
        )
        self._client.finalize_logged_model(model.model_id, "READY")
        self._client.log_outputs(self._mlflow_run_id, [LoggedModelOutput(model.model_id, step)])
        return str(model.model_id)

    def _find(self, name: str, path: Path) -> Registered | None:
        for item in self._client.search_model_versions(f"name = '{name}'"):
            ours = item.tags.get(_PATH_TAG) == str(path) and item.run_id == self._mlflow_run_id
            if ours and (model_id := _loadable(self._client, item.source)) is not None:
                return Registered(str(item.version), model_id)
        return None

    def _create(self, name: str, path: Path, tags: Mapping[str, str], description: str, pyfunc: Pyfunc) -> Registered:
        marks = {**tags, _PATH_TAG: str(path)}
        model = self._client.create_logged_model(
            self._experiment_id, name=name, source_run_id=self._mlflow_run_id, tags=marks, model_type="merged"
        )
        with tempfile.TemporaryDirectory(prefix="rlflow-") as folder:
            written = Path(folder, "model")
            _write(written, pyfunc, Model(run_id=self._mlflow_run_id, model_id=model.model_id))
            self._client.log_model_artifacts(model.model_id, str(written))
        self._client.finalize_logged_model(model.model_id, "READY")
        version = self._client.create_model_version(
            name,
            source=f"models:/{model.model_id}",
            model_id=model.model_id,
            run_id=self._mlflow_run_id,
            tags=marks,
            description=description,
        )
        if "rlflow.step" in tags:
            output = LoggedModelOutput(model.model_id, int(tags["rlflow.step"]))
            self._client.log_outputs(self._mlflow_run_id, [output])
        return Registered(str(version.version), str(model.model_id))


def _loadable(client: MlflowClient, source: str | None) -> str | None:
    """The logged model's id behind a version. None: it is gone, or was registered before versions could be loaded."""
    model_id = str(source).removeprefix("models:/")
    try:
        model = client.get_logged_model(model_id)
    except MlflowException as error:
        if error.error_code == ErrorCode.Name(RESOURCE_DOES_NOT_EXIST):
            return None
        raise
    return None if MLFLOW_MODEL_IS_EXTERNAL in model.tags else model_id


def _write(folder: Path, pyfunc: Pyfunc, model: Model) -> None:
    import pandas

    mlflow.pyfunc.save_model(
        path=folder,
        loader_module=pyfunc.loader_module,
        data_path=str(pyfunc.data),
        mlflow_model=model,
        signature=_signature(pyfunc),
        input_example=pandas.DataFrame([pyfunc.example]),
        model_config=dict(pyfunc.config),
        pip_requirements=list(pyfunc.requirements),
    )


def _signature(pyfunc: Pyfunc) -> ModelSignature:
    message = Object([Property("role", DataType.string), Property("text", DataType.string)])
    columns: list[ColSpec | TensorSpec] = [
        ColSpec(DataType.string, "question"),
        ColSpec(Array(DataType.string), "images", required=False),
        ColSpec(Array(message), "context", required=False),
        ColSpec(DataType.string, "source", required=False),
        ColSpec(DataType.string, "chat_template_arguments", required=False),
    ]
    answers: list[ColSpec | TensorSpec] = [
        ColSpec(DataType.string, "completion"),
        ColSpec(DataType.string, "finish_reason"),
        ColSpec(DataType.long, "num_tokens"),
    ]
    params = [ParamSpec(name, _PARAM_TYPES[type(value)], value) for name, value in pyfunc.params.items()]
    return ModelSignature(Schema(columns), Schema(answers), ParamSchema(params))
