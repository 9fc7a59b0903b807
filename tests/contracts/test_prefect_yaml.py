"""prefect.yaml: every deployment has an entry point that exists and an experiment that holds together."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.utilities.schema_tools.validation import ValidationError

from rlcore.config import ExperimentConfig, RecoveryConfig
from rlcore.errors import ConfigError
from tasks.driver.progress import CHECKPOINT_COMMITTED
from tasks.experiments import PREFECT_YAML, SETTINGS, configure, experiment_values, load_benchmarks, load_experiment

ROOT = Path(__file__).resolve().parents[2]
DEPLOYMENTS = yaml.safe_load(PREFECT_YAML.read_text())["deployments"]


@pytest.mark.parametrize("name", sorted(experiment_values()))
def test_experiment_is_valid(name: str) -> None:
    assert isinstance(load_experiment(name), ExperimentConfig)


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda item: item["name"])
def test_entrypoint_is_a_flow(deployment: dict[str, str]) -> None:
    file, _, function = deployment["entrypoint"].partition(":")
    functions = [node for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)]
    flow = next(node for node in functions if node.name == function)
    assert any(isinstance(item, ast.Call) and item.func.id == "flow" for item in flow.decorator_list)


def test_every_experiment_has_the_deployment_of_its_name() -> None:
    named = {item["name"]: item["parameters"]["experiment"] for item in DEPLOYMENTS if trains(item)}
    assert named == {name: name for name in experiment_values()}


def trains(deployment: dict[str, Any]) -> bool:
    return bool(deployment["entrypoint"] == "flows/train_grpo.py:train_grpo")


@pytest.mark.parametrize("deployment", [item for item in DEPLOYMENTS if "experiment" in item.get("parameters", {})],
                         ids=lambda item: item["name"])  # fmt: skip
def test_its_parameters_give_an_experiment(deployment: dict[str, Any]) -> None:
    assert isinstance(configure(**deployment["parameters"]), ExperimentConfig)


def schema_of(deployment: dict[str, Any]) -> dict[str, Any]:
    """By which Prefect's server checks parameters and draws the form."""
    from prefect.utilities.callables import parameter_schema

    file, _, function = deployment["entrypoint"].partition(":")
    flow = getattr(importlib.import_module(file.removesuffix(".py").replace("/", ".")), function)
    return parameter_schema(flow).model_dump_for_openapi()


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda item: item["name"])
def test_the_form_describes_every_parameter(deployment: dict[str, Any]) -> None:
    properties = schema_of(deployment)["properties"]
    assert not [name for name, shown in properties.items() if not shown.get("description")]


def test_the_form_shows_the_bounds_of_the_setting() -> None:
    shown = schema_of(next(item for item in DEPLOYMENTS if trains(item)))["properties"]
    assert shown["steps"]["anyOf"][0] == {"minimum": 1, "type": "integer"}
    assert shown["steps"]["description"].startswith("Optimizer steps of the whole run.")
    assert shown["learning_rate"]["anyOf"][0] == {"minimum": 0, "type": "number"}
    overrides = shown["overrides"]["anyOf"][0]
    assert overrides["type"] == "array"
    assert overrides["items"]["type"] == "string"
    assert re.search(overrides["items"]["pattern"], "training.steps=4")
    assert not re.search(overrides["items"]["pattern"], "data.train=s3://name:password@host/x")


ASKED_FOR: dict[str, dict[str, Any]] = {  # deployment to the parameters that whoever runs it has to give
    "evaluate": {"run_id": "grpo-geo3k-20260101-120000-ab12"},
    "evaluate-suites": {"model": "grpo-geo3k-20260101-120000-ab12", "suites": ["math-vl"]},
    "merge": {"run_id": "grpo-geo3k-20260101-120000-ab12"},
    "ablation-point": {"ablation": "grpo-geo3k-20260101-120000-ab12", "point": "p01", "seed": 0, "steps": 40},
}


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda item: item["name"])
def test_a_deployment_asks_for_what_its_flow_needs(deployment: dict[str, Any]) -> None:
    """By the check that Prefect's server makes when a run is created. tests/long/test_stack.py deploys them."""
    from prefect.cli.deploy._triggers import DeploymentTriggerAdapter
    from prefect.utilities.schema_tools.validation import validate

    schema, asked_for = schema_of(deployment), ASKED_FOR.get(deployment["name"], {})
    given = {**deployment.get("parameters", {}), **asked_for}
    validate(given, schema, raise_on_error=True, preprocess=False)
    for name in asked_for:
        without = {key: value for key, value in given.items() if key != name}
        with pytest.raises(ValidationError, match=f"'{name}' is a required property"):
            validate(without, schema, raise_on_error=True, preprocess=False)
    for trigger in deployment.get("triggers", []):
        DeploymentTriggerAdapter.validate_python(trigger)


