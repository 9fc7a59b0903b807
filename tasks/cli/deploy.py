"""Files for clusters, of an experiment by its name: ``python -m tasks.cli.deploy WHERE EXPERIMENT > FILE``.

WHERE is ``rayjob`` (KubeRay: one run with a cluster of its own), ``raycluster`` (KubeRay: a cluster that stays, with a
Prefect worker on it) or ``vemlp`` (a custom task). What differs between clusters is in the folder's values.yaml, or in
a copy of it that --values names. docs/howto/cluster.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from infra.deploy import Shape, k8s, vemlp
from infra.errors import DeploymentError, InfraError
from rlcore.config import ExperimentConfig
from rlcore.errors import RlflowError
from tasks.experiments import load_experiment
from tasks.run import checked_run_id, new_run_id

V = TypeVar("V", bound=BaseModel)


def shape_of(experiment: ExperimentConfig, run_id: str, settings: Sequence[str]) -> Shape:
    """What a cluster has to know of a run. The name of the run is settled now, so that each retry continues it."""
    chosen = [word for setting in settings for word in ("--set", setting)]
    return Shape(
        name=experiment.name,
        gpus=experiment.resources.devices,
        together=experiment.training.sequence_parallel,
        command=("python", "-m", "flows.train_grpo", experiment.name, "--run-id", run_id, *chosen),
    )


def documents(where: str, shape: Shape, values: Path | None) -> list[dict[str, Any]]:
    """
    Raises:
        DeploymentError: the values do not parse, or the experiment does not fit the nodes.
    """
    if where == "vemlp":
        return [vemlp.custom_task(_read(vemlp.VemlpValues, values or vemlp.VALUES), shape)]
    kubernetes = _read(k8s.KubernetesValues, values or k8s.VALUES)
    if where == "rayjob":
        return [k8s.volume_claim(kubernetes), k8s.ray_job(kubernetes, shape)]
    return [
        k8s.volume_claim(kubernetes),
        k8s.ray_cluster(kubernetes, shape),
        k8s.prefect_worker(kubernetes, shape),
    ]


def _read(model: type[V], path: Path) -> V:
    try:
        return model.model_validate(yaml.safe_load(path.read_text()))
    except (OSError, yaml.YAMLError, ValidationError) as error:
        raise DeploymentError(f"{path} cannot be used: {error}") from error


def main(words: Sequence[str]) -> str:
    parser = argparse.ArgumentParser(prog="python -m tasks.cli.deploy", description=__doc__)
    parser.add_argument("where", choices=("rayjob", "raycluster", "vemlp"))
    parser.add_argument("experiment", help="a name in prefect.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a value of it")
    parser.add_argument("--run-id", help="name the run; default: a new name")
    parser.add_argument("--values", type=Path, help="instead of the folder's values.yaml")
    options = parser.parse_args(words)
    experiment = load_experiment(options.experiment, options.set)
    run_id = checked_run_id(options.run_id or new_run_id(options.experiment))
    shape = shape_of(experiment, run_id, options.set)
    return yaml.safe_dump_all(documents(options.where, shape, options.values), sort_keys=False, width=120)


if __name__ == "__main__":
    try:
        sys.stdout.write(main(sys.argv[1:]))
    except (RlflowError, InfraError) as error:
        sys.exit(str(error))
