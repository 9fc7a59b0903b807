"""Writes to MLflow: one MLflow run per training run, across segments and retries, with each step exactly once.

MLflow cannot delete or overwrite a metric point, but stores a repeated point with the same timestamp once. So a step is
published only when no resume can undo it, always with its recorded timestamp, and the last acknowledged step is stored
in the run's folder.
"""

from __future__ import annotations

import contextlib
import json
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Protocol

import mlflow
from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, LifecycleStage, Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST, ErrorCode
from mlflow.store.db.db_types import DATABASE_ENGINES
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID, MLFLOW_RUN_NOTE
from requests import RequestException

from infra.errors import RegistryError, ServerError, ServerRefusedError, StorageError
from infra.files import locked, write_atomically
from infra.logs import get_logger, without_password
from infra.store.s3_errors import OBJECT_STORE_ERRORS, storage_error
from infra.tracking.models import Models, Pyfunc, Registered
from infra.tracking.traces import Rollout, log_traces

RUN_TAG = "rlflow.run_id"
DRIFT_TAG = "rlflow.param_drift"
_MAX_PARAM_CHARACTERS = 6000
_MAX_DIGEST_CHARACTERS = 36
_MAX_TAG_CHARACTERS = 8000


class StepMetrics(Protocol):
    """The metrics of one optimizer step: a line of the metric journal."""

    @property
    def step(self) -> int: ...
    @property
    def timestamp_ms(self) -> int: ...  # fixed when the step was recorded, never at publishing
    @property
    def metrics(self) -> Mapping[str, float]: ...


@dataclass(frozen=True, slots=True)
class _State:
    """``mlflow.json`` in a run's folder."""

    uri: str  # without a password
    mlflow_run_id: str
    published_step: int


def check_reachable(uri: str, timeout_seconds: float = 5.0) -> None:
    """Raise ServerError if an MLflow server does not answer in time. Other stores need no server."""
    if not uri.startswith(("http://", "https://")):
        return
    try:
        with urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=timeout_seconds):
            return
    except OSError as error:
        raise ServerError(
            f"no MLflow server answers at {without_password(uri)} within {timeout_seconds:g} s ({error}). Start it, "
            "correct RLFLOW_MLFLOW_URI, or unset that variable to use SQLite under the data folder."
        ) from error


@contextlib.contextmanager
def _translating_errors() -> Iterator[None]:
    """Translate errors of MLflow and its artifact store.

    Raises:
        ServerError: the server or its database does not answer, which may pass.
        ServerRefusedError: the server refuses.
        StorageError: the object store does not accept artifacts; refusals are permanent.
    """
    try:
        yield
    except (MlflowException, RequestException) as error:  # RequestException: an upload of artifacts
        where, status = without_password(mlflow.get_tracking_uri()), _status(error)
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR or status == HTTPStatus.TOO_MANY_REQUESTS:
            raise ServerError(f"MLflow at {where} does not answer: {error}") from error
        raise ServerRefusedError(f"MLflow at {where} refuses: {error}") from error
    except OBJECT_STORE_ERRORS as error:
        raise storage_error("writing an artifact of MLflow's", error) from None  # its traceback may name keys


def _status(error: MlflowException | RequestException) -> int:
    if isinstance(error, MlflowException):
        return int(error.get_http_status_code())  # type: ignore[no-untyped-call]
    return HTTPStatus.INTERNAL_SERVER_ERROR if error.response is None else error.response.status_code


