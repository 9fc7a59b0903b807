"""Registered models, looked up: what MLflow knows of a version, and the run behind it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from infra.errors import RegistryError
from infra.tracking.tracker import check_reachable

_ANSWER_SECONDS = 5.0
_NAME = re.compile(r"^(?P<name>[^@/]+)(@(?P<alias>[^@/]+)|/(?P<version>\d+))?$")


@dataclass(frozen=True, slots=True)
class RegisteredVersion:
    name: str
    version: str
    aliases: tuple[str, ...]
    mlflow_run_id: str
    tags: dict[str, str]


def find_model(uri: str, words: str) -> RegisteredVersion:
    """The version that ``NAME``, ``NAME@ALIAS`` or ``NAME/VERSION`` means; a name alone is its newest one.

    Raises:
        RegistryError: there is no such model, alias or version; says which there are.
        ServerError: MLflow does not answer.
    """
    asked = _NAME.match(words)
    if asked is None:
        raise RegistryError(f"model {words!r}: write NAME, NAME@ALIAS or NAME/VERSION.")
    check_reachable(uri, _ANSWER_SECONDS)
    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    name = asked["name"]
    versions = sorted(client.search_model_versions(f"name = '{name}'"), key=lambda item: int(item.version))
    if not versions:
        known = ", ".join(sorted(model.name for model in client.search_registered_models())) or "none"
        raise RegistryError(f"no registered model {name!r} in MLflow at {uri}. Found: {known}.")
    aliases = dict(client.get_registered_model(name).aliases)
    wanted = aliases.get(asked["alias"]) if asked["alias"] else asked["version"] or versions[-1].version
    for version in versions:
        if str(version.version) == str(wanted):
            return _found(version, aliases)
    have = ", ".join(str(version.version) for version in versions)
    raise RegistryError(f"{words}: {name} has the versions {have} and the aliases {aliases or 'none'}.")


def read_text(uri: str, mlflow_run_id: str, name: str) -> str | None:
    """A text artifact of a run; None: it has none of that name."""
    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    folder = name.rpartition("/")[0]
    try:
        if name not in [item.path for item in client.list_artifacts(mlflow_run_id, folder or None)]:
            return None
        with open(client.download_artifacts(mlflow_run_id, name)) as file:
            return file.read()
    except MlflowException as error:
        raise RegistryError(f"run {mlflow_run_id} in MLflow at {uri}: {error}") from error


def _found(version: ModelVersion, aliases: dict[str, str]) -> RegisteredVersion:
    number = str(version.version)
    return RegisteredVersion(
        name=version.name,
        version=number,
        aliases=tuple(sorted(alias for alias, target in aliases.items() if str(target) == number)),
        mlflow_run_id=str(version.run_id),
        tags=dict(version.tags),
    )