def test_recover_looks_at_runs_and_ablations_and_only_starts_itself() -> None:
    """Matched by flow name: heartbeats carry no deployment name. Its own crashes must not start it again."""
    from flows.ablate import ablate
    from flows.train_grpo import train_grpo

    (recover,) = [item for item in DEPLOYMENTS if item["name"] == "recover"]
    crashed, silent = recover["triggers"]
    for trigger in (crashed, silent):
        names = [train_grpo.name, ablate.name]
        assert trigger["match_related"] == {"prefect.resource.role": "flow", "prefect.resource.name": names}
        assert "actions" not in trigger
    assert crashed["expect"] == ["prefect.flow-run.Crashed"]
    beats = int(recover["work_pool"]["job_variables"]["env"]["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"])
    assert silent["within"] >= RecoveryConfig().silence_seconds + beats


def test_benchmarks_are_of_experiments_and_experiments_have_one() -> None:
    known = experiment_values().keys()
    benchmarks = load_benchmarks()
    assert {name for item in benchmarks for name in (item.like, *item.of)} <= known
    without = known - {name for item in benchmarks for name in item.of}
    assert without == {"grpo-geo3k-demo-real"}  # two steps that nobody compares


def test_a_committed_checkpoint_starts_its_evaluation() -> None:
    (latest,) = [item for item in DEPLOYMENTS if item["name"] == "evaluate-latest"]
    (trigger,) = latest["triggers"]
    assert trigger["expect"] == [CHECKPOINT_COMMITTED]
    assert trigger["match"] == {"prefect.resource.id": "rlflow.run.*"}


def test_flows_are_short() -> None:
    for path in (ROOT / "flows").glob("*.py"):
        assert len(path.read_text().splitlines()) <= 64, path


def test_the_main_experiment_is_the_published_one() -> None:
    experiment = load_experiment("grpo-geo3k")
    assert experiment.training.problems_per_batch // experiment.training.mini_batches == 128
    assert (experiment.rollout.group_size, experiment.training.learning_rate) == (5, 1e-6)


def test_the_3b_experiment_is_the_recorded_one() -> None:
    experiment = load_experiment("grpo-geo3k-3b")
    assert (experiment.training.problems_per_batch, experiment.rollout.group_size) == (256, 6)
    assert experiment.training.problems_per_batch // experiment.training.mini_batches == 128


def test_dapo_is_the_paper_s_except_for_the_model() -> None:
    """arXiv:2503.14476, section 4.1: 512 problems x 16, sixteen updates, 16384 tokens and 4096 more of soft penalty."""
    experiment = load_experiment("dapo-math17k")
    loss, training = experiment.algorithm.loss, experiment.training
    assert (loss.clip_low, loss.clip_high, experiment.algorithm.kl.coefficient) == (0.2, 0.28, 0)
    assert (training.problems_per_batch, experiment.rollout.group_size, training.mini_batches) == (512, 16, 16)
    assert experiment.reward.overlong.buffer_tokens == 4096
    assert experiment.rollout.max_completion_tokens == 16384 + 4096
    assert experiment.algorithm.dynamic_sampling is not None


@pytest.mark.parametrize("name", sorted(experiment_values()))
def test_template_and_reward_ask_for_the_same_answer_format(name: str) -> None:
    experiment = load_experiment(name)
    formats = {
        "boxed": {"math"},
        "math": {"math"},
        "gsm8k": {"gsm8k"},
        "r1v": {"clevr_count", "geoqa", "r1v"},
        "countdown": {"countdown"},
        "dapo": {"dapo"},
        "tiny": {"math", "gsm8k", "countdown"},  # the warm start has taught it
    }
    assert experiment.reward.name in formats[experiment.data.template]


@pytest.mark.parametrize("name", ["grpo-gsm8k-tiny", "grpo-countdown-tiny"])
def test_the_tiny_text_policies_play_what_they_were_warmed_up_on(name: str) -> None:
    from rlcore.models.tiny import GAME

    experiment = load_experiment(name)
    assert experiment.data.train.split("@")[0] == experiment.model.tiny.task
    if experiment.model.tiny.task == "countdown":
        assert experiment.data.countdown == GAME


def test_parameters_set_what_they_are_called_and_overrides_count_over_them() -> None:
    from flows.train_grpo import train_grpo

    given = {
        "steps": 80, "seed": 3, "learning_rate": 2e-4, "workers": 1, "model": "m", "train_data": "t",
        "validation_data": "v",
    }  # fmt: skip
    assert given.keys() == SETTINGS.keys() <= inspect.signature(train_grpo.fn).parameters.keys()
    flat = configure("grpo-geo3k-tiny", **given).flat()
    assert {name: flat[SETTINGS[name]] for name in given} == given
    assert configure("grpo-geo3k-tiny", ["training.steps=40"], steps=80, seed=None).training.steps == 40


def test_overrides_reach_the_experiment() -> None:
    assert load_experiment("grpo-geo3k-tiny", ["training.steps=4", "segment.steps=2"]).num_segments == 2


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no experiment 'grpo-geo4k'.*grpo-geo3k-tiny"):
        load_experiment("grpo-geo4k")


def test_unknown_key_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"training\.step: unknown key\. Did you mean 'steps'"):
        load_experiment("grpo-geo3k-tiny", ["training.step=4"])