class Tracker:
    """The MLflow run of one training run."""

    def __init__(self, client: MlflowClient, uri: str, experiment_id: str, run_dir: Path, state: _State) -> None:
        self._client = client
        self._uri = uri
        self._experiment_id = experiment_id
        self._run_dir = run_dir
        self._state = state
        self._models = Models(client, experiment_id, state.mlflow_run_id)

    @classmethod
    def open(cls, *, uri: str, artifacts_uri: str, experiment: str, run_id: str, run_dir: Path) -> Tracker:
        """Find the MLflow run tagged with ``run_id``, or create it; safe to call from several processes.

        ``artifacts_uri`` is where a new experiment's artifacts go, unless an MLflow server at ``uri`` decides that."""
        lock_dir = run_dir
        if uri.startswith("sqlite:///"):
            lock_dir = Path(uri.removeprefix("sqlite:///")).parent
        run_dir.mkdir(parents=True, exist_ok=True)
        # MLflow's registry finds logged models by the process-wide address, and the errors above name it.
        mlflow.set_tracking_uri(uri)
        mlflow.set_registry_uri(uri)
        check_reachable(uri)
        shown = without_password(uri)
        # The lock keeps two processes from creating the same run twice.
        with _translating_errors(), locked(lock_dir / "tracking.lock"):
            client = MlflowClient(tracking_uri=uri, registry_uri=uri)  # makes the tables of a new database
            is_database = uri.partition(":")[0].partition("+")[0] in DATABASE_ENGINES
            decided = artifacts_uri if is_database else None
            experiment_id = _find_or_create_experiment(client, experiment, decided, shown)
            found = _read_state(run_dir)
            if found is None or found.uri != shown or not _run_exists(client, found.mlflow_run_id, shown):
                found = _State(shown, _find_or_create_run(client, experiment_id, run_id), published_step=0)
                _write_state(run_dir, found)
        return cls(client, uri, experiment_id, run_dir, found)

    @property
    def mlflow_run_id(self) -> str:
        return self._state.mlflow_run_id

    @property
    def published_step(self) -> int:
        """The last step that MLflow has acknowledged; 0: none, not even an evaluation before step 1."""
        return self._state.published_step

    @_translating_errors()
    def log_params(self, params: Mapping[str, object]) -> None:
        """Log ``params``. They are immutable: equal ones are skipped, changed ones go into a drift tag."""
        texts = {key: str(value)[:_MAX_PARAM_CHARACTERS] for key, value in params.items()}
        known = self._client.get_run(self.mlflow_run_id).data.params
        drift = {
            key: {"logged": known[key], "now": text} for key, text in texts.items() if known.get(key, text) != text
        }
        fresh = [Param(key, text) for key, text in texts.items() if key not in known]
        self._client.log_batch(self.mlflow_run_id, params=fresh)
        if drift:
            self._client.set_tag(self.mlflow_run_id, DRIFT_TAG, json.dumps(drift))

    @_translating_errors()
    def set_tags(self, tags: Mapping[str, str]) -> None:
        self._client.log_batch(self.mlflow_run_id, tags=[RunTag(key, value) for key, value in tags.items()])

    def as_parent(self) -> dict[str, str]:
        """The tag that puts a run of the same experiment below this one, in MLflow's pages and queries."""
        return {MLFLOW_PARENT_RUN_ID: self.mlflow_run_id}

    @_translating_errors()
    def rename(self, name: str) -> None:
        """What people see. A run is found by its tag, never by this."""
        self._client.update_run(self.mlflow_run_id, name=name)

    @_translating_errors()
    def describe(self, markdown: str) -> None:
        """What the run's page says on top, in place of what it said before."""
        self._client.set_tag(self.mlflow_run_id, MLFLOW_RUN_NOTE, markdown[:_MAX_TAG_CHARACTERS])

    @_translating_errors()
    def log_dataset(self, *, name: str, digest: str, path: str, context: str, profile: Mapping[str, int]) -> None:
        """Note a dataset as an input, under our own content digest (MLflow keeps its first 36 characters)."""
        dataset = Dataset(
            name=name,
            digest=digest[:_MAX_DIGEST_CHARACTERS],
            source_type="local",
            source=json.dumps({"uri": path}),
            profile=json.dumps(dict(profile)),
        )
        tagged = DatasetInput(dataset, tags=[InputTag("mlflow.data.context", context)])
        self._client.log_inputs(self.mlflow_run_id, datasets=[tagged])

    def publish(self, records: Iterable[StepMetrics], through_step: int) -> int:
        """Send the steps after the last acknowledged one and up to ``through_step``; harmless to repeat.

        Returns:
            the last step that MLflow has acknowledged.

        Raises:
            ServerError: MLflow did not take them; nothing is lost, publish again later.
        """
        published = self.published_step
        fresh = [item for item in records if (published < item.step or not published) and item.step <= through_step]
        points = [
            Metric(name, float(item.metrics[name]), item.timestamp_ms, item.step)
            for item in sorted(fresh, key=lambda item: item.step)
            # Rewards first, because MLflow's compare page starts with the metric that a run logged first.
            for name in sorted(item.metrics, key=lambda name: (not name.startswith("reward/"), name))
        ]
        if points:
            check_reachable(self._uri)
        try:
            self._client.log_batch(self.mlflow_run_id, metrics=points)
        except MlflowException as error:
            raise ServerError(f"MLflow at {self._state.uri} did not take the metrics: {error}") from error
        if fresh:
            last = max(item.step for item in fresh)
            self._state = _State(self._state.uri, self._state.mlflow_run_id, last)
            _write_state(self._run_dir, self._state)
        return self.published_step

    @_translating_errors()
    def log_metrics(
        self, metrics: Mapping[str, float], *, step: int, timestamp_ms: int, model_id: str | None = None
    ) -> None:
        """Log points that are not in the journal, such as an evaluation. A fixed timestamp makes repeats harmless.

        Args:
            model_id: of the logged model that the numbers are about.
        """
        points = [Metric(key, float(value), timestamp_ms, step, model_id) for key, value in metrics.items()]
        self._client.log_batch(self.mlflow_run_id, metrics=points)

    @_translating_errors()
    def steps_of(self, metric: str) -> set[int]:
        """The steps at which the run has a point of this metric."""
        return {point.step for point in self._client.get_metric_history(self.mlflow_run_id, metric)}

    @_translating_errors()
    def log_table(self, columns: Mapping[str, Sequence[object]], name: str) -> None:
        """Log a table artifact. ``name`` must be new, because MLflow would append to an existing table."""
        self._client.log_table(self.mlflow_run_id, {key: list(values) for key, values in columns.items()}, name)

    @_translating_errors()
    def log_rollouts(self, rollouts: Sequence[Rollout]) -> int:
        """Write the rollouts that MLflow lacks as traces of this run. Returns their number."""
        check_reachable(self._uri)
        return log_traces(self._client, self._experiment_id, self.mlflow_run_id, rollouts)

    @_translating_errors()
    def log_file(self, path: Path, folder: str | None = None) -> None:
        """
        Raises:
            StorageError: it is a link, and what it leads to may not be the run's to show.
        """
        if path.is_symlink():
            raise StorageError(f"{path} is a link and does not become an artifact. Replace it by its file.")
        self._client.log_artifact(self.mlflow_run_id, str(path), folder)

    @_translating_errors()
    def log_text(self, text: str, name: str) -> None:
        self._client.log_text(self.mlflow_run_id, text, name)

    @_translating_errors()
    def artifact_names(self, folder: str) -> list[str]:
        return [item.path for item in self._client.list_artifacts(self.mlflow_run_id, folder)]

    @_translating_errors()
    def resume(self) -> None:
        """Mark the run as running again when it is continued."""
        self._client.update_run(self.mlflow_run_id, status="RUNNING")

    @_translating_errors()
    def finish(self, status: str) -> None:
        """Close the run: FINISHED, FAILED or KILLED. MLflow has no heartbeat and does not do this itself."""
        self._client.set_terminated(self.mlflow_run_id, status)

    @_translating_errors()
    def register_model(
        self, *, name: str, path: Path, tags: Mapping[str, str], alias: str, description: str, pyfunc: Pyfunc
    ) -> Registered:
        """Register the verified folder ``path`` by reference (weights are not copied); move ``alias`` to it.

        Returns:
            the same version if the run registers the same folder again.

        Raises:
            RegistryError: the folder is not there.
        """
        if not (path / "config.json").exists():
            raise RegistryError(f"{path} has no config.json, so it is no merged model. Merge first.")
        return self._models.register(
            name=name, path=path, tags=tags, alias=alias, description=description, pyfunc=pyfunc
        )

    @_translating_errors()
    def checkpoint_model(self, *, name: str, step: int, manifest: str, tags: Mapping[str, str]) -> str:
        """The id of the logged model that stands for a checkpoint: metadata without files. Safe to repeat, also by
        several processes."""
        with locked(self._run_dir / "models.lock"):
            return self._models.checkpoint(name=name, step=step, manifest=manifest, tags=tags)

    @_translating_errors()
    def tags_at(self, name: str, alias: str) -> dict[str, str] | None:
        """Tags of the registered version at ``alias``. None: there is no such model or alias."""
        try:
            version = self._client.get_registered_model(name).aliases.get(alias)
            return None if version is None else dict(self._client.get_model_version(name, version).tags)
        except MlflowException as error:
            if error.error_code == ErrorCode.Name(RESOURCE_DOES_NOT_EXIST):
                return None
            raise  # a refusal does not mean that the model is missing


