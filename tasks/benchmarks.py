"""Benchmarks by name: whose problems, reward and settings count, for runs of which experiments. In ``prefect.yaml``,
beside the experiments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field

from rlcore.errors import ConfigError
from tasks.experiments import PREFECT_YAML


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
