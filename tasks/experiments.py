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


def load_experiment(name: str, overrides: Sequence[str] = ()) -> ExperimentConfig:
    """The experiment called ``name``, with ``key=value`` overrides.

    Raises:
        ConfigError: no such experiment, or values that break a rule.
    """
    known = experiment_values()
    if name not in known:
        raise ConfigError(f"no experiment {name!r} in prefect.yaml. Found there: {', '.join(sorted(known))}.")
    return build_experiment(known[name], overrides)


def experiment_values() -> dict[str, dict[str, Any]]:
    """Names of all experiments with their values, not validated."""
    experiments = yaml.safe_load(PREFECT_YAML.read_text())["definitions"]["experiments"]
    return {name: {"name": name, **values} for name, values in experiments.items()}


class Benchmark(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[a-z0-9-]+$")
    like: str  # experiment that gives validation problems, reward and evaluation settings
    of: tuple[str, ...]  # experiments whose runs are evaluated


def load_benchmarks(names: Sequence[str] | None = None) -> list[Benchmark]:
    """The benchmarks called ``names``, in the order of the file; None: all.

    Raises:
        ConfigError: there is no such benchmark.
    """
    values = yaml.safe_load(PREFECT_YAML.read_text())["definitions"]["benchmarks"]
    unknown = sorted(set(names or ()) - values.keys())
    if unknown:
        raise ConfigError(f"no benchmark {', '.join(unknown)} in prefect.yaml. Found there: {', '.join(values)}.")
    return [Benchmark(name=name, **value) for name, value in values.items() if names is None or name in names]


def deciding_benchmark(experiment: str) -> str | None:
    """Name of the benchmark that chooses the experiment's champion: the first one in the file. None: there is none."""
    return next((item.name for item in load_benchmarks() if experiment in item.of), None)


class Help:
    """A description for Prefect's form, where the description of a ``Field`` is lost."""

    def __init__(self, text: str) -> None:
        self.text = " ".join(text.split())

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {**handler(schema), "description": self.text}


class NoSecret:
    """Lets Prefect's server refuse secrets in parameters, which it stores before the flow can check them."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {**handler(schema), "pattern": f"^(?!.*({SECRET}))"}


Text = Annotated[str, NoSecret()]


def _like(model: type[BaseModel], name: str, empty: str = "Empty: the experiment's own.") -> tuple[Any, ...]:
    """Bounds and help text of a setting."""
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
    Help("Any other setting, as dotted key=value: training.warmup_steps=10. They override the parameters above."),
]
NewRun = Annotated[
    Annotated[str, Field(pattern=f"^{RUN_ID}$")] | None,
    Help("Name of a new run, or of one to continue. Empty: a new one."),
]
EvaluateOn = Annotated[
    str | None, Help("Experiment whose validation problems and evaluation settings are used. Empty: the run's own.")
]
Benchmarks = Annotated[list[str] | None, Help("Names of benchmarks of prefect.yaml. Empty: all.")]
EvaluatedModel = Annotated[
    Text,
    Help(
        "Name of a run, a model's folder, a Hugging Face id (owner/name), or the address of an OpenAI-compatible "
        "server (http://HOST:PORT/v1)."
    ),
]
Suites = Annotated[list[str], Help("Benchmark suites or groups of them, such as math-vl."), Field(min_length=1)]
ProblemsOfSuite = Annotated[int | None, Help("Evaluate only the first so many of each suite. Empty: all."), Field(ge=1)]
SuiteData = Annotated[Text | None, Help("Folder with one folder or file per suite. Empty: the hub's datasets.")]
ServedName = Annotated[str | None, Help("The model's name at the address. Empty: the model is no address.")]
KeyVariable = Annotated[str, Help("Environment variable of the worker with the key of the address.")]
Concurrency = Annotated[int, Help("Requests to the address at a time."), Field(ge=1)]
Confidence = Annotated[float, Help("Confidence level at which a new champion must be better."), Field(ge=0.5, lt=1)]
OlderThan = Annotated[
    int | None,
    Help("Leave alone what was made or used within so many days. Empty: RLFLOW_CLEAN_DAYS of the worker."),
    Field(ge=1),
]
ExistingRun = Annotated[str, Help("Name of a run: the name of its folder."), Field(pattern=f"^{RUN_ID}$")]
AllowChanges = Annotated[
    bool, Help("Continue a run with other values than it was started with; changes.jsonl in its folder records them.")
]

Grid = Annotated[list[str] | None, *_of_ablation("grid")]
Points = Annotated[list[list[str]] | None, *_of_ablation("points")]
Seeds = Annotated[list[int] | None, *_of_ablation("seeds")]
Rungs = Annotated[int | None, *_of_ablation("rungs")]
Keep = Annotated[float | None, *_of_ablation("keep")]
Retries = Annotated[int | None, *_of_ablation("retries")]
Trunk = Annotated[str | None, *_of_ablation("trunk")]
NewAblation = Annotated[
    str | None,
    Help("Name of a new ablation, or of one to continue; lower case, digits and dashes. Empty: a new one."),
    Field(pattern=f"^{ABLATION_ID}$"),
]
ExistingAblation = Annotated[
    str, Help("Name of an ablation: the name of its folder."), Field(pattern=f"^{ABLATION_ID}$")
]
PointName = Annotated[str, Help("Name of a point in the ablation's plan: base, p01, p02, ..."), Field(min_length=1)]
PointSeed = Annotated[int, Help("One of the ablation's seeds.")]
PointSteps = Annotated[int, Help("Optimizer step to train to, from the last checkpoint."), Field(ge=1)]

SETTINGS = {
    "steps": "training.steps",
    "seed": "seed",
    "learning_rate": "training.learning_rate",
    "workers": "resources.workers",
    "model": "model.path",
    "train_data": "data.train",
    "validation_data": "data.validation",
}
"""Parameter of a flow to the setting that it changes."""


def configure(
    experiment: str,
    overrides: Sequence[str] | None = None,
    *,
    run_id: str | None = None,
    **parameters: str | int | float | None,
) -> ExperimentConfig:
    """The experiment called ``experiment`` with ``parameters`` (keys of ``SETTINGS``) and then ``overrides``.

    Args:
        run_id: if a run of this name and experiment exists, start from its values instead of those of prefect.yaml.
        parameters: None stands for a parameter that is not given.

    Raises:
        ConfigError: no such experiment, or values that break a rule.
    """
    given = [f"{SETTINGS[name]}={json.dumps(value)}" for name, value in parameters.items() if value is not None]
    words = [*given, *(overrides or [])]
    own = experiment_of_run(run_id, experiment)
    config = load_experiment(experiment, words) if own is None else build_experiment(own.model_dump(mode="json"), words)
    _require_used(config.data, words)
    return config


def _require_used(data: DataConfig, overrides: Sequence[str]) -> None:
    """
    Raises:
        ConfigError: an override names a single source, and the mixture stands in its place.
    """
    unused = [f"data.{split}" for split in ("train", "validation")
              if data.sources(split) and any(word.startswith(f"data.{split}=") for word in overrides)]  # fmt: skip
    if unused:
        raise ConfigError(
            f"{' and '.join(unused)} is given, and the experiment has data.mixture with {', '.join(data.mixture)}, "
            "which stands in its place. Add the source to data.mixture, or set data.mixture={} for a single source."
        )
