"""Experiments by name. ``prefect.yaml`` is the only home of their values: one deployment each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from rlcore.config import ExperimentConfig, build_experiment
from rlcore.errors import ConfigError

PREFECT_YAML = Path(__file__).resolve().parent.parent / "prefect.yaml"


def load_experiment(name: str, overrides: Sequence[str] = (), path: Path = PREFECT_YAML) -> ExperimentConfig:
    """The experiment of deployment ``name`` with ``key=value`` overrides.

    Raises:
        ConfigError: no such deployment, or values that break a rule.
    """
    found = experiment_values(path)
    if name not in found:
        raise ConfigError(f"no experiment {name!r} in {path.name}. Found there: {', '.join(sorted(found))}.")
    return build_experiment(found[name], overrides)


def experiment_values(path: Path = PREFECT_YAML) -> dict[str, dict[str, Any]]:
    """Deployment name to its experiment's values, unchecked; deployments without one are left out."""
    deployments = yaml.safe_load(path.read_text())["deployments"]
    return {
        item["name"]: item["parameters"]["experiment"]
        for item in deployments
        if "experiment" in item.get("parameters", {})
    }
