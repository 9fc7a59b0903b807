"""The steps of ``rlflow evaluate MODEL --suite``: what the model is, and which experiments evaluate it."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.settings import Settings
from rlcore.artifacts import DatasetRef, DuplicatesRef, EvalReport, SuiteReport, SuiteReports
from rlcore.data.contamination import Duplicate, as_lines
from rlcore.errors import ConfigError
from rlcore.evaluation.rows import EvalRow, write_rows
from tasks import suites as suite_steps
from tasks.experiments import load_experiment
from tasks.lineage import Origin
from tasks.run import Run
from tasks.suites import SuiteOptions, base_experiment, clean_part, find_policy, suite_experiments

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
    clean = {"accuracy_clean": 0.5, "accuracy_clean_low": 0.25, "accuracy_clean_high": 0.75, "clean_problems": 2.0}
    suites = [
        SuiteReport(suite=name, report=report, set_aside=7, clean=part)
        for name, part in (("gsm8k", clean), ("aime24", {"clean_problems": 0.0}), ("aime25", {}))
    ]
    lines = SuiteReports(model="m", suites=tuple(suites)).markdown().splitlines()
    assert lines[2].endswith("| tokens | clean problems | accuracy, clean | 95 % interval |")
    assert [line.partition("| 12 |")[2] for line in lines[4:]] == [
        " 2 | 0.500 | 0.250 to 0.750 |", " 0 | - | - |", " - | - | - |",
    ]  # fmt: skip


def test_the_clean_part_of_a_suite_is_what_the_run_was_not_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the three problems a is right, and training has b."""
    rows = [EvalRow(name, 0, "q", "a", "c", 0.0, float(name == "a"), None, True, "stop", 1) for name in ("a", "b", "c")]
    write_rows(rows, tmp_path / "table.parquet")
    (tmp_path / "pairs.jsonl").write_text(as_lines([Duplicate("b", "t", "exact", 1.0, 0)]))
    asked: list[tuple[str, str]] = []

    def between(train: DatasetRef, evaluation: DatasetRef) -> DuplicatesRef:
        asked.append((train.digest, evaluation.digest))
        return DuplicatesRef.model_construct(path=str(tmp_path / "pairs.jsonl"))

    train = DatasetRef.model_construct(path=str(tmp_path), digest="train")
    monkeypatch.setattr(suite_steps, "duplicates_between", between)
    monkeypatch.setattr(suite_steps, "read_origins", lambda _: [Origin.model_construct(train=train)])
    dataset = DatasetRef.model_construct(path="/suite", digest="suite")
    report = EvalReport.model_construct(table=str(tmp_path / "table.parquet"))
    run = Run(run_id="r", run_dir=tmp_path, experiment=load_experiment("grpo-geo3k-tiny"))
    clean = clean_part(run, dataset, report)
    assert (clean["clean_problems"], clean["accuracy_clean"]) == (2, 0.5)
    assert asked == [("train", "suite")]
    assert clean_part(None, dataset, report) == {}
    unasked = load_experiment("grpo-geo3k-tiny", ["evaluation.find_duplicates=false"])
    assert clean_part(run.model_copy(update={"experiment": unasked}), dataset, report) == {}
    gone = Origin.model_construct(train=train.model_copy(update={"path": str(tmp_path / "gone")}))
    monkeypatch.setattr(suite_steps, "read_origins", lambda _: [gone])
    assert clean_part(run, dataset, report) == {}
