"""Experiments by name. ``prefect.yaml`` is the only home of their values, under ``definitions``, which Prefect
passes by; a deployment names one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field

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


class Benchmark(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[a-z0-9-]+$")
    like: str  # experiment whose validation problems, reward and evaluation settings count
    of: tuple[str, ...]  # experiments whose runs are evaluated


def load_benchmarks(names: Sequence[str] | None = None, path: Path = PREFECT_YAML) -> list[Benchmark]:
    """Those called ``names``, in the file's order; None: all.

    Raises:
        ConfigError: there is no such benchmark.
    """
    values = yaml.safe_load(path.read_text())["definitions"]["benchmarks"]
    unknown = sorted(set(names or ()) - values.keys())
    if unknown:
        raise ConfigError(f"no benchmark {', '.join(unknown)} in {path.name}. Found there: {', '.join(values)}.")
    return [Benchmark(name=name, **value) for name, value in values.items() if names is None or name in names]


def deciding_benchmark(experiment: str, path: Path = PREFECT_YAML) -> str | None:
    """Name of the benchmark that chooses the experiment's champion: its first one in the file. None: it has none."""
    return next((item.name for item in load_benchmarks(path=path) if experiment in item.of), None)
