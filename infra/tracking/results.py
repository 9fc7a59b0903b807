"""Read MLflow: runs with their parameters, curves and artifacts, and registered models."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Run as MlflowRun
from mlflow.entities import ViewType
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST, ErrorCode
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID

from infra.errors import RegistryError
from infra.logs import without_password
from infra.tracking.tracker import RUN_TAG, check_reachable

_PAGE = 1000
_NAME = re.compile(r"^(?P<name>[^@/]+)(@(?P<alias>[^@/]+)|/(?P<version>\d+))?$")


@dataclass(frozen=True, slots=True)
class RunData:
    """One run as MLflow holds it."""

    mlflow_run_id: str
    name: str
    status: str
    params: Mapping[str, str]
    tags: Mapping[str, str]
    metrics: Mapping[str, float]  # the latest value of each


class Results:
    """Runs in a tracking server or database."""

    def __init__(self, uri: str) -> None:
        self._client = MlflowClient(tracking_uri=uri, registry_uri=uri)

    def run(self, run_id: str) -> RunData:
        """The run or ablation with this name.

        Raises:
            RegistryError: it does not exist.
        """
        found = self._search(f"tags.`{RUN_TAG}` = '{run_id}'")
        if not found:
            raise RegistryError(f"MLflow holds no run {run_id!r}. Look its name up on MLflow's page, or in data/runs.")
        return found[0]

    def below(self, parent: RunData) -> list[RunData]:
        """The child runs of a run, sorted by name."""
        found = self._search(f"tags.`{MLFLOW_PARENT_RUN_ID}` = '{parent.mlflow_run_id}'")
        return sorted(found, key=lambda run: run.name)

    def latest(self, experiment: str, count: int) -> list[RunData]:
        """The latest training runs of an experiment, newest first, without parent runs."""
        runs = self._search(f"tags.`{RUN_TAG}` LIKE '%'", experiment)
        parents = {run.tags[MLFLOW_PARENT_RUN_ID] for run in runs if MLFLOW_PARENT_RUN_ID in run.tags}
        return [run for run in runs if run.mlflow_run_id not in parents][:count]

    def history(self, run: RunData, metric: str) -> dict[int, float]:
        """Step to value."""
        points = self._client.get_metric_history(run.mlflow_run_id, metric)
        return {point.step: point.value for point in sorted(points, key=lambda point: point.timestamp)}

    def files(self, run: RunData, folder: str = "") -> list[str]:
        """Paths of the artifacts in a folder."""
        return [item.path for item in self._client.list_artifacts(run.mlflow_run_id, folder)]

    def file(self, run: RunData, path: str) -> Path:
        """A local copy of an artifact."""
        return Path(self._client.download_artifacts(run.mlflow_run_id, path, tempfile.mkdtemp(prefix="rlflow-")))

    def _search(self, where: str, experiment: str | None = None) -> list[RunData]:
        known = self._client.search_experiments()
        ids = [item.experiment_id for item in known if experiment in (None, item.name)]
        runs = self._client.search_runs(ids, where, ViewType.ACTIVE_ONLY, _PAGE) if ids else []
        return [_data(run) for run in runs]


def differing(runs: Sequence[RunData]) -> dict[str, list[str]]:
    """Parameters that differ between runs: the value in each run, ``-`` if a run has none."""
    keys = sorted({key for run in runs for key in run.params})
    table = {key: [run.params.get(key, "-") for run in runs] for key in keys}
    return {key: values for key, values in table.items() if len(set(values)) > 1}


def _data(run: MlflowRun) -> RunData:
    return RunData(
        mlflow_run_id=str(run.info.run_id),
        name=str(run.info.run_name),
        status=str(run.info.status),
        params=run.data.params,
        tags=run.data.tags,
        metrics=run.data.metrics,
    )


@dataclass(frozen=True, slots=True)
class RegisteredVersion:
    name: str
    version: str
    mlflow_run_id: str
    tags: dict[str, str]
    aliases: tuple[str, ...] = ()
    archived: bool = False

    def __str__(self) -> str:
        return f"{self.name}/{self.version}" + "".join(f" @{alias}" for alias in self.aliases)


def known_runs(uri: str, mlflow_run_ids: Sequence[str]) -> set[str]:
    """Those of the runs that the MLflow at ``uri`` holds, deleted ones included.

    Raises:
        ServerError: MLflow does not answer.
        RegistryError: MLflow refuses.
    """
    if not mlflow_run_ids or not _exists(uri):
        return set()
    check_reachable(uri)
    client, known = MlflowClient(tracking_uri=uri, registry_uri=uri), set()
    for name in mlflow_run_ids:
        try:
            known.add(str(client.get_run(name).info.run_id))
        except MlflowException as error:
            if error.error_code != ErrorCode.Name(RESOURCE_DOES_NOT_EXIST):
                raise RegistryError(f"MLflow at {without_password(uri)} cannot be read: {error}") from error
    return known


def _exists(uri: str) -> bool:
    """Whether a database that is a file is there: MLflow would make it."""
    return not uri.startswith("sqlite:///") or Path(uri.removeprefix("sqlite:///")).exists()


def registered_versions(uri: str) -> list[RegisteredVersion]:
    """Every version of every registered model. None of them if the database of ``uri`` does not exist yet.

    Raises:
        ServerError: MLflow does not answer.
        RegistryError: MLflow refuses.
    """
    if not _exists(uri):
        return []
    check_reachable(uri)
    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    try:
        return [
            RegisteredVersion(
                item.name, str(item.version), str(item.run_id or ""), dict(item.tags),
                tuple(sorted(alias for alias, version in model.aliases.items() if str(version) == str(item.version))),
                archived=item.current_stage == "Archived",
            )
            for model in _pages(client.search_registered_models)
            for item in _pages(client.search_model_versions, f"name = '{model.name}'")
        ]  # fmt: skip
    except MlflowException as error:
        raise RegistryError(f"the registry of MLflow at {without_password(uri)} cannot be read: {error}") from error


def _pages(search: Callable[..., Any], *words: str) -> Iterator[Any]:
    """All results of a search that returns pages."""
    token: str | None = None
    while token != "":
        page = search(*words, page_token=token)
        yield from page
        token = page.token or ""


def find_model(uri: str, words: str) -> RegisteredVersion:
    """The registered version of ``NAME``, ``NAME@ALIAS`` or ``NAME/VERSION``; a name alone means the newest version.

    Raises:
        RegistryError: there is no such model, alias or version. The message lists the existing ones.
        ServerError: MLflow does not answer.
    """
    asked = _NAME.match(words)
    if asked is None:
        raise RegistryError(f"model {words!r}: write NAME, NAME@ALIAS or NAME/VERSION.")
    check_reachable(uri)
    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    name = asked["name"]
    versions = sorted(client.search_model_versions(f"name = '{name}'"), key=lambda item: int(item.version))
    if not versions:
        known = ", ".join(sorted(model.name for model in client.search_registered_models())) or "none"
        raise RegistryError(f"no registered model {name!r} in MLflow at {uri}. Found: {known}.")
    aliases = dict(client.get_registered_model(name).aliases)
    wanted = aliases.get(asked["alias"]) if asked["alias"] else asked["version"] or versions[-1].version
    for item in versions:
        if str(item.version) == str(wanted):
            return RegisteredVersion(name, str(item.version), str(item.run_id), dict(item.tags))
    have = ", ".join(str(item.version) for item in versions)
    raise RegistryError(f"{words}: {name} has the versions {have} and the aliases {aliases or 'none'}.")


def read_text(uri: str, mlflow_run_id: str, name: str) -> str | None:
    """A text artifact of a run, or None if it does not exist."""
    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    folder = name.rpartition("/")[0]
    try:
        if name not in [item.path for item in client.list_artifacts(mlflow_run_id, folder or None)]:
            return None
        return Path(client.download_artifacts(mlflow_run_id, name)).read_text()
    except MlflowException as error:
        raise RegistryError(f"run {mlflow_run_id} in MLflow at {uri}: {error}") from error
