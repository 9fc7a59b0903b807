"""prefect.yaml: every deployment has an entry point that exists and an experiment that holds together."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlcore.config import ExperimentConfig, RecoveryConfig
from rlcore.errors import ConfigError
from tasks.experiments import PREFECT_YAML, experiment_values, load_experiment

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


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda item: item["name"])
def test_the_server_takes_the_deployment(deployment: dict[str, Any]) -> None:
    """Prefect's server checks parameters by the flow's JSON schema, which knows no default for a union's tag."""
    from prefect.cli.deploy._triggers import DeploymentTriggerAdapter
    from prefect.utilities.callables import parameter_schema
    from prefect.utilities.schema_tools.validation import validate

    file, _, function = deployment["entrypoint"].partition(":")
    flow = getattr(importlib.import_module(file.removesuffix(".py").replace("/", ".")), function)
    schema = parameter_schema(flow).model_dump_for_openapi()
    given = deployment.get("parameters", {})
    missing_at_start = {
        key: "run" for key in schema.get("required", []) if key not in given
    }  # given by whoever runs it
    validate({**given, **missing_at_start}, schema, raise_on_error=True, preprocess=False)
    for trigger in deployment.get("triggers", []):
        DeploymentTriggerAdapter.validate_python(trigger)


def test_recover_looks_at_training_runs_alone_and_only_starts_itself() -> None:
    """Matched by flow name: heartbeats carry no deployment name. Its own crashes must not start it again."""
    from flows.train_grpo import grpo_geo3k

    (recover,) = [item for item in DEPLOYMENTS if item["name"] == "recover"]
    crashed, silent = recover["triggers"]
    for trigger in (crashed, silent):
        assert trigger["match_related"] == {"prefect.resource.role": "flow", "prefect.resource.name": grpo_geo3k.name}
        assert "actions" not in trigger
    assert crashed["expect"] == ["prefect.flow-run.Crashed"]
    beats = int(recover["work_pool"]["job_variables"]["env"]["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"])
    assert silent["within"] >= RecoveryConfig().silence_seconds + beats


def test_flows_are_short() -> None:
    for path in (ROOT / "flows").glob("*.py"):
        assert len(path.read_text().splitlines()) <= 60, path


def test_the_main_experiment_is_the_published_one() -> None:
    experiment = load_experiment("grpo-geo3k")
    assert experiment.training.problems_per_step // experiment.training.updates_per_batch == 128
    assert (experiment.rollout.group_size, experiment.training.learning_rate) == (5, 1e-6)


def test_dapo_is_the_paper_s_except_for_the_model() -> None:
    """arXiv:2503.14476, section 4.1: 512 problems x 16, sixteen updates, 16384 tokens and 4096 more of soft penalty."""
    experiment = load_experiment("dapo-math17k")
    loss, training = experiment.algorithm.loss, experiment.training
    assert (loss.clip_low, loss.clip_high, experiment.algorithm.kl.coefficient) == (0.2, 0.28, 0)
    assert (training.problems_per_step, experiment.rollout.group_size, training.updates_per_batch) == (512, 16, 16)
    assert experiment.reward.overlong.buffer_tokens == 4096
    assert experiment.rollout.max_completion_tokens == 16384 + 4096
    assert experiment.algorithm.dynamic_sampling is not None


@pytest.mark.parametrize("name", sorted(experiment_values()))
def test_template_and_reward_ask_for_the_same_answer_format(name: str) -> None:
    experiment = load_experiment(name)
    formats = {
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
    from rlcore.models.tiny_text import GAME

    experiment = load_experiment(name)
    assert experiment.data.train.split("@")[0] == experiment.model.tiny.task
    if experiment.model.tiny.task == "countdown":
        assert experiment.data.countdown == GAME


def test_overrides_reach_the_experiment() -> None:
    assert load_experiment("grpo-geo3k-tiny", ["training.steps=4", "segment.steps=2"]).num_segments == 2


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no experiment 'grpo-geo4k'.*grpo-geo3k-tiny"):
        load_experiment("grpo-geo4k")


def test_unknown_key_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"training\.step: unknown key\. Did you mean 'steps'"):
        load_experiment("grpo-geo3k-tiny", ["training.step=4"])
