"""Files that run an experiment on a cluster.

``rayjob`` (KubeRay: one run with a cluster of its own), ``raycluster`` (KubeRay: a cluster that stays, with a Prefect
worker on it) or ``vemlp`` (a custom task). What differs between clusters is in the folder's values.yaml, or in a copy
of it. docs/howto/cluster.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from infra.deploy import Shape, k8s, vemlp
from infra.errors import DeploymentError
from rlcore.config import ExperimentConfig
from tasks.experiments import load_experiment
from tasks.run import check_run_id, new_run_id

V = TypeVar("V", bound=BaseModel)


def shape_of(experiment: ExperimentConfig, run_id: str, settings: Sequence[str]) -> Shape:
    """What a cluster needs to know about a run. The run's name is fixed now, so that each retry continues it."""
    words = [word for setting in settings for word in ("--set", setting)]
    return Shape(
        name=experiment.name,
        gpus=experiment.resources.devices,
        together=experiment.training.sequence_parallel,
        command=("rlflow", "train", experiment.name, "--run-id", run_id, *words),
    )


def documents(where: str, shape: Shape, values: Path | None) -> list[dict[str, Any]]:
    """
    Raises:
        DeploymentError: the values do not parse, or the experiment does not fit the nodes.
    """
    if where == "vemlp":
        return [vemlp.custom_task(_read(vemlp.VemlpValues, values or vemlp.VALUES), shape)]
    kubernetes = _read(k8s.KubernetesValues, values or k8s.VALUES)
    around = [k8s.volume_claim(kubernetes), k8s.network_policy(kubernetes)]
    if kubernetes.secret_store:
        around.append(k8s.external_secret(kubernetes))
    if where == "rayjob":
        return [*around, k8s.ray_job(kubernetes, shape)]
    return [
        *around,
        k8s.apply_job(kubernetes),
        k8s.light_worker(kubernetes),
        k8s.ray_cluster(kubernetes, shape),
        k8s.prefect_worker(kubernetes, shape),
    ]


def _read(model: type[V], path: Path) -> V:
    try:
        return model.model_validate(yaml.safe_load(path.read_text()))
    except (OSError, yaml.YAMLError, ValidationError) as error:
        raise DeploymentError(f"{path} cannot be used: {error}") from error


def cluster_files(
    where: str, experiment: str, overrides: Sequence[str], run_id: str | None, values: Path | None
) -> str:
    """YAML for KubeRay or veMLP. Without a ``run_id`` the run gets a new name."""
    config = load_experiment(experiment, overrides)
    shape = shape_of(config, check_run_id(run_id or new_run_id(experiment)), overrides)
    return yaml.safe_dump_all(documents(where, shape, values), sort_keys=False, width=120)
