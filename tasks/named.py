"""The model that a user names: a registered version, a merged folder, or a run."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from infra.settings import Settings
from infra.tracking.results import find_model, read_text
from rlcore.artifacts import CheckpointRef, ModelRef
from rlcore.config import ExperimentConfig
from rlcore.errors import ConfigError, RlflowError
from rlcore.files import VERIFIED
from rlcore.segment.store import LocalCheckpointStore, checkpoint_ref, read_manifest
from rlcore.specs import tiny_folder
from tasks.run import Run, existing_run
from tasks.store.made import fetch
from tasks.store.restore import restore_checkpoint

WAYS = (
    "a registered model (NAME@ALIAS, NAME/VERSION), the folder of a merged model, or a run (RUN, RUN:STEP) that was "
    "merged or trains adapters"
)


@dataclass(frozen=True, slots=True)
class Named:
    """A model folder, and the run that made it."""

    name: str  # for people and for clients of a server
    folder: Path  # a merged model; with ``adapters`` the model that the run started from
    experiment: ExperimentConfig
    run_id: str
    step: int
    adapters: CheckpointRef | None = None
    version: str | None = None  # in the registry, as NAME/VERSION


def find_named(words: str, settings: Settings) -> Named:
    """
    Raises:
        ConfigError: there is no such model, or its files are not on this machine and not in the store.
        RegistryError: MLflow has no such model.
    """
    path = Path(words).expanduser()
    if (path / "config.json").is_file():
        return _of_folder(path.resolve())
    run_id, _, step = words.partition(":")
    if (settings.runs_dir / run_id / "experiment.json").exists():
        return _of_run(existing_run(run_id, settings), step, settings)
    if not re.fullmatch(r"[^@/:]+(@[^@/:]+|/\d+)?", words):
        raise ConfigError(f"no model {words!r}. Allowed: {WAYS}.")
    return _registered(words, settings)


def _registered(words: str, settings: Settings) -> Named:
    version = find_model(settings.tracking_uri, words)
    tags = version.tags
    if not {"rlflow.path", "rlflow.run_id", "rlflow.step"} <= tags.keys():
        raise ConfigError(f"{words}: rlflow did not register version {version.version}. Allowed: {WAYS}.")
    folder, run_id = Path(tags["rlflow.path"]), tags["rlflow.run_id"]
    if not (folder / "config.json").exists():
        here = settings.models_dir / folder.name  # the data folder has another place on this machine
        fetch(here, settings)
        if not (here / "config.json").exists():
            raise ConfigError(
                f"{words}: the merged model is not in {folder} and not in {here}. Name its folder, set RLFLOW_STORE to "
                f"the store that has it, or merge the run again: rlflow merge {run_id}."
            )
        folder = here
    return Named(
        name=version.name,
        folder=folder,
        experiment=_experiment(run_id, version.mlflow_run_id, settings),
        run_id=run_id,
        step=int(tags["rlflow.step"]),
        version=f"{version.name}/{version.version}",
    )


def _experiment(run_id: str, mlflow_run_id: str, settings: Settings) -> ExperimentConfig:
    """Of the run's folder; of MLflow's copy where the folder is gone.

    Raises:
        ConfigError: both are gone.
    """
    try:
        return existing_run(run_id, settings).experiment
    except RlflowError as error:
        text = read_text(settings.tracking_uri, mlflow_run_id, "experiment.json")
        if text is None:
            raise ConfigError(f"the settings of run {run_id} are neither here nor in MLflow: {error}") from error
        return ExperimentConfig.model_validate_json(text)


def _of_folder(folder: Path) -> Named:
    record = folder / VERIFIED
    if not record.exists():
        raise ConfigError(f"{folder} has no {VERIFIED}, so rlflow did not merge it. Allowed: {WAYS}.")
    checkpoint = CheckpointRef.model_validate(json.loads(record.read_bytes())["checkpoint"])
    settings = Settings()
    try:
        experiment = existing_run(checkpoint.run_id, settings).experiment
    except RlflowError as error:
        raise ConfigError(
            f"{folder} was merged from run {checkpoint.run_id}, which is not on this machine, so its prompts are "
            f"unknown: {error} Name the registered model instead."
        ) from error
    return Named(experiment.name, folder, experiment, checkpoint.run_id, checkpoint.step)


def _of_run(run: Run, step: str, settings: Settings) -> Named:
    restore_checkpoint(run.run_dir, settings)
    store = LocalCheckpointStore(run.run_dir, run.run_id)
    whole = {ref.step: ref for path in store.newest_first() if (ref := _whole(path)) is not None}
    merged = settings.models_dir
    steps = sorted({*whole, *_merged_steps(merged, run.run_id)})
    wanted = int(step) if step.isdigit() else max(steps, default=0)
    folder = merged / f"merged-{run.run_id}-step-{wanted}"
    fetch(folder, settings)
    if (folder / VERIFIED).exists():
        return Named(run.run_id, folder, run.experiment, run.run_id, wanted)
    if wanted in whole and run.experiment.model.lora is not None:
        base = _base_of(run, settings)
        return Named(run.run_id, base, run.experiment, run.run_id, wanted, adapters=whole[wanted])
    found = ", ".join(map(str, steps)) or "none"
    raise ConfigError(
        f"run {run.run_id} has no merged model of step {wanted}; steps that are here: {found}. Merge it: rlflow merge "
        f"{run.run_id}. Only the checkpoints of a run with model.lora can be used without a merge."
    )


def _whole(path: Path) -> CheckpointRef | None:
    try:
        return checkpoint_ref(path, read_manifest(path))
    except (RlflowError, FileNotFoundError):
        return None


def _merged_steps(models: Path, run_id: str) -> list[int]:
    names = (path.name.removeprefix(f"merged-{run_id}-step-") for path in models.glob(f"merged-{run_id}-step-*"))
    return [int(name) for name in names if name.isdigit()]


def _base_of(run: Run, settings: Settings) -> Path:
    """
    Raises:
        ConfigError: the model that the run started from is gone.
    """
    spec = run.run_dir / "spec.json"
    model = run.experiment.model
    known = [Path(model.path)] if model.path != "tiny" else [tiny_folder(settings.models_dir, model.tiny)]
    if spec.exists():
        known.insert(0, Path(ModelRef.model_validate(json.loads(spec.read_bytes())["model"]).path))
    for folder in known:
        if (folder / "config.json").exists():
            return folder
    raise ConfigError(f"the model that run {run.run_id} started from is not in {known[0]}. Fetch it, or merge the run.")


def require_free(out: Path) -> None:
    """
    Raises:
        ConfigError: something is there.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not empty. Name a new folder, or remove that one.")
