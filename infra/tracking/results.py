"""Read runs back from MLflow, for notebooks and reports: parameters, curves, artifacts."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Run as MlflowRun
from mlflow.entities import ViewType
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID

from infra.errors import RegistryError
from infra.tracking.tracker import RUN_TAG

_PAGE = 1000


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
    """What a tracking server or database holds."""

    def __init__(self, uri: str) -> None:
        self._client = MlflowClient(tracking_uri=uri, registry_uri=uri)

    def run(self, run_id: str) -> RunData:
        """The run or ablation of this name.

        Raises:
            RegistryError: there is none.
        """
        found = self._search(f"tags.`{RUN_TAG}` = '{run_id}'")
        if not found:
            raise RegistryError(f"MLflow holds no run {run_id!r}. Look its name up on MLflow's page, or in data/runs.")
        return found[0]

    def below(self, parent: RunData) -> list[RunData]:
        """The runs below one, by name."""
        found = self._search(f"tags.`{MLFLOW_PARENT_RUN_ID}` = '{parent.mlflow_run_id}'")
        return sorted(found, key=lambda run: run.name)

    def latest(self, experiment: str, count: int) -> list[RunData]:
        """The latest training runs of an experiment, the newest first; what only bundles others is left out."""
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
    """Parameters that are not the same in all runs: the value in each, ``-`` where a run has none."""
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
