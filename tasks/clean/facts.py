"""Who refers to what in the data folder: runs, ablations, jobs, MLflow's registry and prefect.yaml. Writes nothing.

What cannot be read is never taken for unused: its run counts as unfinished, and what it may refer to stays.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from infra.files import now_of
from infra.settings import Settings
from infra.store.disk import usage_of
from infra.tracking.results import RegisteredVersion, known_runs, read_text, registered_versions
from rlcore.ablation.plan import AblationPlan
from rlcore.artifacts import DatasetRef
from rlcore.config import ExperimentConfig, read_experiment
from rlcore.data.prepare.folder import resized_key
from rlcore.errors import RlflowError
from rlcore.segment.lease import holder_alive
from rlcore.segment.store import checkpoint_name
from rlcore.specs import ResizeSpec
from tasks.champion import evaluations
from tasks.clean.decide import DAY_SECONDS, AblationFacts, RunFacts, UserFacts, VersionFacts
from tasks.experiments import PREFECT_YAML, experiment_values
from tasks.lineage import Lineage, Origin, artifact_name, read_duplicates, read_origins
from tasks.run import Driver, Run, read_fork

_JOB_DAYS = 1  # no job is silent for longer
UNREADABLE = (RlflowError, ValueError, KeyError, TypeError, AttributeError, OSError)  # pydantic's is a ValueError


_TOP = frozenset({"datasets", "duplicates", "models", "evaluations", "downloads", "jobs", "runs", "ablations"})


@dataclass(frozen=True, slots=True)
class Keys:
    """Paths as keys: relative to the data folder, with forward slashes."""

    data_dir: Path

    def of(self, path: Path) -> str:
        return path.relative_to(self.data_dir).as_posix()

    def among(self, paths: Iterable[str | Path]) -> frozenset[str]:
        """The keys of those that are in the data folder, or would be if it was at another place when they were written:
        it may have been moved, or be mounted elsewhere. Relative paths count from here and from the repository."""
        keys: set[str] = set()
        for path in map(Path, paths):
            for tried in (Path.cwd() / path, PREFECT_YAML.parent / path):
                if tried.is_relative_to(self.data_dir):
                    keys.add(self.of(tried))
            tops = [place for place, part in enumerate(path.parts) if part in _TOP]
            keys |= {Path(*path.parts[place:]).as_posix() for place in tops}
        return frozenset(keys)


def is_alive(folder: Path) -> bool:
    """Whether a trainer or a flow works on the run or ablation in ``folder``. What cannot be told counts as alive.

    The process of a finished one may live on, such as a notebook's. When it continues the run, it is a recent use.
    """
    try:
        if holder_alive(folder / "lease.json") is not None:
            return True
        return not (folder / "finished").exists() and any(driver.is_running() for driver in _drivers(folder))
    except UNREADABLE:
        return True


def _drivers(folder: Path) -> list[Driver]:
    path = folder / "drivers.jsonl"
    return [Driver.model_validate_json(line) for line in path.read_text().splitlines()] if path.exists() else []


def _flow_runs(folder: Path) -> set[str]:
    return {driver.flow_run_id for driver in _drivers(folder) if driver.flow_run_id is not None}


def _mlflow_id(folder: Path) -> str | None:
    """None: no MLflow run, or a damaged note of it, which the next start of the run finds again."""
    with suppress(*UNREADABLE):
        return str(json.loads((folder / "mlflow.json").read_bytes())["mlflow_run_id"])
    return None


class References:
    """Reads all facts about one data folder."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._keys = Keys(settings.data_dir)
        self._resized = dict(self._raw_datasets())

    def runs(self) -> list[RunFacts]:
        """
        Raises:
            ServerError, RegistryError: MLflow does not tell which runs it holds.
        """
        folders = [path.parent for path in sorted(self._settings.runs_dir.glob("*/experiment.json"))]
        ids = {folder: _mlflow_id(folder) for folder in folders}
        wanted = [name for name in ids.values() if name is not None]
        known = {None, *known_runs(self._settings.tracking_uri, wanted)}
        return [replace(self._run(folder), registry_known=ids[folder] in known) for folder in folders]

    def ablations(self) -> list[AblationFacts]:
        return [self._ablation(path.parent) for path in sorted(self._settings.ablations_dir.glob("*/plan.json"))]

    def versions(self) -> list[VersionFacts]:
        """Every version in the registry that is in use: neither archived nor deleted, or with an alias.

        Raises:
            ServerError, RegistryError: MLflow does not tell.
        """
        known = registered_versions(self._settings.tracking_uri)
        return [self._version(item) for item in known if item.aliases or not item.archived]

    def jobs_at_work(self) -> list[UserFacts]:
        """Jobs without a result, with all paths in their specs."""
        return list(self._jobs())

    def experiments(self) -> list[UserFacts]:
        """Experiments of prefect.yaml, which may start from a merged model."""
        return [UserFacts(name, self._named(_texts(values))) for name, values in experiment_values().items()]

    def _run(self, folder: Path) -> RunFacts:
        alive, finished = is_alive(folder), (folder / "finished").exists()
        try:
            experiment = read_experiment(folder / "experiment.json")
            run = Run(run_id=folder.name, run_dir=folder, experiment=experiment)
            fork, marker, done = read_fork(run), run.ablation_marker, evaluations(run)
            own = [folder / "checkpoints" / checkpoint_name(item.report.step) for item in done]
            rows = [path for item in done for path in (item.report.table, item.report.policy)]
            duplicates = self._keys.among(item.path for item in read_duplicates(run))
            uses = self._of_origins(read_origins(folder)) | self._of_experiment(experiment) | duplicates
            return RunFacts(
                run_id=folder.name,
                alive=alive,
                finished=finished,
                ablation=marker.read_text().strip() if marker.exists() else None,
                uses=uses | _flow_runs(folder),
                leaderboard=self._keys.among([*own, *rows]),
                trunk=None if fork is None else f"runs/{fork.run_id}/checkpoints/{checkpoint_name(fork.step)}",
            )
        except UNREADABLE:
            return RunFacts(run_id=folder.name, alive=alive, finished=False, readable=False)

    def _ablation(self, folder: Path) -> AblationFacts:
        alive, finished = is_alive(folder), (folder / "finished").exists()
        try:
            plan = AblationPlan.model_validate_json((folder / "plan.json").read_bytes())
            uses = _flow_runs(folder)
            for point in plan.points:
                uses |= self._of_experiment(point.experiment)
            if plan.settings.trunk is not None:
                trunk = plan.settings.trunk.rpartition("@")[0]
                uses.add(f"runs/{trunk}/checkpoints/{checkpoint_name(plan.settings.trunk_step)}")
            for path in (folder / "results").glob("*.json"):
                report = json.loads(path.read_bytes()).get("report") or {}
                uses |= self._keys.among(filter(None, (report.get("table"), report.get("policy"))))
            return AblationFacts(folder.name, alive, finished, uses=frozenset(uses))
        except UNREADABLE:
            return AblationFacts(folder.name, alive, finished=False, readable=False)

    def _version(self, version: RegisteredVersion) -> VersionFacts:
        named = (version.tags.get("rlflow.path"), version.tags.get("rlflow.checkpoint"))
        uses = self._keys.among(filter(None, named)) | self._of_origins(self._origins(version))
        return VersionFacts(str(version), version.tags.get("rlflow.run_id"), uses)

    def _origins(self, version: RegisteredVersion) -> Iterable[Origin]:
        """From the run's folder, or from the lineage in MLflow if it is not here."""
        folder = self._settings.runs_dir / version.tags.get("rlflow.run_id", "-")
        if (folder / "origins.jsonl").exists():
            with suppress(*UNREADABLE):
                return read_origins(folder)
        name = artifact_name(version.name, version.version)
        text = read_text(self._settings.tracking_uri, version.mlflow_run_id, name) if version.mlflow_run_id else None
        return Lineage.model_validate_json(text).origins if text is not None else ()

    def _jobs(self) -> Iterator[UserFacts]:
        now = now_of(self._settings.data_dir)
        for spec in sorted(self._settings.jobs_dir.glob("*/spec.json")):
            folder = spec.parent
            ended = (folder / "result.json").exists() or (folder / "result.json.error").exists()
            if ended or now - usage_of(folder).newest > _JOB_DAYS * DAY_SECONDS:
                continue
            with suppress(*UNREADABLE):
                paths = self._keys.among(_texts(json.loads(spec.read_bytes())))
                yield UserFacts(folder.name, paths | {self._keys.of(folder)})

    def _of_origins(self, origins: Iterable[Origin]) -> frozenset[str]:
        """Datasets, with the original images that they were made from, and models."""
        paths: list[str | Path] = []
        for origin in origins:
            paths += [ref.path for ref in (origin.base, origin.teacher) if ref is not None]
            for data in (origin.train, origin.validation):
                paths += [data.path, *(self._settings.datasets_dir / part.digest for part in data.sources)]
        keys = self._keys.among(paths)
        return keys | {raw for raw, resized in self._resized.items() if resized in keys}

    def _of_experiment(self, experiment: ExperimentConfig) -> frozenset[str]:
        return self._named(value for value in experiment.flat().values() if isinstance(value, str))

    def _named(self, values: Iterable[str]) -> frozenset[str]:
        """Paths among the values of an experiment, such as a merged model."""
        return self._keys.among(Path(value).expanduser() for value in values if value.count("/") > 0)

    def _raw_datasets(self) -> Iterator[tuple[str, str]]:
        """Datasets with original images, and the dataset that was made from them by resizing."""
        for report in self._settings.datasets_dir.glob("raw-*/report.json"):
            with suppress(*UNREADABLE):
                # The name depends on the digest alone.
                known: dict[str, Any] = {"digest": json.loads(report.read_bytes())["digest"]}
                spec: dict[str, Any] = {"dataset": DatasetRef.model_construct(**known)}
                name = resized_key(ResizeSpec.model_construct(**spec))
                yield self._keys.of(report.parent), self._keys.of(self._settings.datasets_dir / name)


def _texts(value: object) -> Iterator[str]:
    """All texts in parsed JSON or YAML."""
    match value:
        case str():
            yield value
        case dict():
            for item in value.values():
                yield from _texts(item)
        case list():
            for item in value:
                yield from _texts(item)