def _find_or_create_experiment(client: MlflowClient, name: str, artifacts_uri: str | None, shown: str) -> str:
    """
    Raises:
        RegistryError: the experiment is deleted. MLflow keeps its name, so no other can be made.
    """
    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            location = f"{artifacts_uri}/{name}" if artifacts_uri else None
            return str(client.create_experiment(name, artifact_location=location))
        except MlflowException:  # another machine may have been faster
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    if found.lifecycle_stage == LifecycleStage.DELETED:
        raise RegistryError(
            f"the MLflow experiment {name!r} is deleted, so no run can be added to it. Restore it: "
            f"MLFLOW_TRACKING_URI={shown} .venv/bin/mlflow experiments restore --experiment-id {found.experiment_id}"
        )
    return str(found.experiment_id)


def _find_or_create_run(client: MlflowClient, experiment_id: str, run_id: str) -> str:
    found = client.search_runs([experiment_id], f"tags.`{RUN_TAG}` = '{run_id}'", max_results=1)
    if found:
        return str(found[0].info.run_id)
    return str(client.create_run(experiment_id, tags={RUN_TAG: run_id}, run_name=run_id).info.run_id)


def _run_exists(client: MlflowClient, mlflow_run_id: str, shown: str) -> bool:
    """
    Raises:
        RegistryError: the run is deleted, and can be restored.
    """
    try:
        found = client.get_run(mlflow_run_id)
    except MlflowException as error:
        if _status(error) == HTTPStatus.NOT_FOUND:
            return False
        raise  # an outage does not mean that the run is missing
    if found.info.lifecycle_stage == LifecycleStage.DELETED:
        raise RegistryError(
            f"the MLflow run {mlflow_run_id} is deleted, so nothing can be added to it. Restore it: "
            f"MLFLOW_TRACKING_URI={shown} .venv/bin/mlflow runs restore --run-id {mlflow_run_id}"
        )
    return True


def _read_state(run_dir: Path) -> _State | None:
    """None also for a damaged file: the run is found again by its tag, and resent steps are stored once."""
    path = run_dir / "mlflow.json"
    try:
        values = json.loads(path.read_bytes())
        return _State(str(values["uri"]), str(values["mlflow_run_id"]), int(values["published_step"]))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        get_logger().warning("%s is damaged (%r): MLflow is asked for the run, and gets every step again", path, error)
        return None


def _write_state(run_dir: Path, state: _State) -> None:
    write_atomically(run_dir / "mlflow.json", json.dumps(asdict(state)))
