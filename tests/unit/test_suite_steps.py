"""The steps of ``rlflow evaluate MODEL --suite``: what the model is, and which experiments evaluate it."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.settings import Settings
from rlcore.artifacts import EvalReport, SuiteReport, SuiteReports
from rlcore.errors import ConfigError
from tasks.suites import SuiteOptions, base_experiment, find_policy, suite_experiments

ADDRESS = "http://host:8000/v1"


@pytest.fixture(autouse=True)
def _data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLFLOW_DATA_DIR", str(tmp_path / "data"))


def options(model: str, **more: object) -> SuiteOptions:
    return SuiteOptions.model_validate({"model": model, "suites": ("gsm8k", "aime"), **more})


def test_an_endpoint_has_no_tokenizer_and_no_limit_on_prompts() -> None:
    asked = options(ADDRESS + "/", served_name="m", problems=3, overrides=("rollout.max_completion_tokens=99",))
    base = base_experiment(asked, Settings())
    experiments = suite_experiments(asked, base)
    assert list(experiments) == ["gsm8k", "aime24", "aime25"]
    assert {item.evaluation.problems for item in experiments.values()} == {3}
    for item in experiments.values():
        assert (item.model.path, item.data.max_prompt_tokens) == ("tiny", 1_000_000)
        assert item.rollout.max_completion_tokens == 99
    policy = find_policy(asked, base)
    assert (policy.name, policy.policy.path, policy.base) == ("m-host-8000", f"m at {ADDRESS}", None)


def test_a_folder_is_a_model_and_a_bare_name_a_run() -> None:
    asked = options("./folder", overrides=("model.trust_remote_code=true", "reward.thoughts=strip"))
    base = base_experiment(asked, Settings())
    assert (base.model.path, base.model.trust_remote_code) == ("./folder", True)
    assert suite_experiments(asked, base)["gsm8k"].reward.thoughts == "strip"
    with pytest.raises(ConfigError, match="no run 'folder'"):
        base_experiment(options("folder"), Settings())


def test_refused() -> None:
    with pytest.raises(ConfigError, match="--model"):
        base_experiment(options(ADDRESS), Settings())
    with pytest.raises(ConfigError, match="Leave it out"):
        base_experiment(options("./folder", served_name="m"), Settings())
    with pytest.raises(ConfigError, match="password") as error:
        base_experiment(options("http://me:hunter2@host/v1", served_name="m"), Settings())
    assert "hunter2" not in str(error.value)


def test_the_table() -> None:
    report = EvalReport(
        policy="p", step=0, dataset_digest="d", num_problems=3, samples_per_problem=4, accuracy=0.25, accuracy_low=0.1,
        accuracy_high=0.5, reward=0, reward_low=0, reward_high=0, truncated=0.125, ungraded=0, table="t", seconds=1,
        details={"pass_at_2": 0.4, "pass_at_2_low": 0.2, "pass_at_4": 0.5, "completion_tokens_mean": 12.4},
    )  # fmt: skip
    text = SuiteReports(model="m", suites=(SuiteReport(suite="gsm8k", report=report, set_aside=7),)).markdown()
    row = "| gsm8k | 0.250 | 0.100 to 0.500 | 0.400 (k=2), 0.500 (k=4) | 3 | 4 | 7 | 12.5% | 12 |"
    assert text.splitlines()[-1] == row
    assert text.splitlines()[2].count("|") == row.count("|")
