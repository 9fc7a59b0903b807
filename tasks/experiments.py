"""Experiments of ``prefect.yaml`` by name, and the parameters with which a flow may change them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from rlcore.config import (
    AblationConfig,
    DataConfig,
    ExperimentConfig,
    ModelConfig,
    ResourceConfig,
    TrainingConfig,
    build_experiment,
)
from rlcore.config.build import SECRET
from rlcore.errors import ConfigError
from tasks.run import ABLATION_ID, RUN_ID, experiment_of_run

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


class Help:
    """A description that Prefect's form shows: Prefect replaces the one of a ``Field`` by nothing."""

    def __init__(self, text: str) -> None:
        self.text = " ".join(text.split())

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {**handler(schema), "description": self.text}


class NoSecret:
    """Prefect stores what a flow is called with before the flow can look at it, so its server is told to refuse it."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {**handler(schema), "pattern": f"^(?!.*({SECRET}))"}


Text = Annotated[str, NoSecret()]


def _like(model: type[BaseModel], name: str, empty: str = "Empty: the experiment's own.") -> tuple[Any, ...]:
    """Bounds and help of a setting."""
    field = model.model_fields[name]
    return (*field.metadata, Help(f"{field.description} {empty}"))


def _of_ablation(name: str) -> tuple[Any, ...]:
    default = AblationConfig.model_fields[name].default
    return _like(AblationConfig, name, empty=f"Empty: {list(default) if isinstance(default, tuple) else default}.")


Steps = Annotated[int | None, *_like(TrainingConfig, "steps")]
Seed = Annotated[int | None, *_like(ExperimentConfig, "seed")]
LearningRate = Annotated[float | None, *_like(TrainingConfig, "learning_rate")]
Workers = Annotated[int | None, *_like(ResourceConfig, "workers")]
Model = Annotated[Text | None, *_like(ModelConfig, "path")]
TrainData = Annotated[Text | None, *_like(DataConfig, "train")]
ValidationData = Annotated[Text | None, *_like(DataConfig, "validation")]

Experiment = Annotated[str, Help("Name of an experiment of prefect.yaml.")]
Overrides = Annotated[
    list[Text] | None,
    Help("Any other setting, as dotted key=value: training.warmup_steps=10. They count over the parameters above."),
]
NewRun = Annotated[
    Annotated[str, Field(pattern=f"^{RUN_ID}$")] | None,
    Help("Name of a new run, or of one to continue. Empty: a new one."),
]
EvaluateOn = Annotated[
    str | None, Help("Experiment whose validation problems and evaluation settings count. Empty: the run's own.")
]
Benchmarks = Annotated[list[str] | None, Help("Names of benchmarks of prefect.yaml. Empty: all.")]
Confidence = Annotated[float, Help("Of the interval that must lie above 0 for a new champion."), Field(ge=0.5, lt=1)]
ExistingRun = Annotated[str, Help("Name of a run, as its folder is called."), Field(pattern=f"^{RUN_ID}$")]
AllowChanges = Annotated[
    bool, Help("Continue a run with other values than it was started with; changes.jsonl in its folder records them.")
]

Grid = Annotated[list[str] | None, *_of_ablation("grid")]
Points = Annotated[list[list[str]] | None, *_of_ablation("points")]
Seeds = Annotated[list[int] | None, *_of_ablation("seeds")]
Rungs = Annotated[int | None, *_of_ablation("rungs")]
Keep = Annotated[float | None, *_of_ablation("keep")]
Retries = Annotated[int | None, *_of_ablation("retries")]
NewAblation = Annotated[
    str | None,
    Help("Name of a new ablation, or of one to continue; lower case, digits and dashes. Empty: a new one."),
    Field(pattern=f"^{ABLATION_ID}$"),
]
ExistingAblation = Annotated[
    str, Help("Name of an ablation, as its folder is called."), Field(pattern=f"^{ABLATION_ID}$")
]
PointName = Annotated[str, Help("Of the ablation's plan: base, p01, p02, ..."), Field(min_length=1)]
PointSeed = Annotated[int, Help("One of the ablation's seeds.")]
PointSteps = Annotated[int, Help("Optimizer steps to train to; the run goes on from what it has."), Field(ge=1)]

SETTINGS = {
    "steps": "training.steps",
    "seed": "seed",
    "learning_rate": "training.learning_rate",
    "workers": "resources.workers",
    "model": "model.path",
    "train_data": "data.train",
    "validation_data": "data.validation",
}
"""Parameter to the dotted key that it sets."""


def configure(
    experiment: str,
    overrides: Sequence[str] | None = None,
    *,
    run_id: str | None = None,
    **parameters: str | int | float | None,
) -> ExperimentConfig:
    """The experiment called ``experiment`` with ``parameters`` (keys of ``SETTINGS``; None: not given) and, over
    them, ``overrides``.

    Args:
        run_id: a run of this experiment that has this name keeps its own values, whatever prefect.yaml says now.

    Raises:
        ConfigError: no such experiment, or values that break a rule.
    """
    given = [f"{SETTINGS[name]}={json.dumps(value)}" for name, value in parameters.items() if value is not None]
    said = [*given, *(overrides or [])]
    own = experiment_of_run(run_id, experiment)
    return load_experiment(experiment, said) if own is None else build_experiment(own.model_dump(mode="json"), said)
