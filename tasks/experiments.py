"""Experiments by name. ``prefect.yaml`` is the only home of their values, under ``definitions``, which Prefect
passes by; a deployment names one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from rlcore.config import ExperimentConfig, build_experiment
from rlcore.errors import ConfigError

PREFECT_YAML = Path(__file__).resolve().parent.parent / "prefect.yaml"


def load_experiment(name: str, overrides: Sequence[str] = (), path: Path = PREFECT_YAML) -> ExperimentConfig:
    """The experiment called ``name`` with ``key=value`` overrides.

    Raises:
        ConfigError: no such experiment, or values that break a rule.
    """
    found = experiment_values(path)
    if name not in found:
        raise ConfigError(f"no experiment {name!r} in {path.name}. Found there: {', '.join(sorted(found))}.")
    return build_experiment(found[name], overrides)


def experiment_values(path: Path = PREFECT_YAML) -> dict[str, dict[str, Any]]:
    """Name to values, unchecked."""
    experiments = yaml.safe_load(path.read_text())["definitions"]["experiments"]
    return {name: {"name": name, **values} for name, values in experiments.items()}
